"""Answers of chat and generate: one JSON object per line, or all of them joined in one.

A tool call is one line with all of its arguments, so its pieces wait until the call is complete. The last line has the
times and counts; they are known when the stream ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from parley.dialects.json_body import decode_json
from parley.dialects.ollama.error_answers import ollama_failure_line
from parley.dialects.ollama.go_encoding import JSON_TYPE, duration_nanoseconds, encode_go, go_answer, go_time
from parley.dialects.ollama.options import logprob_members
from parley.dialects.reply import Acknowledgement, Reply
from parley.dialects.request_context import RequestContext
from parley.errors import ParleyError
from parley.types import ChoiceDelta, ChoiceDone, DeltaPart, Event, FinishReason, TokenInfo, ToolCallDelta, Usage

DONE_REASONS: dict[FinishReason, str] = {"length": "length"}  # all other ends are "stop", calls included
CALL_ID_LENGTH = len("call_") + 8


@dataclass
class AnswerPiece:
    """Output that becomes one line: text, reasoning, complete calls, and the tokens of all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.tokens)


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of an answer: why it ended, and its times in nanoseconds and counts of tokens."""

    reason: str
    metrics: dict[str, int]


class OllamaReply(Reply):
    """A reply in lines of JSON. ``name``: the model as the client calls it. ``shows_thinking``: reasoning is sent."""

    content_type = JSON_TYPE
    media_type: ClassVar[str] = "application/x-ndjson"
    ping_bytes: ClassVar[bytes] = b""

    def __init__(self, name: str, context: RequestContext, *, shows_thinking: bool = True):
        self.name = name
        self._created_at = go_time(context.created)
        self._shows_thinking = shows_thinking
        self._calls: list[ToolCallDelta] = []  # complete, but for the last one
        self._sent_calls = 0
        self._call_tokens: list[TokenInfo] = []
        self._whole = AnswerPiece()
        self._contents: list[str] = []
        self._thoughts: list[str] = []
        self._done: ChoiceDone | None = None
        self._frames: dict[DeltaPart, tuple[bytes, bytes]] = {}  # lines with nothing but a text, before and after it

    @abstractmethod
    def answer_record(self, piece: AnswerPiece, end: AnswerEnd | None) -> dict[str, Any]:
        """Return a line's members in their order; ``end`` is None for all lines but the last."""

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a line for each piece of output."""
        lines = []
        for event in events:
            if isinstance(event, ChoiceDelta) and not (
                self._calls or self._call_tokens or event.tokens or event.output_part == "tool"
            ):
                if event.text and (event.output_part == "content" or self._shows_thinking):
                    start, end = self._frames.get(event.output_part) or self._line_frame(event.output_part)
                    lines.append(start + encode_go(event.text) + end)
            elif piece := self.read_event(event):
                lines.append(self.render_line(piece, None))
        return b"".join(lines)

    def _line_frame(self, part: DeltaPart) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a usual line of a stream."""
        piece = AnswerPiece(thinking="\0") if part == "reasoning" else AnswerPiece(content="\0")
        start, _, end = self.render_line(piece, None).partition(encode_go("\0"))
        self._frames[part] = frame = (start, end)
        return frame

    def render_line(self, piece: AnswerPiece, end: AnswerEnd | None) -> bytes:
        """Return a line with all its members."""
        return encode_go(self.answer_record(piece, end)) + b"\n"

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the last line."""
        return self.render_line(AnswerPiece(), self._answer_end(usage))

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the line with the error."""
        return ollama_failure_line(error)

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Join the pieces of these events."""
        for event in events:
            if piece := self.read_event(event):
                self._contents.append(piece.content)
                self._thoughts.append(piece.thinking)
                self._whole.calls += piece.calls
                self._whole.tokens += piece.tokens

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer."""
        self._whole.content, self._whole.thinking = "".join(self._contents), "".join(self._thoughts)
        return encode_go(self.answer_record(self._whole, self._answer_end(usage)))

    # -- both

    def read_event(self, event: Event) -> AnswerPiece | None:
        """Return the output of an event that can be sent now, None if there is none."""
        match event:
            case ChoiceDelta(output_part="tool"):
                return self._add_to_call(event)
            case ChoiceDelta(output_part="reasoning") if not self._shows_thinking:
                return None
            case ChoiceDelta():
                piece = self._complete_calls()
                piece.tokens += self._kept_tokens(event.tokens)
                if event.output_part == "reasoning":
                    piece.thinking = event.text
                else:
                    piece.content = event.text
                return piece
            case ChoiceDone():
                self._done = event
                return self._complete_calls()
        return None

    def _add_to_call(self, event: ChoiceDelta) -> AnswerPiece | None:
        """Add a piece of a call. A new call completes the one before it."""
        call = event.tool_call
        if call is None:
            self._call_tokens += self._kept_tokens(event.tokens)
            return None
        piece = self._complete_calls() if call.index >= len(self._calls) else None
        if piece is not None:
            self._calls.append(ToolCallDelta(call.index, call.id, call.name))
        self._calls[-1].arguments += call.arguments
        self._call_tokens += self._kept_tokens(event.tokens)
        return piece

    def _complete_calls(self) -> AnswerPiece:
        """Return the calls that no further piece can extend. One that was cut off is no call."""
        calls = [members for call in self._calls[self._sent_calls :] if (members := _call_members(call)) is not None]
        tokens, self._call_tokens = self._call_tokens, []
        self._sent_calls = len(self._calls)
        return AnswerPiece(calls=calls, tokens=tokens)

    def _kept_tokens(self, tokens: list[TokenInfo]) -> list[TokenInfo]:
        return [] if self.request.output_options.logprobs is None else tokens

    def _answer_end(self, usage: Usage) -> AnswerEnd:
        assert self._done is not None
        timings = self.timings
        metrics = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
        if timings is not None:
            load = timings.validation + timings.queue
            metrics = {
                "total_duration": duration_nanoseconds(timings.total),
                "load_duration": duration_nanoseconds(load),
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": duration_nanoseconds(timings.prefill),
                "eval_count": usage.completion_tokens,
                "eval_duration": duration_nanoseconds(timings.decode),
            }
        return AnswerEnd(
            DONE_REASONS.get(self._done.reason, "stop"), {name: count for name, count in metrics.items() if count}
        )

    def envelope(self) -> dict[str, Any]:
        """Return the members that begin each line."""
        return {"model": self.name, "created_at": self._created_at}

    def logprobs_member(self, piece: AnswerPiece) -> dict[str, Any]:
        """Return the log-probabilities of a piece; nothing if it has none."""
        return {"logprobs": list(map(_scored_token, piece.tokens))} if piece.tokens else {}


def load_answer(name: str, context: RequestContext, members: dict[str, Any], *, stays: bool) -> Acknowledgement:
    """Return the answer to a request that asks for no text but to load or unload the model."""
    envelope = {"model": name, "created_at": go_time(context.created)}
    answer = envelope | members | {"done": True, "done_reason": "load" if stays else "unload"}
    return Acknowledgement(*go_answer(answer))


def _call_members(call: ToolCallDelta) -> dict[str, Any] | None:
    try:
        arguments = decode_json((call.arguments or "{}").encode())
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    function = {"index": call.index, "name": call.name, "arguments": arguments}
    return {"id": (call.id or "")[:CALL_ID_LENGTH], "function": function}


def _scored_token(token: TokenInfo) -> dict[str, Any]:
    members = logprob_members(token)
    return members | {"top_logprobs": list(map(logprob_members, token.top_tokens))} if token.top_tokens else members
