"""``POST /v2/chat``: reads a conversation, and writes one message or the events of a stream.

The stream begins as soon as the prompt is accepted: clients wait for headers while a long prompt is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from parley.dialects.cohere import conversation, options
from parley.dialects.cohere.answer import MessageStream, WholeMessage, cohere_event
from parley.dialects.cohere.answer_ids import id_as_uuid
from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.conversation import CohereMessageReader
from parley.dialects.cohere.error_answers import cohere_error_sentence
from parley.dialects.cohere.refusal_wording import COHERE_WORDING, check_cohere_members
from parley.dialects.cohere.token_usage import cohere_usage
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import STREAM_DONE
from parley.errors import ParleyError
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Event,
    FinishReason,
    OutputOptions,
    PromptAccepted,
    Request,
    Usage,
)

MAX_MODEL_NAME = 256  # characters
COUNTED_CONTEXTS = 4  # a prompt is counted up to this many times the context, to say how much it is too long
EMPTY_MESSAGE = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
BODY_MEMBERS = {
    "model", "messages", "stream", "tools", "strict_tools", "tool_choice", "documents", "citation_options",
    "response_format", "safety_mode", "max_tokens", "stop_sequences", "temperature", "seed", "frequency_penalty",
    "presence_penalty", "k", "p", "logprobs", "thinking", "priority",
}  # fmt: skip
FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "COMPLETE",
    "length": "MAX_TOKENS",
    "tool": "TOOL_CALL",
    "repetition": "COMPLETE",
    "cancel": "ERROR",
    "error": "ERROR",
}


def read_cohere_chat(rules: CohereRules, body: bytes, context: RequestContext) -> CohereChatReply:
    """Read a conversation. Raises BadRequest."""
    return CohereChatReply(rules, decode_fields(body, COHERE_WORDING), context)


class CohereChatReply(Reply):
    """A reply to a conversation."""

    media_type: ClassVar[str] = "text/event-stream"
    field_names: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop": "stop_sequences"}

    def __init__(self, rules: CohereRules, body: Fields, context: RequestContext):
        check_cohere_members(body, BODY_MEMBERS, rules)
        model = body.string("model", None, cap=MAX_MODEL_NAME)
        if not model:
            raise body.missing_member("model")
        messages, template_options = conversation.place_documents(
            CohereMessageReader(rules, context).read_messages(body), conversation.read_documents(body, rules), context
        )
        options.check_citations(body, rules)
        template_options |= options.read_safety_mode(body, context)
        tools = options.read_cohere_tools(body, rules)
        thinking = options.read_cohere_thinking(body, rules)
        logprobs = body.boolean("logprobs", False)
        chat = ChatPrompt(
            messages=messages,
            tools=tools.tools,
            tool_choice=tools.choice,
            schema_fields=tools.schema_fields,
            thinking=thinking.enabled,
            options=template_options,
        )
        self.request = Request(
            id=context.unique_id,
            model=model,
            prompts=[chat],
            sampling=options.read_cohere_sampling(body, rules),
            stop_conditions=options.read_cohere_stops(body, rules),
            output_options=OutputOptions(logprobs=0 if logprobs else None),
            grammar=options.read_cohere_format(body, rules),
            thinking_budget=thinking.budget,
            stream=body.boolean("stream", False),
            priority=body.integer("priority", 0, 0, options.MAX_PRIORITY),
            counted_tokens=COUNTED_CONTEXTS * context.context_length,
        )
        self._answer_id = id_as_uuid(context.unique_id)
        self._wants_logprobs = logprobs
        self._stream = MessageStream(logprobs=logprobs)
        self._message = WholeMessage()
        self._done: ChoiceDone | None = None

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the events of the message's start, its blocks and calls, and their ends."""
        parts = []
        for event in events:
            match event:
                case ChoiceDelta():
                    parts.append(self._stream.write_delta(event))
                case PromptAccepted():
                    start = {"id": self._answer_id, "type": "message-start", "delta": {"message": EMPTY_MESSAGE}}
                    parts.append(cohere_event(start))
                case ChoiceDone():
                    self._done = event
                    parts.append(self._stream.finish())
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the end of the message, with its usage, and the ``[DONE]`` mark."""
        delta = {"finish_reason": self._finish_reason(self._stream.called), "usage": cohere_usage(usage)}
        return cohere_event({"type": "message-end", "delta": delta}) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the end of a message that an error cuts short, and the ``[DONE]`` mark."""
        reason = "TIMEOUT" if error.status in (408, 504) else "ERROR"
        delta = {"error": cohere_error_sentence(error), "finish_reason": reason}
        return cohere_event({"type": "message-end", "delta": delta}) + STREAM_DONE

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the blocks and calls of these events."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._message.add_delta(event)
                case ChoiceDone():
                    self._done = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole message."""
        answer: dict[str, Any] = {
            "id": self._answer_id,
            "message": self._message.message_object(),
            "finish_reason": self._finish_reason(self._message.called),
            "usage": cohere_usage(usage),
        }
        return encode_json(answer | ({"logprobs": self._message.logprobs} if self._wants_logprobs else {}))

    def _finish_reason(self, called: bool) -> str:
        """Return why the message ended. ``called``: it has a call."""
        assert self._done is not None
        if isinstance(self._done.stop, str):
            return "STOP_SEQUENCE"
        return "TOOL_CALL" if self._done.reason == "stop" and called else FINISH_REASONS[self._done.reason]
