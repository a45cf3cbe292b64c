"""The base of all call readers: a position in text that is still arriving, and the call being read.

Readers are coroutines that pause when they need more text, so no piece of text is read twice. A call is announced as
soon as its name is complete; its arguments follow piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from parley.text.parsing.calls.form import CallForm
from parley.text.parsing.calls.tools import RequestTools
from parley.types import ToolCallDelta

ReadSteps = Generator[None, None, None]  # yields when it needs more text
_ANY_BLANKS = re.compile(r"[ \t\r\n]*")


class MalformedCall(Exception):
    """The text does not fit the form."""


class CallScanner:
    """The unread text of a block of calls, and the state of these calls.

    * ``position``: the text is unread from here on.
    * ``call_count``: how many calls were announced.
    * ``index``: the number of the first one in the answer.
    * ``in_call``: one of them is open.
    * ``convert_tail``: converts the unread rest to arguments if the text is cut off; None if it is not part of them.
    """

    def __init__(self, form: CallForm, index: int, new_id: Callable[[], str], tools: RequestTools):
        self.form = form
        self.tools = tools
        self.text = ""
        self.position = 0
        self.call_count = 0
        self.in_call = False
        self.convert_tail: Callable[[str], str] | None = None
        self._index = index
        self._new_id = new_id
        self._arguments_empty = True  # the open call has no arguments yet
        self._arguments: list[str] = []  # not in a delta yet
        self._deltas: list[ToolCallDelta] = []

    def announce_call(self, name: str, call_id: str | None = None) -> None:
        """Announce a call, as its name is known. Raises MalformedCall if the name cannot be a tool's."""
        if not name or ((self.form.known_tools_only or self.form.unmarked) and name not in self.tools):
            raise MalformedCall
        self._deltas.append(ToolCallDelta(self._index + self.call_count, call_id or self._new_id(), name))
        self.call_count += 1
        self.in_call = self._arguments_empty = True

    def add_arguments(self, arguments: str) -> None:
        """Add a piece of the open call's arguments."""
        if arguments:
            self._arguments.append(arguments)
            self._arguments_empty = False

    def complete_call(self) -> None:
        """Complete the open call."""
        if self._arguments_empty:
            self.add_arguments("{}")
        self.emit_arguments()
        self.in_call, self.convert_tail = False, None

    def emit_arguments(self) -> None:
        """Make one delta of the arguments added so far."""
        if self._arguments:
            self._deltas.append(ToolCallDelta(self._index + self.call_count - 1, arguments="".join(self._arguments)))
            self._arguments.clear()

    def step_to(self, end: int, write_text: Callable[[str], object]) -> None:
        """Step to ``end`` and pass the text stepped over to ``write_text``."""
        if end > self.position:
            write_text(self.text[self.position : end])
            self.position = end

    def peek_character(self) -> Generator[None, None, str]:
        """Skip blanks and return the next character, left unread."""
        yield from self.skip_matching(_ANY_BLANKS)
        return self.text[self.position]

    def skip_matching(self, pattern: re.Pattern[str]) -> ReadSteps:
        """Step over text that matches, up to a character that does not."""
        while True:
            self.position = pattern.match(self.text, self.position).end()  # type: ignore[union-attr]  # it also matches nothing
            if self.position < len(self.text):
                return
            yield

    def expect_mark(self, mark: str) -> ReadSteps:
        """Step over blanks and the mark. Raises MalformedCall if the mark does not come."""
        yield from self.peek_character()
        if not (yield from self.mark_follows(mark)):
            raise MalformedCall
        self.position += len(mark)

    def mark_follows(self, mark: str) -> Generator[None, None, bool]:
        """Whether the mark comes at this position."""
        while True:
            upcoming = self.text[self.position : self.position + len(mark)]
            if len(upcoming) == len(mark) or not mark.startswith(upcoming):
                return upcoming == mark
            yield
