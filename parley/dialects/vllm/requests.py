"""The request rules of vLLM's server that OpenAI's API does not have, for chat and completions.

The members themselves are read in ``dialects/openai``. Here are only the differences, in the original's wording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from parley.dialects import output_constraints
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.openai import constraints, vllm_members
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.dialects.openai.reading_rules import ReadingRules
from parley.dialects.output_constraints import CONSTRAINT_KINDS
from parley.dialects.reply import Answer, Reply
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_CHOICES_PER_PROMPT
from parley.dialects.vllm.error_answers import vllm_failure_events
from parley.dialects.vllm.refusal_wording import (
    LOGPROB_MEMBERS,
    VLLM_WORDING,
    parameter_error,
    too_many_stops,
    wrong_content_type,
)
from parley.errors import BadRequest, InvalidValue, excerpt
from parley.types import Grammar, Request, SamplingOptions, StopConditions

MAX_STOP_STRINGS = 4
MAX_ID_CHARACTERS = 128  # characters of a request id in a header
MAX_NEW_TOKENS = "max_new_tokens"  # a generation default that limits a member rather than filling it in
GREEDY_TEMPERATURE = 1e-5  # a lower temperature is treated as 0
VLLM_RULES = ReadingRules(
    roles=(),
    reserved_tokens=1,
    best_of=False,
    min_alternatives=0,
    shows_unused_tools=True,
    lenient_messages=True,
    media_roles=(),
    plain_urls=False,
    custom_tools=False,
)
FORMAT_KINDS = {"json_object": "json_object", "json_schema": "json", "structural_tag": "structural_tag"}  # by type
UNTRUSTED_TEMPLATE = (
    "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with "
    "untrusted chat template."
)
UNTRUSTED_MEDIA = (
    "Per-request {name} are disabled by default because they can change multimodal preprocessing resource usage. Start "
    "the server with --trust-request-mm-kwargs only when clients are trusted."
)

ReplyT = TypeVar("ReplyT", bound=Reply)


def read_vllm_request(
    reply_class: Callable[[Fields, RequestContext], ReplyT], body: bytes, context: RequestContext
) -> ReplyT | Answer:
    """Return the reply to a body. A refusal by the original's engine is sent inside a stream. Raises BadRequest."""
    fields = decode_generation_body(body, context)
    try:
        return reply_class(fields, context)
    except InvalidValue as error:
        if error.field in LOGPROB_MEMBERS and fields.raw_value("stream") is True and "max allowed" in error.message:
            return Answer(200, vllm_failure_events(error), b"text/event-stream; charset=utf-8")
        raise


def decode_generation_body(body: bytes, context: RequestContext) -> Fields:
    """Return the members of a body, with the model's generation defaults. Raises BadRequest."""
    check_content_type(context)
    defaults = {name: value for name, value in context.generation_defaults.items() if name != MAX_NEW_TOKENS}
    return decode_vllm_body(body).with_defaults(defaults)


def decode_vllm_body(body: bytes) -> Fields:
    """Return the members of a body. Raises BadRequest in vLLM's words."""
    return decode_fields(body, VLLM_WORDING)


def check_content_type(context: RequestContext) -> None:
    """Raise MalformedBody if the content type is not JSON."""
    content_type = context.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not (content_type.endswith((b"/json", b"+json")) and b"/" in content_type):
        raise wrong_content_type()


def without_idle_members(body: Fields) -> Fields:
    """Return the body without members whose values the original takes as none: no options of a stream, and no
    alternatives for a prompt whose answer is a stream."""
    streams = body.boolean("stream", False)
    idle = set()
    if body.raw_value("stream_options") == {} and not streams:
        idle.add("stream_options")
    if body.raw_value("prompt_logprobs") == 0 and streams:
        idle.add("prompt_logprobs")
    return body.without_members(idle) if idle else body


def check_generation(
    body: Fields, context: RequestContext, *, limit_member: str = "max_tokens", least: int = 0
) -> None:
    """Check the rules for all generating requests. ``limit_member``: the member that limits the output, at ``least``.

    Raises BadRequest.
    """
    fault = next(_generation_faults(body, context, limit_member, least), None)
    if fault is not None:
        raise fault


def _generation_faults(body: Fields, context: RequestContext, limit_member: str, least: int) -> Iterator[BadRequest]:
    yield from salt_faults(body)
    stops = body.raw_value("stop")
    if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        yield too_many_stops(stops, MAX_STOP_STRINGS)
    yield from drawing_faults(body, greedy_choices=body.boolean("use_beam_search", False))
    max_tokens = body.integer(limit_member, None, least, MAX_TOKENS)
    if max_tokens is not None and context.context_length and max_tokens > context.context_length:
        sentence = f"{limit_member}={max_tokens} cannot be greater than max_model_len={context.context_length}."
        yield parameter_error(f"{sentence} Please request fewer output tokens.", limit_member, max_tokens)
    yield from token_faults(body, max_tokens)
    room = context.context_length - (max_tokens or 0)
    if context.context_length and (truncation := body.integer("truncate_prompt_tokens", -1, -1, MAX_TOKENS)) > room:
        sentence = (
            f"truncate_prompt_tokens={truncation} cannot be greater than max_model_len - {limit_member} = {room}."
        )
        yield parameter_error(
            f"{sentence} Please request a smaller truncation size.", "truncate_prompt_tokens", truncation
        )
    body.integer("seed", None)  # a signed integer of 64 bits
    if body.raw_value("logprob_token_ids") == []:
        yield parameter_error("`logprob_token_ids` must not be an empty list.", "logprob_token_ids")
    if body.boolean("stream", False) and body.raw_value("prompt_logprobs"):
        yield parameter_error("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if body.boolean("stream", False) and body.boolean("use_beam_search", False):
        yield InvalidValue("Streaming is not currently supported with beam search")
    if body.raw_value("logprob_token_ids") and body.boolean("use_beam_search", False):
        yield parameter_error("`logprob_token_ids` is not supported with beam search.", "logprob_token_ids")
    for name in vllm_members.MEDIA_MEMBERS:
        if body.raw_value(name) and not context.api_options.trust_request_mm_kwargs:
            yield parameter_error(UNTRUSTED_MEDIA.format(name=name), name)
    yield from _constraint_faults(body)


def salt_faults(body: Fields) -> Iterator[BadRequest]:
    """Yield the faults of the salt of the prefix cache but for its characters."""
    salt = body.raw_value("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        yield parameter_error("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    elif len(salt) > vllm_members.MAX_SALT_CHARACTERS:
        yield body.member_error("cache_salt", "has too many characters.")


def drawing_faults(body: Fields, *, greedy_choices: bool = False) -> Iterator[BadRequest]:
    """Yield the faults of members that say how tokens are drawn. ``greedy_choices``: they may be several."""
    if body.number("top_p", 1.0, 0, 1) == 0:
        yield parameter_error("top_p must be in (0, 1], got 0.0.", "top_p", 0.0)
    n = body.integer("n", 1, 1, MAX_CHOICES_PER_PROMPT)
    if n > 1 and body.number("temperature", 1.0, 0, 2) < GREEDY_TEMPERATURE and not greedy_choices:
        yield InvalidValue(f"n must be 1 when using greedy sampling, got {n}.")


def token_faults(body: Fields, max_tokens: int | None) -> Iterator[BadRequest]:
    """Yield the faults of members that say how many tokens and which ones are drawn."""
    minimum = body.integer("min_tokens", 0, 0, MAX_TOKENS)
    if max_tokens is not None and 0 < max_tokens < minimum:
        yield InvalidValue(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {minimum}.")
    if body.has_value("allowed_token_ids") and not body.raw_value("allowed_token_ids"):
        yield parameter_error("allowed_token_ids is not None and empty!", "allowed_token_ids", [])
    bias = body.raw_value("logit_bias")
    keys = [key for key in bias if not (key.isascii() and key.isdigit())][:8] if isinstance(bias, dict) else []
    if keys:
        key_list = excerpt(keys, 200)
        sentence = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {key_list}"
        yield parameter_error(sentence, "logit_bias", keys)


def read_vllm_grammar(body: Fields) -> Grammar | None:
    """Return the constraint in ``structured_outputs``, if there is one. Raises BadRequest."""
    fault = next(_constraint_faults(body.without_members({"response_format"})), None)
    if fault is not None:
        raise fault
    options = body.object("structured_outputs")
    return None if options is None else output_constraints.read_structured_outputs(options)


def _constraint_faults(body: Fields) -> Iterator[BadRequest]:
    options = body.object("structured_outputs")
    present = {kind for kind in CONSTRAINT_KINDS if options is not None and options.raw_value(kind)}
    if len(present | (_format_kind(body) if present else set())) > 1:
        yield body.member_error("structured_outputs", "has more than one constraint.")
    if options is not None and not present and not options.has_value("json"):
        unset = dict.fromkeys(CONSTRAINT_KINDS)
        yield InvalidValue(f"You must use one kind of structured outputs constraint but none are specified: {unset}")
    format_object = body.object("response_format")
    if (
        format_object is not None
        and format_object.raw_value("type") == "json_schema"
        and not format_object.has_value("json_schema")
    ):
        sentence = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
        yield parameter_error(sentence, "response_format")


def _format_kind(body: Fields) -> set[str]:
    """Return the kind of constraint in ``response_format``, if it has one."""
    format_object = body.object("response_format")
    kind = FORMAT_KINDS.get(str(format_object.raw_value("type"))) if format_object is not None else None
    return {kind} if kind is not None else set()


def with_response_format(body: Fields) -> Fields:
    """Let ``response_format`` replace the constraint of its kind in ``structured_outputs``. Raises BadRequest."""
    options, format_object = body.raw_value("structured_outputs"), body.raw_value("response_format")
    kinds = _format_kind(body)
    if not options or not kinds:
        return body
    grammar = constraints.read_response_format(body, strict_schemas=False)
    assert grammar is not None  # of each of these kinds
    (kind,) = kinds
    # The schema may be in TGI's or llama.cpp's members, with an unread "json_schema" beside them.
    values = {"json_object": True, "json": grammar.value, "structural_tag": json.dumps(format_object)}
    replacement = {"structured_outputs": options | {kind: values[kind]}}
    return body.without_members({"structured_outputs", "response_format"}).with_defaults(replacement)


def check_template(body: Fields) -> None:
    """Refuse a template of the request's own, also as a variable of the template. Raises BadRequest."""
    if body.has_value("chat_template") or body.free_object("chat_template_kwargs").get("chat_template") is not None:
        raise InvalidValue(UNTRUSTED_TEMPLATE)


def check_chat(body: Fields) -> None:
    """Check the rules for conversations. Raises InvalidValue."""
    check_template(body)
    if body.has_value("tools") and body.raw_value("tools") == []:
        sentence = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise parameter_error(sentence, "tools")
    choice = body.raw_value("tool_choice")
    if isinstance(choice, dict) and body.has_value("structured_outputs"):
        raise InvalidValue("You can only either use constraints for structured outputs or tools, not both.")
    if choice is None or choice == "none":
        return
    if not body.has_value("tools"):
        raise VLLM_WORDING.invalid_error("tool_choice", "needs tools.")
    if isinstance(choice, dict):
        _check_named_tool(choice.get("function"))
    elif choice not in ("auto", "required"):
        sentence = 'Only named tools, "none", "auto" or "required" are supported.'
        raise parameter_error(f"Invalid value for `tool_choice`: {_shown_value(choice)}! {sentence}", "tool_choice")


def _check_named_tool(function: Any) -> None:
    """Raise InvalidValue unless a choice names a function."""
    usage = 'in `tool_choice`! Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    if not isinstance(function, dict):
        sentence = f"Invalid value for `function`: `{_shown_value(function)}` {usage}"
        raise parameter_error(sentence, "tool_choice.function")
    if "name" not in function:
        raise parameter_error(f"Expected field `name` in `function` {usage}", "tool_choice.function.name")
    name = function["name"]
    if not isinstance(name, str) or not name:
        sentence = f"Invalid `name` in `function`: `{_shown_value(name)}` {usage}"
        raise parameter_error(sentence, "tool_choice.function.name")


def _shown_value(value: Any) -> str:
    """Return a value of a body as the original's sentences show it, cut after 256 characters."""
    return str(value)[:256]


def with_choice_type(body: Fields) -> Fields:
    """Return the body with the type of a chosen tool, which may be left out."""
    choice = body.raw_value("tool_choice")
    if not isinstance(choice, dict) or "type" in choice:
        return body
    return body.with_members({"tool_choice": choice | {"type": "function"}})


def check_prompt(body: Fields, context: RequestContext) -> None:
    """Check the rules for plain prompts. Raises BadRequest."""
    if not (body.has_value("prompt") or body.raw_value("prompt_embeds")):
        raise body.empty_member("prompt", "string")
    if body.string("suffix", "") and "insert" not in context.abilities:
        raise InvalidValue("suffix is only supported for models with FIM completion rendering")
    echo, max_tokens = body.boolean("echo", False), body.raw_value("max_tokens")
    if echo and body.boolean("use_beam_search", False) and body.has_value("logprobs"):
        sentence = "because beam search does not compute prompt logprobs."
        raise parameter_error(f"`echo` with `logprobs` is not supported with beam search {sentence}", "echo")
    if max_tokens == 0 and echo and body.raw_value("logprob_token_ids"):
        sentence = "when `echo=True` and `max_tokens=0` because no output tokens are generated."
        raise parameter_error(f"`logprob_token_ids` is not supported {sentence}", "logprob_token_ids")
    if max_tokens == 0 and not echo:
        Fields({"max_tokens": 0}, "", VLLM_WORDING).integer("max_tokens", None, 1, MAX_TOKENS)


def cap_max_tokens(stop: StopConditions, context: RequestContext) -> StopConditions:
    """Limit the output tokens to ``max_new_tokens`` of the model's generation defaults, if it has it."""
    limit = context.generation_defaults.get(MAX_NEW_TOKENS)
    if limit is None or limit < 1 or (stop.max_tokens is not None and stop.max_tokens <= limit):
        return stop
    return msgspec.structs.replace(stop, max_tokens=max(int(limit), stop.min_tokens))


def search_sampling(request: Request) -> SamplingOptions:
    """Return the sampling options; for beam search without those that only apply to drawing, including defaults."""
    if request.beam is None:
        return request.sampling
    return msgspec.structs.replace(request.sampling, top_p=1.0, top_k=0, min_p=0.0)


def choose_answer_id(context: RequestContext, body_id: str) -> str:
    """Return the request's id: the header's, or else the body's (``body_id``), or 16 digits of the unique id."""
    header = context.headers.get(b"x-request-id", b"").decode("latin-1")
    if header and len(header) <= MAX_ID_CHARACTERS and header.isascii() and header.isprintable():
        return header
    return body_id if body_id != context.unique_id else context.unique_id[:16]
