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

from parley.text.parsing.calls import RequestTools
from parley.text.parsing.mark_search import compile_marks
from parley.text.parsing.markup import Markup
from parley.text.parsing.output_parser import AnswerPart, OutputParser
from parley.types import DeltaPart, ToolCallDelta

MESSAGE_MARK = compile_marks("<|message|>")
MESSAGE_ENDS = compile_marks("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
HEAD_MARKS = ("<|start|>", "<|channel|>")
MAX_HEAD_CHARACTERS = 1024  # maximum characters of a message's head
RECIPIENT_PREFIX = "to="
NON_TOOL_RECIPIENTS = ("assistant", "user", "all")  # recipients that are not tools
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([\w.-]+)")
_SPACE_AFTER_MARK = re.compile(r"<\|(channel|start)\|> ")
_RECIPIENT_NAME = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Parser of one answer, with the same interface as ``OutputParser``."""

    def __init__(
        self,
        markup: Markup,
        starts_in_reasoning: bool = False,
        new_id: Callable[[], str] | None = None,
        tools: RequestTools | None = None,
    ):
        self.call_count = self.part_count = 0
        self.in_reasoning = starts_in_reasoning
        self._parses_reasoning = markup.reasoning_marks is not None
        self._parses_calls = bool(markup.call_forms)
        self._new_id = new_id or markup.call_id_source()
        self._tools = tools if tools is not None else RequestTools()
        self._text = ""  # unread
        self._at = 0
        self._head_pieces: list[str] | None = None  # pieces of the head being read; None inside a message
        self._head_size = 0  # characters of that head
        self._call_index: int | None = None  # number of the call whose arguments are being read
        self._arguments_empty = False  # that call has no arguments yet
        self._at_start = not starts_in_reasoning  # nothing was read yet
        self._skip_space = False  # drop the next character if it is a space
        self._parts: list[AnswerPart] = []

    def plain_part(self, piece: str) -> DeltaPart | None:
        """Return None: ``parse_piece`` must read everything."""
        return None

    @property
    def unread_length(self) -> int:
        """Number of characters that wait for more text, because they may be part of a mark."""
        return len(self._text) - self._at

    @property
    def has_complete_call(self) -> bool:
        """Whether a call is complete."""
        return self.call_count > 1 or (self.call_count == 1 and self._call_index is None)

    def parse_piece(self, piece: str) -> list[AnswerPart]:
        """Return the parts that are certain now, in order: (part, text, call)."""
        self._parts = []
        self._text, self._at = self._text[self._at :] + piece, 0
        while self._at < len(self._text) and (self._read_message() if self._head_pieces is None else self._read_head()):
            pass
        return self._parts

    def finish_parsing(self) -> list[AnswerPart]:
        """Return the parts held back, at the end of the text. An unfinished head is dropped."""
        self._parts = []
        unread_text = "".join(self._head_pieces or ()) + self._text[self._at :]
        if self._head_pieces is None or not unread_text.startswith(HEAD_MARKS):
            self._emit_message_text(unread_text)
        self._text, self._at = "", 0
        return self._parts

    def _read_message(self) -> bool:
        """Read the text of a message, or text outside any message, which is content."""
        if self._at_start:
            upcoming = self._text[self._at :].lstrip(" ")
            if not upcoming or (upcoming != RECIPIENT_PREFIX and RECIPIENT_PREFIX.startswith(upcoming)):
                return False
            self._at_start = False
            if upcoming.startswith(RECIPIENT_PREFIX):
                self._head_pieces, self._head_size = [], 0
                return True
        if self._skip_space:
            self._skip_space = False
            self._at += self._text.startswith(" ", self._at)
        end, mark = MESSAGE_ENDS.find_first(self._text, self._at)
        self._emit_message_text(self._text[self._at : end])
        self._at = end
        if not mark:
            return False
        if self._call_index is not None and self._arguments_empty:
            self._emit_message_text("{}")
        self.in_reasoning, self._call_index = False, None
        if mark in HEAD_MARKS:
            self._head_pieces, self._head_size = [], 0
        else:
            self._at += len(mark)
        return True

    def _read_head(self) -> bool:
        """Read the head of a message."""
        assert self._head_pieces is not None
        end, mark = MESSAGE_MARK.find_first(self._text, self._at)
        self._head_pieces.append(self._text[self._at : end])
        self._head_size += end - self._at
        self._at = end
        if self._head_size > MAX_HEAD_CHARACTERS:  # not a head
            text = "".join(self._head_pieces)
            self._head_pieces = None
            self._emit_message_text(text)
            return True
        if not mark:
            return False
        self._at += len(mark)
        self._start_message("".join(self._head_pieces))
        self._head_pieces = None
        return True

    def _start_message(self, head: str) -> None:
        """Start the message with this head."""
        self.part_count += 1
        channels, recipients = _CHANNEL_NAME.findall(head), _RECIPIENT_NAME.findall(head)
        name = recipients[-1] if recipients and recipients[-1] not in NON_TOOL_RECIPIENTS else ""
        self._skip_space = bool(_SPACE_AFTER_MARK.search(head))
        function = name.removeprefix("functions.")
        if self._parses_calls and name and (function != name or name in self._tools):
            self._call_index, self._arguments_empty = self.call_count, True
            self._parts.append(("tool", "", ToolCallDelta(self.call_count, self._new_id(), function)))
            self.call_count += 1
        else:
            self.in_reasoning = self._parses_reasoning and (bool(name) or channels[-1:] == ["analysis"])

    def _emit_message_text(self, text: str) -> None:
        if not text:
            return
        self._arguments_empty = False
        if self._call_index is not None:
            self._parts.append(("tool", "", ToolCallDelta(self._call_index, arguments=text)))
        else:
            self._parts.append(("reasoning" if self.in_reasoning else "content", text, None))


def make_output_parser(
    markup: Markup, starts_in_reasoning: bool, tools: RequestTools | None, new_id: Callable[[], str] | None = None
) -> OutputParser | HarmonyParser:
    """Return a parser for an answer with this markup."""
    return (HarmonyParser if markup.uses_channels else OutputParser)(markup, starts_in_reasoning, new_id, tools)
