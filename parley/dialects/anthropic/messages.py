"""``POST /v1/messages`` and its token count: reads a conversation, and writes one message or the events of a stream.

The stream begins as soon as the prompt is accepted: clients wait for headers while a long prompt is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from parley.dialects.admin_requests import TokenizeRequest, TokenizeResult
from parley.dialects.anthropic import options
from parley.dialects.anthropic.answer import PING_EVENT, BlockList, BlockStream, ThinkingDisplay
from parley.dialects.anthropic.api_headers import VERSION_HEADER
from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.blocks import BlockReader
from parley.dialects.anthropic.context_management import applied_edits_object, read_compaction, read_context_edits
from parley.dialects.anthropic.error_answers import anthropic_error_object
from parley.dialects.anthropic.options import (
    CREATE_MEMBERS,
    MAX_TOKENS,
    SHARED_MEMBERS,
    AnthropicOutputForm,
    AnthropicThinking,
)
from parley.dialects.anthropic.refusal_wording import ANTHROPIC_WORDING, check_anthropic_members
from parley.dialects.anthropic.token_usage import divide_iterations, input_usage, message_usage, output_usage
from parley.dialects.anthropic.tools import read_anthropic_tools
from parley.dialects.anthropic.turns import NO_PREFILL, TurnReader
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.messages import read_template_options
from parley.dialects.reply import Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import named_event
from parley.errors import InvalidValue, ParleyError
from parley.types import (
    AppliedEdit,
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    Event,
    Message,
    PromptAccepted,
    Request,
    SummarizeContext,
    Usage,
)

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ID_LENGTH = 22  # characters of base 58 that hold 128 bits


COUNTED_CONTEXTS = 4  # a prompt is counted up to this many times the context, to say how much it is too long
PING_SECONDS = 15.0
FIELD_NAMES: Mapping[str, str] = {"prompt": "messages", "stop": "stop_sequences", "continue_final_message": "messages"}
SAMPLING_CONFLICT = "`temperature` may only be set to 1 when thinking is enabled."
VERSION_MISSING = "anthropic-version: header is required"


def message_id(unique_id: str) -> str:
    """Return the id of a message: ``msg_01`` and the request's 128 bits in base 58."""
    number, characters = int(unique_id, 16), ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(BASE58))
        characters = BASE58[digit] + characters
    return f"msg_01{characters}"


class MessageBody:
    """The members of a body that decide the prompt. ``max_tokens``: None where tokens are only counted, which asks for
    no summary."""

    def __init__(
        self, rules: AnthropicRules, body: Fields, context: RequestContext, allowed: Collection[str],
        max_tokens: int | None = None,
    ):  # fmt: skip
        if rules.strict and VERSION_HEADER not in context.headers:
            raise InvalidValue(VERSION_MISSING, field="anthropic-version")
        check_anthropic_members(body, allowed, rules)
        blocks = BlockReader(context, rules)
        turn_reader = TurnReader(blocks, context)
        system = turn_reader.read_system(body)
        turns = turn_reader.read_turns(body)
        turn_reader.check_media(turns, dict(context.media_limits))
        tools = read_anthropic_tools(body, blocks, turn_reader.tool_changes)
        self.toolset_members = tools.toolset_members
        self.thinking: AnthropicThinking = options.read_anthropic_thinking(
            body, rules, max_tokens, forced_call=tools.choice == "required"
        )
        self.form: AnthropicOutputForm = options.read_output_form(body, rules)
        options.check_other_members(body, blocks)
        edits = read_context_edits(body, rules, context.context_length, thinks=self.thinking.enabled)
        compaction = read_compaction(body, rules, must_call=tools.choice == "required", only_counts=max_tokens is None)
        if compaction is not None:
            edits = [compaction]
        if max_tokens is None:
            edits = [edit for edit in edits if not isinstance(edit, SummarizeContext)]
        self.cache_ttl = blocks.cache_ttl
        self.model = _required_model(body)
        continues = _continues_last(turns, rules, thinks=self.thinking.enabled)
        self.chat = ChatPrompt(
            messages=_with_system(system, turns),
            tools=tools.tools,
            tool_choice=tools.choice,
            forced_tool=tools.forced,
            parallel_calls=tools.parallel,
            schema_fields=tools.schema_fields,
            thinking=self.thinking.enabled and not continues,
            reasoning_effort=self.form.effort,
            options={} if rules.strict else read_template_options(body),
            add_generation_prompt=not continues,
            continue_final=continues,
            edits=edits,
        )


def _required_model(body: Fields) -> str:
    model = body.string("model", None, cap=256)
    if model is None:
        raise body.missing_member("model")
    return model


def _with_system(system: str, turns: list[Message]) -> list[Message]:
    """Return the turns with the system prompt before them, or within a first turn of the system."""
    if not system:
        return turns
    if turns and turns[0].role == "system":
        return [Message("system", f"{system}\n{turns[0].content}"), *turns[1:]]
    return [Message("system", system), *turns]


def _continues_last(turns: Sequence[Message], rules: AnthropicRules, *, thinks: bool) -> bool:
    """Whether the model continues the assistant's last turn. Raises InvalidValue."""
    last = turns[-1] if turns else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        return False
    if rules.strict and thinks:
        raise InvalidValue(NO_PREFILL, field="messages")
    if rules.strict and last.content != last.content.rstrip():
        raise InvalidValue("messages: final assistant content cannot end with trailing whitespace", field="messages")
    return True


def read_messages_request(rules: AnthropicRules, body: bytes, context: RequestContext) -> MessagesReply:
    """Read the body of a request for a message. Raises BadRequest."""
    return MessagesReply(rules, decode_fields(body, ANTHROPIC_WORDING), context)


def read_count(rules: AnthropicRules, body: bytes, context: RequestContext) -> TokenizeRequest:
    """Read the body of a request that counts tokens; it may have all members of a message's. Raises BadRequest."""
    allowed = SHARED_MEMBERS if rules.strict else CREATE_MEMBERS
    fields = decode_fields(body, ANTHROPIC_WORDING)
    message = MessageBody(rules, fields, context, allowed)
    writer = write_managed_count if fields.has_value("context_management") else None
    return TokenizeRequest(model=message.model, prompt=message.chat, writer=writer)


def write_count(result: TokenizeResult) -> bytes:
    """Return the number of a prompt's tokens."""
    return encode_json({"input_tokens": len(result.token_ids)})


def write_managed_count(result: TokenizeResult) -> bytes:
    """Return the number of a prompt's tokens, and that before edits of the context."""
    count, original = len(result.token_ids), result.original_tokens
    original_count = {"original_input_tokens": count if original is None else original}
    return encode_json({"input_tokens": count, "context_management": original_count})


def seal_thinking(context: RequestContext, text: str) -> str:
    """Return thinking as the signature of its block."""
    return context.seal_reasoning(text.encode())


class MessagesReply(Reply):
    """A request for a message. Servers that answer it in another form derive their own replies."""

    field_names: ClassVar[Mapping[str, str]] = FIELD_NAMES
    ping_bytes: ClassVar[bytes] = PING_EVENT
    ping_interval: ClassVar[float | None] = PING_SECONDS

    def __init__(self, rules: AnthropicRules, body: Fields, context: RequestContext):
        max_tokens = body.integer("max_tokens", None, 1, MAX_TOKENS)
        message = MessageBody(rules, body, context, CREATE_MEMBERS, max_tokens)
        if max_tokens is None:
            raise body.missing_member("max_tokens")
        self._rules, self._context, self._cache_ttl = rules, context, message.cache_ttl
        self._reasons = message.thinking.enabled
        self._model = message.model  # as the client wrote it
        self._manages_context = body.has_value("context_management")
        self._applied_edits: Sequence[AppliedEdit] = ()
        self.request = self.build_request(body, message, max_tokens)
        self._block_stream, self._block_list = self.make_blocks(message)
        self._done: ChoiceDone | None = None
        self._summary: list[str] | None = None  # its pieces, if the answer is a summary of the conversation
        self._summary_end: ChoiceDone | None = None  # of a summary that stands before the answer

    def build_request(self, body: Fields, message: MessageBody, max_tokens: int) -> Request:
        """Return the request with its options. Raises BadRequest."""
        rules, context = self._rules, self._context
        sampling = options.read_anthropic_sampling(body, rules)
        if rules.strict and message.thinking.enabled and sampling.temperature != 1:
            raise InvalidValue(SAMPLING_CONFLICT, field="temperature")
        return Request(
            id=context.unique_id,
            model=message.model,
            prompts=[message.chat],
            sampling=sampling,
            stop_conditions=options.read_anthropic_stops(body, rules, max_tokens),
            grammar=message.form.grammar,
            thinking_budget=message.thinking.budget,
            stream=body.boolean("stream", False),
            counted_tokens=COUNTED_CONTEXTS * context.context_length,
        )

    def make_blocks(self, message: MessageBody) -> tuple[BlockStream, BlockList]:
        """Return the writers of the answer's blocks, as a stream and in one piece."""
        display = ThinkingDisplay(not self._reasons, message.thinking.omitted, partial(seal_thinking, self._context))
        return BlockStream(display, message.toolset_members), BlockList(display, message.toolset_members)

    # -- a stream

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the events of the message's start, its blocks and their ends."""
        parts = []
        for event in events:
            match event:
                case ChoiceDelta() if self._summary is not None:
                    self._add_to_summary(event)
                case ChoiceDelta():
                    parts.append(self._block_stream.write_delta(event))
                case PromptAccepted(prompt=0):
                    self._take_edits(event)
                    parts.append(self.message_start(len(event.token_ids)))
                case ChoiceDone(summary=str()):
                    self._summary_end = event
                    parts.append(self._block_stream.summary_events(self._sealed_summary(event.summary)))
                case ChoiceDone():
                    self._done = event
                    parts.append(self._block_stream.close_block())
                    if self._summary is not None:
                        parts.append(self._block_stream.summary_events(self._summary_block()))
        return b"".join(parts)

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the end of the message. The counts are those of the whole message, not differences."""
        usage, iterations = self._divide_usage(usage)
        reason, sequence = self.stop_reason(usage, called=self._block_stream.called)
        event: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": input_usage(usage, marked=self._cache_ttl is not None)
            | output_usage(usage, reasons=self._reasons)
            | iterations,
            **self._context_member(),
        }
        return named_event("message_delta", event) + named_event("message_stop", {"type": "message_stop"})

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the error event. The stream ends after it."""
        return named_event("error", anthropic_error_object(error, self._context.unique_id))

    def message_start(self, prompt_tokens: int) -> bytes:
        """Return the first event. Which tokens the cache has is not known yet; ``message_delta`` says it.

        Claude Code keeps a count of this event if ``message_delta`` says 0, so all tokens are in one that will not be.
        """
        usage = message_usage(Usage(prompt_tokens=prompt_tokens), self._cache_ttl, reasons=False)
        message = self._message_envelope([], None, None, usage)
        return named_event("message_start", {"type": "message_start", "message": message})

    # -- one answer

    def add_events(self, events: Sequence[Event]) -> None:
        """Collect the blocks of these events."""
        for event in events:
            match event:
                case ChoiceDelta() if self._summary is not None:
                    self._add_to_summary(event)
                case ChoiceDelta():
                    self._block_list.add_delta(event)
                case PromptAccepted(prompt=0):
                    self._take_edits(event)
                case ChoiceDone(summary=str()):
                    self._summary_end = event
                case ChoiceDone():
                    self._done = event

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole message."""
        assert self._done is not None
        content = self._block_list.content(self._done.reason) if self._summary is None else [self._summary_block()]
        if self._summary_end is not None:
            content.insert(0, self._sealed_summary(self._summary_end.summary))
        called = any(block["type"] == "tool_use" for block in content)
        usage, iterations = self._divide_usage(usage)
        counts = message_usage(usage, self._cache_ttl, reasons=self._reasons) | iterations
        envelope = self._message_envelope(content, *self.stop_reason(usage, called=called), counts)
        return encode_json(envelope | self._context_member())

    # -- both

    def _take_edits(self, event: PromptAccepted) -> None:
        self._applied_edits = event.applied_edits
        edits = [applied.edit for applied in event.applied_edits]
        if any(isinstance(edit, SummarizeContext) and edit.answer_heading is None for edit in edits):
            self._summary = []

    def _add_to_summary(self, delta: ChoiceDelta) -> None:
        if delta.output_part == "content":
            assert self._summary is not None
            self._summary.append(delta.text)

    def _summary_block(self) -> dict[str, Any]:
        """Return the summary as a block. One that was cut off stands for nothing."""
        assert self._summary is not None and self._done is not None
        is_whole = self._done.reason == "stop" and self._done.stop is None
        return self._sealed_summary("".join(self._summary).strip() if is_whole else "")

    def _sealed_summary(self, text: str | None) -> dict[str, Any]:
        """Return the block of a summary. An empty one stands for nothing."""
        if not text:
            return {"type": "compaction", "content": None}
        return {"type": "compaction", "content": text, "signature": self._context.seal_reasoning(text.encode())}

    def _divide_usage(self, usage: Usage) -> tuple[Usage, dict[str, Any]]:
        """Return the usage without that of a summary before the answer, and the member that tells both."""
        if self._summary_end is None:
            return usage, {}
        return divide_iterations(usage, self._summary_end.usage, self._cache_ttl)

    def _message_envelope(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "id": message_id(self._context.unique_id),
            "type": "message",
            "role": "assistant",
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def stop_reason(self, usage: Usage, *, called: bool) -> tuple[str, str | None]:
        """Return why the message ended, and the stop sequence that ended it."""
        assert self._done is not None
        if self._done.reason == "length":
            fills_context = usage.prompt_tokens + usage.completion_tokens >= self._context.context_length
            max_tokens = self.request.stop_conditions.max_tokens or 0
            is_clamped = fills_context and usage.completion_tokens < max_tokens
            return ("model_context_window_exceeded" if is_clamped else "max_tokens"), None
        if isinstance(self._done.stop, str):
            return "stop_sequence", self._done.stop
        if self._summary is not None:
            return "compaction", None
        return ("tool_use" if called else "end_turn"), None

    def _context_member(self) -> dict[str, Any]:
        """Return the edits of the context that changed something, if the request has some."""
        return {"context_management": applied_edits_object(self._applied_edits)} if self._manages_context else {}
