"""``POST /v1/messages`` and its token count as vLLM answers them: Anthropic's conversation, vLLM's options and errors.

The original turns a body into a conversation of chat completions, and its answer back. So the options have that route's
limits and sentences, reasoning is always shown, and the last turn of the assistant is never continued. Errors in the
shape of a body have vLLM's form, all others Anthropic's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec

from parley.dialects.admin_requests import TokenizeRequest
from parley.dialects.anthropic.answer import AnswerBlock, BlockList, BlockStream, ThinkingDisplay
from parley.dialects.anthropic.api_rules import LENIENT_ANTHROPIC_RULES
from parley.dialects.anthropic.messages import (
    FIELD_NAMES,
    MessageBody,
    MessagesReply,
    seal_thinking,
    write_managed_count,
)
from parley.dialects.anthropic.options import CREATE_MEMBERS, OTHER_MEMBERS
from parley.dialects.anthropic.toolsets import ToolsetMember
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS, read_openai_sampling, read_stop_conditions
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sse import named_event
from parley.dialects.vllm import requests
from parley.dialects.vllm.answer_parts import vllm_call_id
from parley.dialects.vllm.error_answers import vllm_error_answer, vllm_error_object
from parley.dialects.vllm.refusal_wording import EMPTY_SENTENCES, VLLM_WORDING, value_error
from parley.dialects.vllm.token_usage import created_cache_tokens
from parley.errors import (
    InvalidValue,
    MalformedBody,
    MissingField,
    NotAllowed,
    NotFound,
    ParleyError,
    Unauthorized,
    UnknownModel,
    WrongType,
)
from parley.types import ChatPrompt, ChoiceDelta, Request, Usage

MIN_BUDGET = 1024  # tokens of thinking
CHAT_NAMES = {"max_tokens": "max_completion_tokens", "stop_sequences": "stop"}  # of the members with other names there
SHARED_NAMES = (
    "temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
    "watermarking", "mm_payload", "return_mm_kwargs",
)  # fmt: skip
ERROR_TYPES = {  # by status; of all other errors of the server ``api_error``, of the client ``invalid_request_error``
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
TEXT_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":%b},'
    b'"index":%d}\n\n'
)
SHAPE_ERRORS = (MalformedBody, MissingField, WrongType)
# Members of Anthropic's API that the original does not know and so does not read.
UNREAD_MEMBERS = {*OTHER_MEMBERS, "compaction", "context_management", "speed"}


def messages_error(error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    is_routing = isinstance(error, Unauthorized | NotFound | NotAllowed) and not isinstance(error, UnknownModel)
    if is_routing or isinstance(error, SHAPE_ERRORS):
        return vllm_error_answer(error)
    return Answer(vllm_error_object(error)["error"]["code"], encode_json(error_object(error)))


def error_object(error: ParleyError) -> dict[str, Any]:
    """Return an error in Anthropic's form, with vLLM's sentence."""
    fault = vllm_error_object(error)["error"]
    error_type = ERROR_TYPES.get(fault["code"], "api_error" if fault["code"] >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": error_type, "message": fault["message"]}}


def read_vllm_messages(body: bytes, context: RequestContext) -> VllmMessagesReply:
    """Read the body of a request for a message. Raises BadRequest."""
    return VllmMessagesReply(LENIENT_ANTHROPIC_RULES, decode_message_body(body, context), context)


def decode_message_body(body: bytes, context: RequestContext) -> Fields:
    """Return the members of the body of a request for a message, after the original's own checks. Raises
    BadRequest."""
    fields = _decode_body(body, context)
    max_tokens = fields.integer("max_tokens", None, None, None)
    if max_tokens is not None and max_tokens <= 0:
        raise value_error("max_tokens", "max_tokens must be positive", fields.raw_value("max_tokens"))
    fields.array("stop_sequences", cap=requests.MAX_STOP_STRINGS)
    thinking = fields.object("thinking")
    if thinking is not None:
        budget = thinking.integer("budget_tokens", None, MIN_BUDGET, MAX_TOKENS)
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            members = dict.fromkeys(fields.member_names)
            raise value_error("", "thinking.budget_tokens must be less than max_tokens", members)
    return fields.without_members(UNREAD_MEMBERS)


def read_vllm_count(body: bytes, context: RequestContext) -> TokenizeRequest:
    """Read the body of a request that counts tokens. Raises BadRequest."""
    fields = _decode_body(body, context).without_members(UNREAD_MEMBERS)
    message = MessageBody(LENIENT_ANTHROPIC_RULES, fields, context, CREATE_MEMBERS)
    return TokenizeRequest(model=message.model, prompt=_vllm_chat(fields, message), writer=write_managed_count)


def _decode_body(body: bytes, context: RequestContext) -> Fields:
    fields = requests.decode_generation_body(body, context)
    if fields.raw_value("model") == "":
        raise value_error("model", "Model is required", "")
    if fields.raw_value("messages") == []:
        raise InvalidValue(EMPTY_SENTENCES["messages"])
    return fields


def _vllm_chat(body: Fields, message: MessageBody) -> ChatPrompt:
    """Return the conversation. The template decides whether the model thinks, unless the request forbids it."""
    thinking = body.object("thinking")
    is_disabled = thinking is not None and thinking.raw_value("type") == "disabled"
    return msgspec.structs.replace(
        message.chat,
        thinking=False if is_disabled else None,
        reasoning_effort="none" if is_disabled else message.form.effort,
        add_generation_prompt=True,
        continue_final=False,
    )


class VllmBlockStream(BlockStream):
    """Writes the events of blocks in vLLM's form: the index comes last, and nothing is sent that says nothing."""

    first_ping = b""
    empty_arguments = False

    def __init__(self, display: ThinkingDisplay, toolset_members: Mapping[str, ToolsetMember]):
        super().__init__(display, toolset_members)
        self._arguments: list[str] = []  # of the last call

    @property
    def call_is_complete(self) -> bool:
        """Whether the arguments of the last call are JSON; a stop sequence may have cut them off."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    def write_delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a delta."""
        if delta.tool_call is not None:
            if delta.tool_call.name is not None:
                self._arguments = []
            self._arguments.append(delta.tool_call.arguments)
        return super().write_delta(delta)

    def text_delta(self, text: str) -> bytes:
        """Return the event with a piece of text, as nearly all events are."""
        return TEXT_DELTA % (encode_json(text), self._count - 1)

    def event_object(self, name: str, index: int, members: dict[str, Any]) -> dict[str, Any]:
        """Return the event of a block with its members in order."""
        return {"type": name, **members, "index": index}

    def start_of_block(self, block: AnswerBlock) -> dict[str, Any]:
        """Return a block before it has any content."""
        start = super().start_of_block(block)
        start.pop("signature", None)
        return start

    def call_id(self, call_id: str) -> str:
        """Return a call's id as clients get it."""
        return vllm_call_id(call_id)


class VllmMessagesReply(MessagesReply):
    """A request for a message, answered in vLLM's form."""

    ping_bytes: ClassVar[bytes] = Reply.ping_bytes
    ping_interval: ClassVar[float | None] = None
    field_names: ClassVar[Mapping[str, str]] = {**FIELD_NAMES, "max_tokens": "max_completion_tokens"}

    def build_request(self, body: Fields, message: MessageBody, max_tokens: int) -> Request:
        """Return the request with the options of chat completions. Raises BadRequest."""
        context, members = self._context, _chat_members(body)
        requests.check_generation(members, context, limit_member="max_completion_tokens", least=1)
        extra_members = vllm_members.read_vllm_members(
            members, context, max_tokens=max_tokens, rules=requests.VLLM_RULES
        )
        stop_conditions = read_stop_conditions(members, max_tokens, requests.VLLM_RULES)
        self._answer_id = requests.choose_answer_id(context, context.unique_id)
        return Request(
            id=context.unique_id,
            model=message.model,
            prompts=[vllm_members.with_reused_tokens(body, _vllm_chat(body, message))],
            sampling=read_openai_sampling(members),
            stop_conditions=requests.cap_max_tokens(stop_conditions, context),
            grammar=message.form.grammar,
            thinking_budget=message.thinking.budget,
            stream=body.boolean("stream", False),
            **extra_members.request_members,
        )

    def make_blocks(self, message: MessageBody) -> tuple[BlockStream, BlockList]:
        """Return the writers of the answer's blocks. Thinking is always shown."""
        display = ThinkingDisplay(False, False, partial(seal_thinking, self._context))
        members = message.toolset_members
        return VllmBlockStream(display, members), BlockList(display, members, vllm_call_id)

    # -- a stream

    def message_start(self, prompt_tokens: int) -> bytes:
        """Return the first event."""
        message = self._message_object([]) | {"stop_reason": None, "stop_sequence": None}
        message |= {"usage": {"input_tokens": prompt_tokens, "output_tokens": 0}}
        return named_event("message_start", {"type": "message_start", "message": message})

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the end of the message."""
        assert isinstance(self._block_stream, VllmBlockStream)
        called, is_complete = self._block_stream.called, self._block_stream.call_is_complete
        reason, sequence = self.stop_reason(usage, called=called, is_complete=called and is_complete)
        event: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _message_usage(usage, self._context),
        }
        return named_event("message_delta", event) + named_event("message_stop", {"type": "message_stop"})

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the end of the open block, and the error event. The stream ends after it."""
        return self._block_stream.close_block() + named_event("error", error_object(error))

    # -- one answer

    def render_body(self, usage: Usage) -> bytes:
        """Return the whole message, without absent values. An empty one has a text without characters."""
        assert self._done is not None
        content = self._block_list.content(self._done.reason) or [{"type": "text", "text": ""}]
        called = any(block["type"] == "tool_use" for block in content)
        reason, sequence = self.stop_reason(usage, called=called, is_complete=called)
        ending = {"stop_reason": reason} | ({} if sequence is None else {"stop_sequence": sequence})
        return encode_json(self._message_object(content) | ending | {"usage": _message_usage(usage, self._context)})

    # -- both

    def stop_reason(self, usage: Usage, *, called: bool, is_complete: bool = False) -> tuple[str, str | None]:
        """Return why the message ended, and the stop sequence that ended it. The original knows no full context.

        ``is_complete``: all calls are, so that they count and a stop sequence after them does not.
        """
        reason, sequence = super().stop_reason(usage, called=called)
        if reason == "stop_sequence" and is_complete:
            return "tool_use", None
        return ("max_tokens" if reason == "model_context_window_exceeded" else reason), sequence

    def _message_object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._answer_id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.request.model,
        }


def _chat_members(body: Fields) -> Fields:
    """Return the options under their names in chat completions. The original has no others on this route."""
    names = dict(zip(SHARED_NAMES, SHARED_NAMES, strict=True)) | CHAT_NAMES
    present = {there: body.raw_value(here) for here, there in names.items() if body.has_value(here)}
    return Fields(present, "", VLLM_WORDING)


def _message_usage(usage: Usage, context: RequestContext) -> dict[str, int]:
    """Return the counts of a message; clients add up those of the prompt."""
    created_tokens = created_cache_tokens(usage, context)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - created_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": created_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
    }
