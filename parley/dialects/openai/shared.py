"""Common parts of the OpenAI routes: sampling members, unsupported features, usage, stream frames and error objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from parley.dialects import parameters
from parley.dialects.dialect import DEFAULT_API_OPTIONS, Answer, ApiOptions, RequestContext
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.parameters import MAX_ALTERNATIVES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOKEN_ID, ChoiceCounts
from parley.errors import BadMedia, MediaFault, NotFound, Overloaded, ParleyError, RateLimited, Unsupported
from parley.types import FinishReason, KeyLimitStates, RepetitionPattern, Sampling, StopConditions, TokenInfo, Usage

MAX_TOTAL_CHOICES = 2048  # n times the number of prompts
MAX_STOP_IDS = 1024
MAX_TOKENS = 2**31 - 1
MAX_PATTERN_TOKENS = 1024  # tokens

OPENAI_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
STREAM_DONE = b"data: [DONE]\n\n"
# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}'

FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "tool": "tool_calls",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "error",
}

# Codes of errors about media; {} is the kind. OpenAI documents those of images.
MEDIA_CODES: dict[MediaFault, str] = {
    "bad_address": "invalid_{}_url",
    "bad_data_url": "invalid_{}_url",
    "forbidden_address": "invalid_{}_url",
    "not_found": "invalid_{}_url",
    "unreachable": "invalid_{}_url",
    "bad_base64": "invalid_base64",
    "unknown_format": "invalid_{}_format",
    "undecodable": "{}_parse_error",
    "refused_by_model": "{}_parse_error",
    "too_slow": "{}_parse_error",
    "too_large": "{}_too_large",
    "too_long": "{}_too_large",
    "too_many_pixels": "{}_too_large",
}


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """The differences between the servers of this API in how they read a request.

    ``roles`` that a message may have; empty: any. ``reserved_tokens``: the number of output tokens that must fit after
    the prompt; None: all that may be generated. ``best_of``: whether it is a member. ``min_alternatives``: the smallest
    valid number of alternatives; -1 asks for the whole vocabulary. ``shows_unused_tools``: the model sees its tools
    even if ``tool_choice`` is none. ``strict_schemas``: the schema of a ``strict`` tool or response format must be one
    that OpenAI's strict mode accepts. ``lenient_messages``: messages are read ``loose`` and ``bare`` (see
    ``MessageRules``), parts with media need no type, and the last message may be continued regardless of its role.
    ``media_roles``: those whose messages may have media; empty: any. ``plain_urls``: the URL of a part may stand where
    its object is due. ``follows_options``: the operator's ``ApiOptions`` apply. ``custom_tools``: tools may be custom
    tools. ``max_stops``: the number of stop strings. ``needs_tools``: members about tools are refused without any.
    ``stores_chats``: ``store`` keeps chat completions.
    """

    roles: tuple[str, ...] = OPENAI_ROLES
    reserved_tokens: int | None = None
    best_of: bool = True
    min_alternatives: int = -1
    shows_unused_tools: bool = False
    strict_schemas: bool = False
    lenient_messages: bool = False
    media_roles: tuple[str, ...] = ("user",)
    plain_urls: bool = True
    follows_options: bool = True
    custom_tools: bool = True
    max_stops: int = MAX_STOPS
    needs_tools: bool = False
    stores_chats: bool = False


OPENAI_RULES = ReadingRules(stores_chats=True)
STRICT_RULES = ReadingRules(strict_schemas=True, min_alternatives=0, max_stops=4, needs_tools=True, stores_chats=True)


def read_openai_sampling(body: Fields) -> Sampling:
    """Read the members that control how a token is drawn."""
    return parameters.read_sampling(body, max_temperature=2)


def read_stop_conditions(body: Fields, max_tokens: int | None, rules: ReadingRules = OPENAI_RULES) -> StopConditions:
    """Read the members that control when to stop. Raises BadRequest."""
    min_tokens = body.integer("min_tokens", 0, 0, MAX_TOKENS)
    if max_tokens is not None and min_tokens > max_tokens:
        raise body.member_error(
            "min_tokens", f"must be at most max_tokens, which is {max_tokens}, but got {min_tokens}."
        )
    include = body.boolean("include_stop_str_in_output", False)
    return StopConditions(
        strings=body.strings("stop", cap=rules.max_stops, total=MAX_STOP_CHARACTERS),
        ids=body.integers("stop_token_ids", cap=MAX_STOP_IDS, low=0, high=MAX_TOKEN_ID),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos", False),
        include_in_output=body.boolean("no_stop_trim", include),  # SGLang's name
        reserved_tokens=rules.reserved_tokens,
        repetition=_read_repetition(body),
    )


def _read_repetition(body: Fields) -> RepetitionPattern | None:
    """Read vLLM's ``repetition_detection``, which ends a repetitive output. None if patterns have no tokens."""
    detection = body.object("repetition_detection")
    if detection is None:
        return None
    max_size = detection.integer("max_pattern_size", 0, 0, MAX_PATTERN_TOKENS)
    min_size = detection.integer("min_pattern_size", 0, 0, MAX_PATTERN_TOKENS)
    count = detection.integer("min_count", 0, 0, MAX_TOKENS)
    if not max_size:
        return None
    if min_size > max_size:
        raise detection.member_error(
            "min_pattern_size", f"must be at most max_pattern_size, which is {max_size}, but got {min_size}."
        )
    if count < 2:
        raise detection.member_error("min_count", f"must be at least 2, but got {count}.")
    return RepetitionPattern(max(1, min_size), max_size, count)


def read_stream_interval(body: Fields) -> int:
    """Return the minimum number of tokens of a chunk, a member of vLLM's."""
    return body.integer("stream_interval", 1, 1, MAX_TOKENS)


def read_capped_choices(body: Fields, prompts: int, rules: ReadingRules = OPENAI_RULES) -> ChoiceCounts:
    """Read the choice counts, and check the limit over all prompts. Raises BadRequest."""
    counts = parameters.read_choice_counts(body, ranked=rules.best_of)
    name, per_prompt = ("n", counts.n) if counts.best_of is None else ("best_of", counts.best_of)
    if per_prompt * prompts > MAX_TOTAL_CHOICES:
        raise body.member_error(
            name, f"{prompts} prompts times {name} = {per_prompt} is more than {MAX_TOTAL_CHOICES} choices."
        )
    return counts


def applied_options(context: RequestContext, rules: ReadingRules) -> ApiOptions:
    """Return the operator's options that apply to a request."""
    return context.api_options if rules.follows_options else DEFAULT_API_OPTIONS


def read_usage_options(body: Fields, stream: bool, options: ApiOptions) -> tuple[bool, bool]:
    """Return whether usage is requested at the end of the stream, and in each chunk. Raises BadRequest."""
    stream_options = body.object("stream_options")
    at_end = every_chunk = stream and options.force_include_usage
    if stream_options is None:
        return at_end, every_chunk
    if not stream:
        raise body.member_error("stream_options", "only allowed when 'stream' is true.")
    at_end = stream_options.boolean("include_usage", False) or at_end
    return at_end, (stream_options.boolean("continuous_usage_stats", False) and at_end) or every_chunk


def read_alternatives(body: Fields, name: str, rules: ReadingRules, context: RequestContext) -> int | None:
    """Return the number of alternatives whose log-probabilities are requested, or None. Raises BadRequest."""
    match applied_options(context, rules).max_logprobs:
        case None:
            return body.integer(name, None, rules.min_alternatives, MAX_ALTERNATIVES)
        case -1:
            return body.integer(name, None, -1, MAX_TOKENS)
        case limit:
            allows_all = 0 < context.vocabulary_size <= limit
            return body.integer(name, None, -1 if allows_all else 0, limit)


def read_identifier(fields: Fields) -> str:
    """Return the name of a function or schema: 1 to 64 letters, digits, underscores and dashes. Raises BadRequest."""
    text = fields.string("name", None, cap=64)
    if text is None:
        raise fields.missing_member("name")
    if not text or not text.isascii() or not text.replace("_", "").replace("-", "").isalnum():
        raise fields.member_error("name", "must be made of letters, digits, underscores and dashes.")
    return text


def unsupported_member(body: Fields, member: str, subject: str) -> Unsupported:
    """Return the error for a member that asks for an unsupported feature; ``subject`` with its verb, "Media are"."""
    return Unsupported(f"Unsupported parameter: '{body.member_path(member)}'. {subject} not available on this server.",
                       field=body.member_path(member))  # fmt: skip


def usage_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return a usage object without details, as chunks in the middle of a stream have it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def usage_object(total: Usage) -> dict[str, Any]:
    """Return the usage object of a finished request."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": _prompt_details(total),
        "completion_tokens_details": {
            "reasoning_tokens": total.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": total.accepted_tokens,
            "rejected_prediction_tokens": total.rejected_tokens,
        },
    }


def _prompt_details(total: Usage) -> dict[str, int]:
    """Return the prompt tokens by kind, where there are media. Those of a video count as those of images."""
    audio = total.media_tokens.get("audio", 0)
    details = {"cached_tokens": total.cached_tokens, "audio_tokens": audio}
    if not total.media_tokens:
        return details
    images = total.media_tokens.get("image", 0) + total.media_tokens.get("video", 0)
    return details | {"image_tokens": images, "text_tokens": total.prompt_tokens - audio - images}


def finite_logprob(logprob: float | None) -> float:
    """Return a log-probability in a form that JSON can represent: -9999 for impossible tokens and NaN."""
    return logprob if logprob is not None and logprob > -9999.0 else -9999.0


def prompt_logprob_maps(tokens: list[TokenInfo], top: int) -> list[dict[str, Any] | None]:
    """Return the ``prompt_logprobs`` extra: a map from token id to score for each token, null for the first.

    Each map has the token's own id first, then at most ``top`` alternatives; -1: all there are.
    """
    return [
        None
        if token.logprob is None
        else {
            str(scored.id): {
                "logprob": finite_logprob(scored.logprob),
                "rank": scored.rank,
                "decoded_token": scored.text,
            }
            for scored in [token, *token.top_tokens[: None if top < 0 else top]]
        }
        for token in tokens
    ]


def sse_frame(chunk: Any) -> bytes:
    """Return one event of the stream."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def openai_error_object(error: ParleyError) -> dict[str, Any]:
    """Return the error object of an OpenAI answer."""
    match error:
        case RateLimited(kind=kind):
            error_type = kind
        case Overloaded():
            error_type = "requests"
        case ParleyError(status=503):
            error_type = "service_unavailable"
        case ParleyError(status=status) if status >= 500:
            error_type = "server_error"
        case _:
            error_type = "invalid_request_error"
    code = error.code or ("unknown_url" if type(error) is NotFound else None)
    if isinstance(error, BadMedia):
        code = MEDIA_CODES.get(error.reason, error.code or "").format(error.kind)
    return {"error": {"message": error.message, "type": error_type, "param": error.field, "code": code}}


def openai_error(error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    return Answer(error.status, encode_json(openai_error_object(error)))


def failed_stream_end(error: ParleyError) -> bytes:
    """Return the end of a stream that an error cuts short."""
    return sse_frame(openai_error_object(error)) + STREAM_DONE


def openai_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    """Return the headers of every answer, given the seconds that the request has taken so far."""
    return [(b"openai-processing-ms", b"%d" % (seconds * 1000)), (b"openai-version", b"2020-10-01")]


REQUEST_LIMIT_HEADERS, TOKEN_LIMIT_HEADERS = (
    tuple(f"x-ratelimit-{figure}-{kind}".encode() for figure in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
)


def limit_headers(states: KeyLimitStates, now: float) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's headers about the limits of a key. Times are written as ``6m0s`` or ``250ms``."""
    headers: list[tuple[bytes, bytes]] = []
    for names, state in ((REQUEST_LIMIT_HEADERS, states.requests), (TOKEN_LIMIT_HEADERS, states.tokens)):
        if state is not None:
            limit, remaining, reset = names
            headers += (
                (limit, b"%d" % state.limit),
                (remaining, b"%d" % state.remaining),
                (reset, _duration_text(state.reset_seconds).encode()),
            )
    return headers


def _duration_text(seconds: float) -> str:
    """Return a duration as Go writes it, rounded up: 0s, 250ms, 1.5s, 6m0s, 23h59m59s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest_milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}{rest_milliseconds / 1000:g}s"
