"""``POST /v1/chat`` of the first version, which LlamaIndex, Bedrock's clients and ``cohere.Client`` call.

A stream has lines of JSON, or server-sent events if the header ``Accepts`` or ``Accept`` names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal
from uuid import UUID, uuid5

from parley.dialects.cohere import conversation, options
from parley.dialects.cohere.answer_ids import id_as_uuid
from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.chat import COUNTED_CONTEXTS, FINISH_REASONS, MAX_MODEL_NAME
from parley.dialects.cohere.error_answers import cohere_error_sentence
from parley.dialects.cohere.first_answer import FirstMessage
from parley.dialects.cohere.first_conversation import FirstConversation, read_first_documents, read_first_tools
from parley.dialects.cohere.refusal_wording import COHERE_WORDING, check_cohere_members, cohere_value_error
from parley.dialects.cohere.token_usage import cohere_usage
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue, ParleyError
from parley.types import ChatPrompt, ChoiceDelta, ChoiceDone, Event, PromptAccepted, Request, TextPrompt, Usage

EVENT_STREAM = b"text/event-stream"
FIRST_BODY_MEMBERS = {
    "message", "model", "stream", "preamble", "chat_history", "conversation_id", "prompt_truncation", "connectors",
    "search_queries_only", "documents", "citation_quality", "temperature", "max_tokens", "max_input_tokens", "k", "p",
    "seed", "stop_sequences", "frequency_penalty", "presence_penalty", "raw_prompting", "tools", "tool_results",
    "force_single_step", "response_format", "safety_mode",
}  # fmt: skip
SAFETY_MODES = ("CONTEXTUAL", "STRICT", "NONE")
TRUNCATIONS = ("OFF", "AUTO", "AUTO_PRESERVE_ORDER")
NO_CITATIONS = ("OFF", "DISABLED")
CITATION_QUALITIES = ("ENABLED", "DISABLED", "FAST", "ACCURATE", "OFF")
BESIDE_RAW = ("preamble", "chat_history", "documents", "tools", "tool_results")
REFUSED_MEMBERS = {  # unless they are empty, 0 or false
    "conversation_id": "is not supported by this server, which keeps no conversations: send 'chat_history'.",
    "connectors": "are not supported by this server, which searches nothing: send 'documents'.",
    "search_queries_only": "is not supported by this server, which searches nothing.",
    "max_input_tokens": "is not supported by this server: prompts may fill the model's context.",
}


def read_first_chat(rules: CohereRules, body: bytes, context: RequestContext) -> FirstChatReply:
    """Read a message and its conversation. Raises BadRequest."""
    accepted = context.headers.get(b"accepts", b"") + context.headers.get(b"accept", b"")
    reply_class = FirstEventsReply if EVENT_STREAM in accepted.lower() else FirstChatReply
    return reply_class(rules, decode_fields(body, COHERE_WORDING), context)


class FirstChatReply(Reply):
    """A reply to a message."""

    media_type: ClassVar[str] = "application/stream+json"
    field_names: ClassVar[Mapping[str, str]] = {"prompt": "message", "stop": "stop_sequences"}
    ping_bytes: ClassVar[bytes] = b""
    server_sent: ClassVar[bool] = False

    def __init__(self, rules: CohereRules, body: Fields, context: RequestContext):
        check_cohere_members(body, FIRST_BODY_MEMBERS, rules)
        _refuse_members(body)
        thinking = options.read_cohere_thinking(body, rules)
        prompt, self._history = _read_prompt(body, rules, context, thinks=thinking.enabled)
        body.boolean("force_single_step", False)  # an answer is one step in any case
        self.request = Request(
            id=context.unique_id,
            model=body.string("model", "", cap=MAX_MODEL_NAME),
            prompts=[prompt],
            sampling=options.read_cohere_sampling(body, rules),
            stop_conditions=options.read_cohere_stops(body, rules),
            grammar=options.read_cohere_format(body, rules, "schema", "json_schema"),
            thinking_budget=thinking.budget,
            stream=body.boolean("stream", False),
            on_overflow=_read_truncation(body),
            counted_tokens=COUNTED_CONTEXTS * context.context_length,
        )
        self._response_id = id_as_uuid(context.unique_id)
        self._generation_id = _second_id(self._response_id)
        self._message = FirstMessage(server_sent=self.server_sent)
        self._done: ChoiceDone | None = None

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the events of the start, of pieces of text and calls, and of all calls."""
        parts = []
        for event in events:
            match event:
                case ChoiceDelta():
                    parts.append(self._message.write_delta(event))
                case PromptAccepted():
                    parts.append(self._message.event("stream-start", {"generation_id": self._generation_id}))
                case ChoiceDone():
                    self._done = event
                    parts.append(self._message.finish_calls())
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the last event, which has the whole answer."""
        members = {"response": self._answer_object(usage), "finish_reason": self._finish_reason()}
        return self._message.event("stream-end", members, is_last=True)

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the last event of a stream that an error cuts short."""
        reason = "TIMEOUT" if error.status in (408, 504) else "ERROR"
        response = {"response_id": self._response_id, "text": self._message.text, "generation_id": self._generation_id}
        members = {"response": response | {"finish_reason": reason}, "finish_reason": reason}
        return self._message.event("stream-end", members | {"error": cohere_error_sentence(error)}, is_last=True)

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the text and the calls of these events."""
        for event in events:
            match event:
                case ChoiceDelta():
                    self._message.add_delta(event)
                case ChoiceDone():
                    self._done = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole answer."""
        return encode_json(self._answer_object(usage))

    def _answer_object(self, usage: Usage) -> dict[str, Any]:
        text, calls = self._message.text, self._message.calls_member()
        return {
            "response_id": self._response_id,
            "text": text,
            "generation_id": self._generation_id,
            "chat_history": [*self._history, {"role": "CHATBOT", "message": text} | calls],
            "finish_reason": self._finish_reason(),
            "meta": {"api_version": {"version": "1"}} | cohere_usage(usage),
        } | calls

    def _finish_reason(self) -> str:
        assert self._done is not None
        if isinstance(self._done.stop, str):
            return "STOP_SEQUENCE"
        return "COMPLETE" if self._done.reason == "tool" else FINISH_REASONS[self._done.reason]


class FirstEventsReply(FirstChatReply):
    """A reply to a message whose stream has server-sent events."""

    media_type: ClassVar[str] = "text/event-stream"
    ping_bytes: ClassVar[bytes] = Reply.ping_bytes
    server_sent: ClassVar[bool] = True


def _refuse_members(body: Fields) -> None:
    """Refuse members that this server does not support. Raises Unsupported."""
    for name, sentence in REFUSED_MEMBERS.items():
        if body.raw_value(name):
            raise cohere_value_error(body, name, sentence)
    quality = body.string("citation_quality", "OFF", cap=MAX_MODEL_NAME).upper()
    if quality not in CITATION_QUALITIES:
        body.string("citation_quality", None, allowed=CITATION_QUALITIES)
    if quality not in NO_CITATIONS:
        raise cohere_value_error(
            body, "citation_quality", "is not supported by this server, whose answers have no citations."
        )


def _read_prompt(
    body: Fields, rules: CohereRules, context: RequestContext, *, thinks: bool | None
) -> tuple[ChatPrompt | TextPrompt, list[Any]]:
    """Return the prompt, and the turns that the answer repeats. Raises BadRequest."""
    turns = FirstConversation(body, rules)
    if body.boolean("raw_prompting", False):
        for name in BESIDE_RAW:
            if body.raw_value(name):
                raise body.member_error(name, "not allowed with 'raw_prompting'.")
        return TextPrompt(body.string("message", ""), add_special_tokens=True), turns.history
    messages, template_options = conversation.place_documents(turns.messages, read_first_documents(body), context)
    template_options |= options.read_safety_mode(body, context, SAFETY_MODES)
    tools = read_first_tools(body, rules)
    if body.raw_value("tool_results") and not tools.tools:
        raise InvalidValue("invalid request: tool_results are only allowed with tools.", field="tool_results")
    chat = ChatPrompt(
        messages=messages,
        tools=tools.tools,
        schema_fields=tools.schema_fields,
        thinking=thinks,
        options=template_options,
    )
    return chat, turns.history


def _read_truncation(body: Fields) -> Literal["refuse", "oldest_turns"]:
    """Return whether a prompt that is too long loses its oldest turns or is refused."""
    return "refuse" if body.string("prompt_truncation", "OFF", allowed=TRUNCATIONS) == "OFF" else "oldest_turns"


def _second_id(answer_id: str) -> str:
    """Return the id of the generation, which the id of the answer determines."""
    return str(uuid5(UUID(int=0), answer_id))
