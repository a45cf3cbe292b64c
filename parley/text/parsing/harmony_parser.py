"""Parser for answers in OpenAI's harmony format: messages, each in a channel, some of them addressed to a tool.

A message is ``<|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT`` and a mark that ends
it. An answer starts after the prompt's own ``<|start|>assistant``, with a channel or a recipient. Some models write a
space after every mark; the one after ``<|message|>`` is not part of the text. The channel "analysis" is reasoning,
messages to a function are calls, the rest is content. As with ``OutputParser``, any cutting of the text gives the same
events, in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from parley.text.parsing.calls import Tools
from parley.text.parsing.marks import marks
from parley.text.parsing.markup import Markup
from parley.text.parsing.output_parser import Region, Regions
from parley.types import CallDelta

MESSAGE = marks("<|message|>")
ENDS = marks("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
HEADS = ("<|start|>", "<|channel|>")
LONGEST = 1024  # maximum characters of a message's head
TO = "to="
NOBODY = ("assistant", "user", "all")  # recipients that are not tools
_CHANNEL = re.compile(r"<\|channel\|>\s*([\w.-]+)")
_SPACED = re.compile(r"<\|(channel|start)\|> ")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Channels:
    """Parser of one answer, with the same interface as ``OutputParser``."""

    def __init__(
        self,
        markup: Markup,
        thinking: bool = False,
        new_id: Callable[[], str] | None = None,
        tools: Tools | None = None,
    ):
        self.calls = 0
        self.thinking = thinking
        self._split = markup.think is not None
        self._calling = bool(markup.calls)
        self._new_id = new_id or markup.ids()
        self._tools = tools if tools is not None else Tools()
        self._text = ""  # unread
        self._at = 0
        self._head: list[str] | None = None  # pieces of the head being read; None inside a message
        self._size = 0  # characters of that head
        self._call: int | None = None  # number of the call whose arguments are being read
        self._empty = False  # that call has no arguments yet
        self._first = not thinking  # nothing was read yet
        self._spaced = False  # drop the next character if it is a space
        self._out: list[Region] = []

    @property
    def called(self) -> bool:
        """Whether a call is complete."""
        return self.calls > 1 or (self.calls == 1 and self._call is None)

    def push(self, piece: str) -> list[Region]:
        """Return the parts that are certain now, in order: (part, text, call)."""
        self._out = []
        self._text, self._at = self._text[self._at :] + piece, 0
        while self._at < len(self._text) and (self._body() if self._head is None else self._heading()):
            pass
        return self._out

    def flush(self) -> list[Region]:
        """Return the parts held back, at the end of the text. An unfinished head is dropped."""
        self._out = []
        rest = "".join(self._head or ()) + self._text[self._at :]
        if self._head is None or not rest.startswith(HEADS):
            self._say(rest)
        self._text, self._at = "", 0
        return self._out

    def _body(self) -> bool:
        """Read the text of a message, or text outside any message, which is content."""
        if self._first:
            here = self._text[self._at :].lstrip(" ")
            if not here or (here != TO and TO.startswith(here)):
                return False
            self._first = False
            if here.startswith(TO):
                self._head, self._size = [], 0
                return True
        if self._spaced:
            self._spaced = False
            self._at += self._text.startswith(" ", self._at)
        end, mark = ENDS.find(self._text, self._at)
        self._say(self._text[self._at : end])
        self._at = end
        if not mark:
            return False
        if self._call is not None and self._empty:
            self._say("{}")
        self.thinking, self._call = False, None
        if mark in HEADS:
            self._head, self._size = [], 0
        else:
            self._at += len(mark)
        return True

    def _heading(self) -> bool:
        """Read the head of a message."""
        assert self._head is not None
        end, mark = MESSAGE.find(self._text, self._at)
        self._head.append(self._text[self._at : end])
        self._size += end - self._at
        self._at = end
        if self._size > LONGEST:  # not a head
            text = "".join(self._head)
            self._head = None
            self._say(text)
            return True
        if not mark:
            return False
        self._at += len(mark)
        self._begin("".join(self._head))
        self._head = None
        return True

    def _begin(self, head: str) -> None:
        """Start the message with this head."""
        channels, recipients = _CHANNEL.findall(head), _RECIPIENT.findall(head)
        name = recipients[-1] if recipients and recipients[-1] not in NOBODY else ""
        self._spaced = bool(_SPACED.search(head))
        function = name.removeprefix("functions.")
        if self._calling and name and (function != name or name in self._tools):
            self._call, self._empty = self.calls, True
            self._out.append(("tool", "", CallDelta(self.calls, self._new_id(), function)))
            self.calls += 1
        else:
            self.thinking = self._split and (bool(name) or channels[-1:] == ["analysis"])

    def _say(self, text: str) -> None:
        if not text:
            return
        self._empty = False
        if self._call is not None:
            self._out.append(("tool", "", CallDelta(self._call, arguments=text)))
        else:
            self._out.append(("reasoning" if self.thinking else "content", text, None))


def reader(
    markup: Markup, thinking: bool, tools: Tools | None, new_id: Callable[[], str] | None = None
) -> Regions | Channels:
    """Return a parser for an answer with this markup."""
    return (Channels if markup.channels else Regions)(markup, thinking, new_id, tools)
