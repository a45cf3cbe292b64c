"""``/v1/chat/completions/render`` and the like for completions, messages and responses: the prompt of a request as
tokens, without an answer.

The answer is the body of ``/inference/v1/generate`` that continues these tokens as the request asks, one for each
prompt (``vllm/entrypoints/scale_out/render/serving.py``). Routers use it to find the instance that has the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects.anthropic.api_rules import LENIENT_ANTHROPIC_RULES
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai import vllm_members
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.render_reply import PromptRenderer, RenderedPrompt
from parley.dialects.request_context import RequestContext
from parley.dialects.vllm import requests
from parley.dialects.vllm.chat import VllmChatReply
from parley.dialects.vllm.completions import VllmCompletionReply
from parley.dialects.vllm.messages import VllmMessagesReply, decode_message_body
from parley.dialects.vllm.responses import VllmResponsesReply, decode_response_body, store_error
from parley.dialects.vllm.token_routes import sampling_params
from parley.errors import InvalidValue
from parley.types import ChatPrompt, Request

STATELESS_SENTENCE = "previous_response_id is not supported by the stateless render endpoint."
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
BEAM_SEARCH_SENTENCE = "Beam search is not supported by the render endpoint"


def read_chat_rendering(body: bytes, context: RequestContext) -> ChatRendering:
    """Read a conversation to render. Raises BadRequest."""
    return ChatRendering(requests.decode_generation_body(body, context), context)


def read_message_rendering(body: bytes, context: RequestContext) -> MessageRendering:
    """Read a request for a message to render. Raises BadRequest."""
    return MessageRendering(decode_message_body(body, context), context)


def read_response_rendering(body: bytes, context: RequestContext) -> ResponseRendering:
    """Read a request for a response to render. Raises BadRequest."""
    fields = requests.decode_generation_body(body, context)
    if fields.has_value("previous_response_id"):
        raise store_error(STATELESS_SENTENCE, "previous_response_id")
    if fields.has_value("conversation"):
        raise unsupported_member_error(fields, "conversation", "A stored conversation with a rendered prompt is")
    # Nothing is stored and nothing runs in the background, so servers that store no responses render these as well
    fields = decode_response_body(body, context, renders=True).without_members({"background"})
    return ResponseRendering(fields.with_members({"store": False}), context)


def read_completion_rendering(body: bytes, context: RequestContext) -> CompletionRendering:
    """Read prompts to render. Raises BadRequest."""
    return CompletionRendering(requests.decode_generation_body(body, context), context)


class ChatRendering(VllmChatReply, PromptRenderer):
    """A conversation that is answered with its tokens."""

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(body, context)
        check_renderable(self.request, body)
        self._forwarded_members = _read_forwarded_members(body)
        self.wants_spans = body.boolean("return_token_offsets", False)

    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the request that continues the conversation."""
        answer_id = f"chatcmpl-{self._answer_id}"
        return encode_json(write_generate_request(answer_id, prompts[0], self.request, self._forwarded_members))


class MessageRendering(VllmMessagesReply, PromptRenderer):
    """A request for a message that is answered with its tokens."""

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(LENIENT_ANTHROPIC_RULES, body, context)
        check_renderable(self.request, body)

    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the request that continues the conversation. Its stream always counts tokens."""
        options = dict.fromkeys(STREAM_OPTIONS, True) if self.request.stream else None
        answer_id = f"chatcmpl-{self._answer_id}"
        return encode_json(write_generate_request(answer_id, prompts[0], self.request, {"stream_options": options}))


class ResponseRendering(VllmResponsesReply, PromptRenderer):
    """A request for a response that is answered with its tokens."""

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(body, context)
        check_renderable(self.request, body)
        own_id = f"resp_{context.unique_id[:16]}"
        self._answer_id = body.string("request_id", "") or own_id
        self._forwarded_members = {name: body.free_object(name) or None for name in vllm_members.TRANSFER_MEMBERS}

    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the request that continues the conversation."""
        return encode_json(write_generate_request(self._answer_id, prompts[0], self.request, self._forwarded_members))


class CompletionRendering(VllmCompletionReply, PromptRenderer):
    """Plain prompts that are answered with their tokens."""

    def __init__(self, body: Fields, context: RequestContext):
        super().__init__(body, context)
        check_renderable(self.request, body)
        self._forwarded_members = _read_forwarded_members(body)
        self.wants_spans = body.boolean("return_token_offsets", False)

    def render_prompts(self, prompts: Sequence[RenderedPrompt]) -> bytes:
        """Return the requests that continue the prompts."""
        answer_id, several = f"cmpl-{self._answer_id}", len(prompts) > 1
        return encode_json(
            [
                write_generate_request(
                    f"{answer_id}-{number}" if several else answer_id, prompt, self.request, self._forwarded_members
                )
                for number, prompt in enumerate(prompts)
            ]
        )


def check_renderable(request: Request, body: Fields) -> None:
    """Refuse options that the rendered request could not express. Raises BadRequest."""
    if request.beam is not None:
        raise InvalidValue(BEAM_SEARCH_SENTENCE)
    if request.grammar is not None and request.grammar.kind == "tags":
        member = "response_format" if body.has_value("response_format") else "structured_outputs"
        raise unsupported_member_error(body, member, "A structural tag with a rendered prompt is")
    for prompt in request.prompts:
        if not isinstance(prompt, ChatPrompt):
            continue
        if any(message.media for message in prompt.messages):
            raise unsupported_member_error(body, "messages", "Media in a rendered prompt are")
        if prompt.tool_choice == "required":
            raise unsupported_member_error(body, "tool_choice", "A forced call with a rendered prompt is")


def _read_forwarded_members(body: Fields) -> dict[str, Any]:
    """Return the members that a rendered request takes over unchanged."""
    members: dict[str, Any] = {"return_token_ids": body.boolean("return_token_ids", None)}
    options = body.object("stream_options")
    if options is not None and body.boolean("stream", False):
        members["stream_options"] = {name: options.boolean(name, False) for name in STREAM_OPTIONS}
    return members


def write_generate_request(
    request_id: str, prompt: RenderedPrompt, request: Request, forwarded_members: dict[str, Any]
) -> dict[str, Any]:
    """Return the body that continues a prompt, with every member of the original, also those without a value."""
    return {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "token_offsets": prompt.spans,
        "features": None,
        "content_parts": None,
        "sampling_params": sampling_params.write_sampling_params(request, prompt.max_tokens),
        "model": request.model,
        "reasoning_ended": prompt.reasoning_ended,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": request.stream,
        "stream_options": None,
        "cache_salt": request.cache_salt or None,
        "priority": request.priority,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    } | forwarded_members
