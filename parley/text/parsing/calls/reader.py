"""Reads a block of tool calls while it arrives: its marks, and between them calls of the form's shape.

Reading tolerates the usual mistakes of models (a missing or surplus brace, a line break inside a string, a missing
closing mark) and never evaluates the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from parley.text.parsing.calls import elements, objects, python, tags
from parley.text.parsing.calls.form import Form
from parley.text.parsing.calls.scanner import Garbled, Scan, Wait
from parley.text.parsing.calls.tools import Tools
from parley.types import CallDelta

SHAPES: dict[str, Callable[[Scan], Wait]] = {
    "object": objects.whole,
    "named": objects.named,
    "tags": tags.call,
    "elements": elements.call,
    "python": python.call,
    "loose": python.loose,
    "keyed": objects.keyed,
}
_SLIPS = re.compile(r"[ \t\r\n}]*")  # characters that may wrongly precede a closing mark


class CallReader(Scan):
    """Reads one block of calls, from its first mark on.

    ``ended``: no more text belongs to the block. ``raw_text``: consumed text that belongs to no call: all of it until
    the first call is announced, later the text that could not be read as a further call.
    """

    def __init__(self, form: Form, index: int, new_id: Callable[[], str], tools: Tools):
        super().__init__(form, index, new_id, tools)
        self.ended = False
        self._raw: list[str] = []
        self._start = 0  # where in the text the part that belongs to no call starts
        self._run = self._block()

    @property
    def raw(self) -> str:
        """Return the consumed text that belongs to no call."""
        return "".join(self._raw)

    def read(self, text: str, start: int) -> tuple[int, list[CallDelta]]:
        """Read from ``start``. Return the position reached and the new deltas; pass the rest again next time."""
        self.text, self.at, self._start, self._deltas = text, start, start, []
        try:
            next(self._run)
        except (StopIteration, Garbled):
            self.ended = True
        if not self.inside:
            self._raw.append(text[self._start : self.at])
        self.give()
        return self.at, self._deltas

    def finish(self, rest: str) -> tuple[list[CallDelta], str]:
        """End the text, with ``rest`` unread. Return the last deltas and the text that is not part of a call."""
        self._deltas = []
        if self.inside:
            if self.tail is not None:
                self.say(self.tail(rest))
            self.give()
            return self._deltas, ""
        rest = self.raw + rest
        bare = rest.strip()
        ends = (mark.strip() for mark in (*self.form.after, *self.form.close))
        belongs = self.calls > 0 and (not bare or any(mark.startswith(bare) for mark in ends))
        return [], "" if belongs else rest

    def announce(self, name: str, id: str | None = None) -> None:
        """Announce the call; text before it is not raw any more. Raises MalformedCall."""
        super().announce(name, id)
        self._raw.clear()

    def leave(self) -> None:
        """Complete the open call."""
        super().leave()
        self._start = self.at

    def _block(self) -> Wait:
        """Read the whole block."""
        form = self.form
        for mark in form.open:
            yield from self.expect(mark.strip())
        while True:
            for mark in form.each:
                yield from self.expect(mark.strip())
            try:
                yield from SHAPES[form.shape](self)
            except Garbled:
                if not self.inside:
                    raise
            self.leave()
            found = not form.after
            for mark in form.after:
                found = (yield from self._ending(mark.strip())) or found
            if not found or not (yield from self._another()):
                return

    def _another(self) -> Generator[None, None, bool]:
        """Whether another call must follow."""
        between = self.form.between.strip()
        if (not between and not self.form.close) or (yield from self._closed()):
            return False
        if between:
            yield from self.peek()
            if not (yield from self.stands(between)):
                # Models leave out the separator as well after JSON objects that have no closing mark.
                return self.form.shape == "object" and not self.form.close and self.text[self.at] == "{"
            self.at += len(between)
            return not (yield from self._closed())
        return True

    def _closed(self) -> Generator[None, None, bool]:
        """Step over the marks that close the block, if they come."""
        if not self.form.close or not (yield from self._ending(self.form.close[0].strip())):
            return False
        for mark in self.form.close[1:]:
            yield from self._ending(mark.strip())
        return True

    def _ending(self, mark: str) -> Generator[None, None, bool]:
        """Step over a closing mark, and over characters that models put before it by mistake."""
        yield from self.skip(_SLIPS)
        if not (yield from self.stands(mark)):
            return False
        self.at += len(mark)
        self._raw.clear()
        self._start = self.at
        return True
