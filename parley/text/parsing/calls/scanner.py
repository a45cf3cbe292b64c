"""The base of all call readers: a position in text that is still arriving, and the call being read.

Readers are coroutines that pause when they need more text, so no piece of text is read twice. A call is announced as
soon as its name is complete; its arguments follow piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from parley.text.parsing.calls.form import Form
from parley.text.parsing.calls.tools import Tools
from parley.types import CallDelta

Wait = Generator[None, None, None]  # yields when it needs more text
_BLANKS = re.compile(r"[ \t\r\n]*")


class Garbled(Exception):
    """The text does not fit the form."""


class Scan:
    """A position in the text, unread from ``position`` on, and the state of the block's calls.

    ``call_count``: how many calls were announced. ``index``: the number of the first one in the answer. ``in_call``:
    one of them is open. ``convert_tail``: converts the unread rest to arguments if the text is cut off; None if it
    is not part of them.
    """

    def __init__(self, form: Form, index: int, new_id: Callable[[], str], tools: Tools):
        self.form = form
        self.tools = tools
        self.text = ""
        self.at = 0
        self.calls = 0
        self.inside = False
        self.tail: Callable[[str], str] | None = None
        self._index = index
        self._new_id = new_id
        self._empty = True  # the open call has no arguments yet
        self._arguments: list[str] = []  # not in a delta yet
        self._deltas: list[CallDelta] = []

    def announce(self, name: str, id: str | None = None) -> None:
        """Announce a call, as its name is known. Raises MalformedCall if the name cannot be a tool's."""
        if not name or ((self.form.known or self.form.bare) and name not in self.tools):
            raise Garbled
        self._deltas.append(CallDelta(self._index + self.calls, id or self._new_id(), name))
        self.calls += 1
        self.inside = self._empty = True

    def say(self, arguments: str) -> None:
        """Add a piece of the open call's arguments."""
        if arguments:
            self._arguments.append(arguments)
            self._empty = False

    def leave(self) -> None:
        """Complete the open call."""
        if self._empty:
            self.say("{}")
        self.give()
        self.inside, self.tail = False, None

    def give(self) -> None:
        """Make one delta of the arguments added so far."""
        if self._arguments:
            self._deltas.append(CallDelta(self._index + self.calls - 1, arguments="".join(self._arguments)))
            self._arguments.clear()

    def take(self, end: int, into: Callable[[str], object]) -> None:
        """Step to ``end`` and pass the text stepped over to ``into``."""
        if end > self.at:
            into(self.text[self.at : end])
            self.at = end

    def peek(self) -> Generator[None, None, str]:
        """Skip blanks and return the next character, left unread."""
        yield from self.skip(_BLANKS)
        return self.text[self.at]

    def skip(self, what: re.Pattern[str]) -> Wait:
        """Step over text that matches, up to a character that does not."""
        while True:
            self.at = what.match(self.text, self.at).end()  # type: ignore[union-attr]  # it also matches nothing
            if self.at < len(self.text):
                return
            yield

    def expect(self, mark: str) -> Wait:
        """Step over blanks and the mark. Raises MalformedCall if the mark does not come."""
        yield from self.peek()
        if not (yield from self.stands(mark)):
            raise Garbled
        self.at += len(mark)

    def stands(self, mark: str) -> Generator[None, None, bool]:
        """Whether the mark comes at this position."""
        while True:
            here = self.text[self.at : self.at + len(mark)]
            if len(here) == len(mark) or not mark.startswith(here):
                return here == mark
            yield
