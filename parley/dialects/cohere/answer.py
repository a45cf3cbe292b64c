"""The message of an answer: its events in a stream, or the whole.

A message has blocks of thinking and text, counted from 0, and calls, counted from 0 as well. In a stream, one block or
call is open at a time. Log-probabilities come with the tokens of blocks; those of calls have no place in the API.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from parley.dialects.json_answer import encode_json
from parley.dialects.sse import named_event
from parley.types import ChoiceDelta, TokenInfo, ToolCallDelta

BlockType = Literal["text", "thinking"]
TEXT_DELTA = (
    b'event: content-delta\ndata: {"type":"content-delta","index":%d,"delta":{"message":{"content":{"text":%b}}}}\n\n'
)
MAX_SUFFIX = 12  # characters of an id after the tool's name
MIN_LOGPROB = -9999.0  # of an impossible token, because JSON has no infinity


def cohere_event(event: dict[str, Any]) -> bytes:
    """Return one event of a stream, with its type as its name."""
    return named_event(event["type"], event)


def cohere_call_id(call_id: str, name: str) -> str:
    """Return a call's id in the original's form; ids that a model itself writes stay as they are."""
    return f"{name}_{call_id.removeprefix('call_')[:MAX_SUFFIX]}" if call_id.startswith("call_") else call_id


def block_type_of(delta: ChoiceDelta) -> BlockType | None:
    """Return the type of the block that a delta's text belongs to, None for one of a call."""
    if delta.output_part == "tool" or delta.tool_call is not None:
        return None
    return "text" if delta.output_part == "content" else "thinking"


def logprob_item(text: str, tokens: list[TokenInfo]) -> dict[str, Any]:
    """Return the log-probabilities of a piece of text."""
    logprobs = [token.logprob for token in tokens]
    return {
        "text": text,
        "token_ids": [token.id for token in tokens],
        "logprobs": [
            logprob if logprob is not None and math.isfinite(logprob) else MIN_LOGPROB for logprob in logprobs
        ],
    }


class MessageStream:
    """Writes an answer's deltas as events. ``logprobs``: text comes with its log-probabilities. ``called``: there was
    a call."""

    def __init__(self, *, logprobs: bool):
        self.called = False
        self._logprobs = logprobs
        self._open: BlockType | Literal["call"] | None = None
        self._blocks = self._calls = 0  # so far
        self._tokens: list[TokenInfo] = []  # without text so far
        self._token_type: BlockType = "text"  # of the block of these tokens

    def write_delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        if delta.tool_call is not None:
            return self._write_call(delta.tool_call)
        block_type = block_type_of(delta)
        if block_type is None:
            return b""
        earlier_tokens = self._hold_tokens(delta.tokens, block_type) if self._logprobs else b""
        if not delta.text:
            return earlier_tokens
        opening = earlier_tokens + (self._open_block(block_type) if self._open != block_type else b"")
        if block_type == "text" and not self._logprobs:  # as nearly all events are
            return opening + TEXT_DELTA % (self._blocks - 1, encode_json(delta.text))
        return opening + self._content_delta(delta.text)

    def finish(self) -> bytes:
        """Return the end of the open block or call. A message without any has an empty text."""
        opening = self._open_block("text") if not self._blocks and not self._calls else b""
        return opening + self._close_block()

    def _hold_tokens(self, tokens: list[TokenInfo], block_type: BlockType) -> bytes:
        """Keep the tokens until their text arrives. If tokens of the other kind of block are kept, and that block is
        open, return the event that reports them."""
        other_block_tokens = b""
        if self._token_type != block_type:
            if self._tokens and self._open == self._token_type:
                other_block_tokens = self._content_delta("")
            self._token_type = block_type
        self._tokens += tokens
        return other_block_tokens

    def _open_block(self, block_type: BlockType) -> bytes:
        start = self._close_block(block_type)
        self._open, self._blocks = block_type, self._blocks + 1
        return start + self._event("content-start", self._blocks - 1, {"content": {"type": block_type, block_type: ""}})

    def _content_delta(self, text: str) -> bytes:
        event = _event("content-delta", self._blocks - 1, {"content": {self._open: text}})
        if self._logprobs:
            event["logprobs"] = logprob_item(text, self._tokens)
            self._tokens = []
        return cohere_event(event)

    def _write_call(self, call: ToolCallDelta) -> bytes:
        """Return the events of a piece of a call; its arguments are passed on as they arrive."""
        opening = b""
        if call.name is not None:
            opening = self._close_block()
            self._open, self._calls, self.called = "call", self._calls + 1, True
            function = {"name": call.name, "arguments": ""}
            start = {"id": cohere_call_id(call.id or "", call.name), "type": "function", "function": function}
            opening += self._event("tool-call-start", self._calls - 1, {"tool_calls": start})
        if not call.arguments or self._open != "call":
            return opening
        piece = {"tool_calls": {"function": {"arguments": call.arguments}}}
        return opening + self._event("tool-call-delta", self._calls - 1, piece)

    def _close_block(self, next_type: BlockType | None = None) -> bytes:
        """Return the end of the open block or call, with the remaining tokens unless they belong to the next block.

        ``next_type``: the type of that block; None for a call or the end of the message.
        """
        opened, last_tokens = self._open, b""
        if opened is None:
            return last_tokens
        if opened == "call":
            self._open = None
            return cohere_event({"type": "tool-call-end", "index": self._calls - 1})
        if self._tokens and self._token_type != next_type:
            last_tokens = self._content_delta("")
        self._open = None
        return last_tokens + cohere_event({"type": "content-end", "index": self._blocks - 1})

    def _event(self, name: str, index: int, message: dict[str, Any]) -> bytes:
        return cohere_event(_event(name, index, message))


def _event(name: str, index: int, message: dict[str, Any]) -> dict[str, Any]:
    return {"type": name, "index": index, "delta": {"message": message}}


@dataclass
class _Block:
    block_type: BlockType
    pieces: list[str] = field(default_factory=list)


@dataclass
class _Call:
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)


class WholeMessage:
    """Collects the message of an answer in one piece. ``logprobs``: of each piece of its text."""

    def __init__(self) -> None:
        self.logprobs: list[dict[str, Any]] = []
        self._blocks: list[_Block] = []
        self._calls: list[_Call] = []

    @property
    def called(self) -> bool:
        """Whether the message has a call."""
        return bool(self._calls)

    def add_delta(self, delta: ChoiceDelta) -> None:
        """Add a delta to the last block or call, or begin another."""
        if (call := delta.tool_call) is not None:
            if call.name is not None:
                self._calls.append(_Call(cohere_call_id(call.id or "", call.name), call.name))
            self._calls[-1].pieces.append(call.arguments)
            return
        block_type = block_type_of(delta)
        if block_type is None:
            return
        if delta.tokens:
            self.logprobs.append(logprob_item(delta.text, delta.tokens))
        if not delta.text:
            return
        if not self._blocks or self._blocks[-1].block_type != block_type:
            self._blocks.append(_Block(block_type))
        self._blocks[-1].pieces.append(delta.text)

    def message_object(self) -> dict[str, Any]:
        """Return the message, with those members that it has."""
        message: dict[str, Any] = {"role": "assistant"}
        blocks = self._blocks if self._blocks or self._calls else [_Block("text")]
        if blocks:
            message["content"] = [
                {"type": block.block_type, block.block_type: "".join(block.pieces)} for block in blocks
            ]
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.pieces)},
                }
                for call in self._calls
            ]
        return message
