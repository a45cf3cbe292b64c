"""Reads a block of tool calls while it arrives: its marks, and between them calls of the form's shape.

Reading tolerates the usual mistakes of models (a missing or surplus brace, a line break inside a string, a missing
closing mark) and never evaluates the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from parley.text.parsing.calls import elements, objects, python, tags
from parley.text.parsing.calls.form import CallForm
from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps
from parley.text.parsing.calls.tools import RequestTools
from parley.types import ToolCallDelta

SHAPE_READERS: dict[str, Callable[[CallScanner], ReadSteps]] = {
    "object": objects.read_object_call,
    "named": objects.read_named_call,
    "tags": tags.read_tags_call,
    "elements": elements.read_elements_call,
    "python": python.read_python_call,
    "loose": python.read_loose_call,
    "keyed": objects.read_keyed_call,
}
_SURPLUS_CHARACTERS = re.compile(r"[ \t\r\n}]*")  # characters that may wrongly precede a closing mark


class CallReader(CallScanner):
    """Reads one block of calls, from its first mark on.

    ``ended``: no more text belongs to the block. ``raw_text``: consumed text that belongs to no call: all of it until
    the first call is announced, later the text that could not be read as a further call.
    """

    def __init__(self, form: CallForm, index: int, new_id: Callable[[], str], tools: RequestTools):
        super().__init__(form, index, new_id, tools)
        self.ended = False
        self._raw_pieces: list[str] = []
        self._start = 0  # where in the text the part that belongs to no call starts
        self._coroutine = self._read_block()

    @property
    def raw_text(self) -> str:
        """Return the consumed text that belongs to no call."""
        return "".join(self._raw_pieces)

    def read_calls(self, text: str, start: int) -> tuple[int, list[ToolCallDelta]]:
        """Read from ``start``. Return the position reached and the new deltas; pass the rest again next time."""
        self.text, self.position, self._start, self._deltas = text, start, start, []
        try:
            next(self._coroutine)
        except (StopIteration, MalformedCall):
            self.ended = True
        if not self.in_call:
            self._raw_pieces.append(text[self._start : self.position])
        self.emit_arguments()
        return self.position, self._deltas

    def finish_text(self, unread_text: str) -> tuple[list[ToolCallDelta], str]:
        """End the text, with ``unread_text`` unread. Return the last deltas and the text that is not part of a call."""
        self._deltas = []
        if self.in_call:
            if self.convert_tail is not None:
                self.add_arguments(self.convert_tail(unread_text))
            self.emit_arguments()
            return self._deltas, ""
        unread_text = self.raw_text + unread_text
        stripped = unread_text.strip()
        end_marks = (mark.strip() for mark in (*self.form.call_close, *self.form.block_close))
        belongs = self.call_count > 0 and (not stripped or any(mark.startswith(stripped) for mark in end_marks))
        return [], "" if belongs else unread_text

    def announce_call(self, name: str, call_id: str | None = None) -> None:
        """Announce the call; text before it is not raw any more. Raises MalformedCall."""
        super().announce_call(name, call_id)
        self._raw_pieces.clear()

    def complete_call(self) -> None:
        """Complete the open call."""
        super().complete_call()
        self._start = self.position

    def _read_block(self) -> ReadSteps:
        """Read the whole block."""
        form = self.form
        for mark in form.block_open:
            yield from self.expect_mark(mark.strip())
        while True:
            for mark in form.call_open:
                yield from self.expect_mark(mark.strip())
            try:
                yield from SHAPE_READERS[form.shape](self)
            except MalformedCall:
                if not self.in_call:
                    raise
            self.complete_call()
            is_closed = not form.call_close
            for mark in form.call_close:
                is_closed = (yield from self._read_closing_mark(mark.strip())) or is_closed
            if not is_closed or not (yield from self._another_follows()):
                return

    def _another_follows(self) -> Generator[None, None, bool]:
        """Whether another call must follow."""
        separator = self.form.separator.strip()
        if (not separator and not self.form.block_close) or (yield from self._read_block_close()):
            return False
        if separator:
            yield from self.peek_character()
            if not (yield from self.mark_follows(separator)):
                # Models leave out the separator as well after JSON objects that have no closing mark.
                return self.form.shape == "object" and not self.form.block_close and self.text[self.position] == "{"
            self.position += len(separator)
            return not (yield from self._read_block_close())
        return True

    def _read_block_close(self) -> Generator[None, None, bool]:
        """Step over the marks that close the block, if they come."""
        if not self.form.block_close or not (yield from self._read_closing_mark(self.form.block_close[0].strip())):
            return False
        for mark in self.form.block_close[1:]:
            yield from self._read_closing_mark(mark.strip())
        return True

    def _read_closing_mark(self, mark: str) -> Generator[None, None, bool]:
        """Step over a closing mark, and over characters that models put before it by mistake."""
        yield from self.skip_matching(_SURPLUS_CHARACTERS)
        if not (yield from self.mark_follows(mark)):
            return False
        self.position += len(mark)
        self._raw_pieces.clear()
        self._start = self.position
        return True
