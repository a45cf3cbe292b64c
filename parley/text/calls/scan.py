"""What every reader of calls is made of: a place in text that is still arriving, and the call that is being read.

Readers are coroutines that stop wherever they need more text than there is, so no piece of text is read twice. A call
is announced as soon as its name is complete; its arguments follow piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from parley.types import CallDelta

from .form import Form
from .tools import Tools

Wait = Generator[None, None, None]  # yields when it needs more text than there is
_BLANKS = re.compile(r"[ \t\r\n]*")


class Garbled(Exception):
    """What comes is not what the form says."""


class Scan:
    """A place in the text, from ``at`` on unread, and what is known of the block's calls.

    ``calls``: how many were announced, the first as number ``index`` of the answer. ``inside``: one of them is open.
    ``tail``: how text that is cut off here belongs to the arguments; None if it does not.
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
        self._arguments: list[str] = []  # not given out yet
        self._deltas: list[CallDelta] = []

    def announce(self, name: str, id: str | None = None) -> None:
        """The name is known: from here on it is a call. Raises Garbled if it cannot be one."""
        if not name or ((self.form.known or self.form.bare) and name not in self.tools):
            raise Garbled
        self._deltas.append(CallDelta(self._index + self.calls, id or self._new_id(), name))
        self.calls += 1
        self.inside = self._empty = True

    def say(self, arguments: str) -> None:
        """A piece of the open call's arguments."""
        if arguments:
            self._arguments.append(arguments)
            self._empty = False

    def leave(self) -> None:
        """The open call is over."""
        if self._empty:
            self.say("{}")
        self.give()
        self.inside, self.tail = False, None

    def give(self) -> None:
        """Make one delta of the arguments that were said."""
        if self._arguments:
            self._deltas.append(CallDelta(self._index + self.calls - 1, arguments="".join(self._arguments)))
            self._arguments.clear()

    def take(self, end: int, into: Callable[[str], object]) -> None:
        """Step to ``end`` and pass on what is stepped over."""
        if end > self.at:
            into(self.text[self.at : end])
            self.at = end

    def peek(self) -> Generator[None, None, str]:
        """The next character that is not blank, left unread."""
        yield from self.skip(_BLANKS)
        return self.text[self.at]

    def skip(self, what: re.Pattern[str]) -> Wait:
        """Step over all that matches, up to a character that does not."""
        while True:
            self.at = what.match(self.text, self.at).end()  # type: ignore[union-attr]  # it also matches nothing
            if self.at < len(self.text):
                return
            yield

    def expect(self, mark: str) -> Wait:
        """Step over blanks and the mark. Raises Garbled."""
        yield from self.peek()
        if not (yield from self.stands(mark)):
            raise Garbled
        self.at += len(mark)

    def stands(self, mark: str) -> Generator[None, None, bool]:
        """Whether the mark comes right here."""
        while True:
            here = self.text[self.at : self.at + len(mark)]
            if len(here) == len(mark) or not mark.startswith(here):
                return here == mark
            yield
