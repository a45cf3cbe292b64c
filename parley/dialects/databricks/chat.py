"""A conversation and its answer: OpenAI's members, in Databricks' format.

Every chunk of a stream reports the usage so far. Under strict rules, reasoning is a part of the content, which then is
a list. Under lenient rules it is a separate member and the content is text, as OpenAI's clients expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from parley.dialects.databricks import members
from parley.dialects.databricks.answer_parts import RunningTokenCount, answer_uuid, served_model_header
from parley.dialects.databricks.api_rules import DatabricksRules
from parley.dialects.databricks.error_answers import databricks_failure_events
from parley.dialects.databricks.members import wants_usage
from parley.dialects.databricks.refusal_wording import DatabricksErrorWording
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import chat
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.openai.token_usage import running_usage
from parley.dialects.reply import HeaderList, RequestTimings
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE, choice_event_start
from parley.errors import ParleyError
from parley.types import ChoiceDelta, ChoiceDone, Event, Usage

CHAT_WORDING = DatabricksErrorWording("Chat")
CONTENT_CHOICE = b'{"index":%d,"delta":{"content":%b},"finish_reason":null}'


def read_databricks_chat(rules: DatabricksRules, body: bytes, context: RequestContext) -> DatabricksChatReply:
    """Read a chat request. Raises BadRequest."""
    return DatabricksChatReply(rules, decode_fields(body, CHAT_WORDING), context)


class DatabricksChatReply(chat.ChatReply):
    """A reply to one conversation, as a stream of chunks or in one piece."""

    ping_bytes: ClassVar[bytes] = b""  # MLflow's client accepts only data lines
    reading_rules: ClassVar[ReadingRules] = ReadingRules(min_alternatives=0, strict_schemas=True, follows_options=False)

    def __init__(self, rules: DatabricksRules, body: Fields, context: RequestContext):
        if rules.strict:
            members.check_strict_chat(body, rules, context)
        members.check_client_information(body)
        body, budget = members.read_databricks_thinking(body)
        super().__init__(body, context)
        if budget is not None:
            self.request.thinking_budget = budget
        self._rules = rules
        self._token_count = RunningTokenCount()
        self._with_usage = wants_usage(body, self.request.stream)
        self.request.output_options = msgspec.structs.replace(self.request.output_options, usage=False, ids=True)

    # -- streaming

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return a chunk for each event that has output; each reports the usage up to it."""
        parts = []
        for event in events:
            self._token_count.count_event(event)
            parts.append(super().render_chunk((event,)))
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the mark that ends a stream."""
        return STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event that ends the stream."""
        return databricks_failure_events(error)

    def _opening_choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": self._echo_text}, "finish_reason": None}

    def _delta_choice(self, event: ChoiceDelta) -> bytes:
        with_logprobs = self.request.output_options.logprobs is not None
        if (
            event.output_part == "content" and event.text and not with_logprobs and not self._wants_ids
        ):  # the fast path, for most chunks
            return CONTENT_CHOICE % (event.index, encode_json(event.text))
        delta = self._delta_member(event)
        if not delta and not ((with_logprobs or self._wants_ids) and event.tokens):
            return b""
        choice_object = {"index": event.index, "delta": delta or {"content": ""}, "finish_reason": None}
        if with_logprobs:
            choice_object["logprobs"] = self._logprobs_member(event.tokens)
        return encode_json(choice_object | self._token_ids_member(event.tokens))

    def _delta_member(self, event: ChoiceDelta) -> dict[str, Any]:
        if event.output_part == "reasoning" and self._rules.strict and event.text:
            return {"content": [_reasoning_part(event.text)]}
        piece = super()._delta_member(event)
        return piece if "content" in piece or not piece else {"content": None} | piece

    def _done_chunk(self, event: ChoiceDone) -> bytes:
        last = {"index": event.index, "delta": {"content": ""}, "finish_reason": self._finish_reason(event)}
        return self._chat_chunk(event.index, encode_json(last))

    def _chat_chunk(self, index: int, choice: bytes, more: bytes = b"") -> bytes:
        if not self._chunk_start:  # the model's name is final only after the server has looked it up
            self._chunk_start = choice_event_start(self._chat_envelope("chat.completion.chunk", []))
        usage = b',"usage":' + encode_json(self._token_count.usage_so_far()) if self._with_usage else b""
        return self._chunk_start + choice + b"]" + more + usage + b"}\n\n"

    # -- in one piece

    def _choice_object(self, index: int, choice: chat.ChatChoice) -> dict[str, Any]:
        assert choice.done is not None
        finish = self._finish_reason(choice.done)
        choice_object: dict[str, Any] = {
            "index": index,
            "message": self._message_object(choice),
            "finish_reason": finish,
            "logprobs": self._logprobs_member(choice.tokens),
        }
        if not self._rules.strict:
            choice_object["finishReason"] = finish  # the name that Databricks' SDK reads
        return choice_object | self._token_ids_member(choice.tokens)

    def _message_object(self, choice: chat.ChatChoice) -> dict[str, Any]:
        content: Any = self._echo_text + "".join(choice.content)
        reasoning = "".join(choice.reasoning) if self._wants_reasoning else ""
        if not content and choice.calls:
            content = None
        if reasoning and self._rules.strict:
            content = [_reasoning_part(reasoning), *([{"type": "text", "text": content}] if content else [])]
        message = {"role": "assistant", "content": content}
        if reasoning and not self._rules.strict:
            message["reasoning_content"] = reasoning
        if choice.calls and self._legacy:
            return message | {"function_call": choice.calls[0]["function"]}
        return message | ({"tool_calls": choice.calls} if choice.calls else {})

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the header that names the served model."""
        return served_model_header(self)

    # -- shared by both

    def _chat_envelope(self, answer_object: str, choices: list[Any], usage: Usage | None = None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": f"chatcmpl_{answer_uuid(self._context)}",
            "object": answer_object,
            "created": self._context.created,
            "model": self.request.model,
            "choices": choices,
        }
        if usage is not None:
            envelope["usage"] = running_usage(usage.prompt_tokens, usage.completion_tokens)
        return envelope


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
