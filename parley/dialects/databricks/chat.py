"""A conversation and its answer: OpenAI's members, in Databricks' format.

Every chunk of a stream reports the usage so far. Under strict rules, reasoning is a part of the content, which then is
a list. Under lenient rules it is a separate member and the content is text, as OpenAI's clients expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects.databricks import members, shared
from parley.dialects.databricks.shared import Count, Rules, Words
from parley.dialects.dialect import Head, Headers, Timings
from parley.dialects.fields import Fields, decode
from parley.dialects.openai import chat
from parley.dialects.openai import shared as openai
from parley.errors import ParleyError
from parley.types import Delta, Done, Event, Usage

WORDS = Words("Chat")
CONTENT = b'{"index":%d,"delta":{"content":%b},"finish_reason":null}'


def read(rules: Rules, body: bytes, head: Head) -> ChatReply:
    """Read a chat request. Raises BadRequest."""
    return ChatReply(rules, decode(body, WORDS), head)


class ChatReply(chat.ChatReply):
    """A reply to one conversation, as a stream of chunks or in one piece."""

    ping: ClassVar[bytes] = b""  # MLflow's client accepts only data lines
    rules: ClassVar[openai.Rules] = openai.Rules(fewest=0)

    def __init__(self, rules: Rules, body: Fields, head: Head):
        if rules.strict:
            members.chat(body, rules)
        members.context(body)
        body, budget = members.thinking(body)
        super().__init__(body, head)
        if budget is not None:
            self.request.thinking_budget = budget
        self._manner = rules
        self._count = Count()
        self._usage = shared.told_usage(body, self.request.stream)
        self.request.want = msgspec.structs.replace(self.request.want, usage=False, ids=True)

    # -- streaming

    def chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each event that has output; each reports the usage up to it."""
        parts = []
        for event in events:
            self._count.add(event)
            parts.append(super().chunk((event,)))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return shared.DONE

    def fail(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return shared.failure(error)

    def _opening(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": self._echo}, "finish_reason": None}

    def _continued(self, event: Delta) -> bytes:
        scored = self.request.want.logprobs is not None
        if event.part == "content" and event.text and not scored and not self._ids:  # the fast path, for most chunks
            return CONTENT % (event.index, shared.encode(event.text))
        delta = self._piece(event)
        if not delta and not ((scored or self._ids) and event.tokens):
            return b""
        told = {"index": event.index, "delta": delta or {"content": ""}, "finish_reason": None}
        if scored:
            told["logprobs"] = self._logprobs(event.tokens)
        return shared.encode(told | self._token_ids(event.tokens))

    def _piece(self, event: Delta) -> dict[str, Any]:
        if event.part == "reasoning" and self._manner.strict and event.text:
            return {"content": [_thought(event.text)]}
        piece = super()._piece(event)
        return piece if "content" in piece or not piece else {"content": None} | piece

    def _done(self, event: Done) -> bytes:
        last = {"index": event.index, "delta": {"content": ""}, "finish_reason": self._finish(event)}
        return self._frame(event.index, shared.encode(last))

    def _frame(self, index: int, choice: bytes, more: bytes = b"") -> bytes:
        if not self._before:  # the model's name is final only after the server has looked it up
            envelope = shared.encode(self._envelope("chat.completion.chunk", []))
            self._before = b"data: " + envelope.removesuffix(b"]}")
        usage = b',"usage":' + shared.encode(self._count.told()) if self._usage else b""
        return self._before + choice + b"]" + more + usage + b"}\n\n"

    # -- in one piece

    def _choice(self, index: int, choice: chat.Choice) -> dict[str, Any]:
        assert choice.done is not None
        finish = self._finish(choice.done)
        told: dict[str, Any] = {
            "index": index,
            "message": self._message(choice),
            "finish_reason": finish,
            "logprobs": self._logprobs(choice.tokens),
        }
        if not self._manner.strict:
            told["finishReason"] = finish  # the name that Databricks' SDK reads
        return told | self._token_ids(choice.tokens)

    def _message(self, choice: chat.Choice) -> dict[str, Any]:
        content: Any = self._echo + "".join(choice.content)
        thought = "".join(choice.reasoning) if self._reasons else ""
        if not content and choice.calls:
            content = None
        if thought and self._manner.strict:
            content = [_thought(thought), *([{"type": "text", "text": content}] if content else [])]
        message = {"role": "assistant", "content": content}
        if thought and not self._manner.strict:
            message["reasoning_content"] = thought
        if choice.calls and self._legacy:
            return message | {"function_call": choice.calls[0]["function"]}
        return message | ({"tool_calls": choice.calls} if choice.calls else {})

    def headers(self, timings: Timings | None) -> Headers:
        """Return the header that names the served model."""
        return shared.served_header(self)

    # -- shared by both

    def _envelope(self, object: str, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"chatcmpl_{shared.identity(self._head)}",
            "object": object,
            "created": self._head.created,
            "model": self.request.model,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = shared.usage(usage.prompt_tokens, usage.completion_tokens)
        return envelope


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
