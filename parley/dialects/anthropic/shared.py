"""Shared by the routes of Anthropic's API: strict and lenient rules, the wording of refusals, errors, ids, usage.

The original checks bodies with pydantic, so a refusal is the dotted path of a member, a colon and a sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from parley.dialects import error_wording
from parley.dialects.dialect import Answer
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.errors import (
    BadRequest,
    ContextLength,
    Invalid,
    Malformed,
    Missing,
    ParleyError,
    UnknownModel,
    Unsupported,
    WrongType,
    excerpt,
)
from parley.types import KeyLimitStates, Usage

VERSION_HEADER = b"anthropic-version"
REQUEST_ID_PREFIX = "req_"
MAX_BODY = 32 << 20  # bytes of a body that the original accepts
OVERLOADED_STATUS = 529  # the original's own status
UNSUPPORTED_THREAD = "thread_unsupported_request"  # the code of a refusal to hold a conversation between requests
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ID_LENGTH = 22  # characters of base 58 that hold 128 bits
TAGGED_PATHS = {"thinking.budget_tokens": "thinking.enabled.budget_tokens"}  # with the form that has the member
INDEX = re.compile(r"\[(\d+)\]")
TYPE_SENTENCES = {
    "a string": "Input should be a valid string",
    "an integer": "Input should be a valid integer",
    "a number": "Input should be a valid number",
    "a boolean": "Input should be a valid boolean",
    "an array": "Input should be a valid list",
    "an object": "Input should be a valid dictionary",
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class AnthropicRules:
    """``strict``: unknown members, turns out of order, sampling beyond the original's and the like are refused."""

    strict: bool


LENIENT_RULES, STRICT_RULES = AnthropicRules(strict=False), AnthropicRules(strict=True)


class AnthropicWording(error_wording.ErrorWording):
    """The original's wording, with the value at fault."""

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        return Missing(f"{dotted_path(path)}: Field required", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        sentence = TYPE_SENTENCES.get(expected, f"Input should be {expected}")
        return WrongType(f"{dotted_path(path)}: {sentence}, but got {error_wording.json_type(value)}", field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        bounds = []
        if low is not None:
            bounds.append(f"greater than {'' if low_excluded else 'or equal to '}{low}")
        if high is not None:
            bounds.append(f"less than or equal to {high}")
        return self.invalid_error(path, f"Input should be {' and '.join(bounds)}, but got {excerpt(value)}")

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        names = " or ".join(f"'{name}'" for name in allowed)
        return self.invalid_error(path, f"Input should be {names}, but got {excerpt(value)}")

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty value."""
        least = (
            "String should have at least 1 character" if container == "string" else "List should have at least 1 item"
        )
        return self.invalid_error(path, least)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a value that is too long."""
        subject, unit = ("String", "characters") if container == "string" else ("List", "items")
        return self.invalid_error(path, f"{subject} should have at most {cap} {unit}, but has {size}")

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(f"{dotted_path(path)}: {reason}", field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return Malformed(f"The body: Input should be a valid dictionary, but got {error_wording.json_type(value)}")


WORDING = AnthropicWording()


def dotted_path(path: str) -> str:
    """Return the position of a member as the original writes it: ``messages.0.content``."""
    return INDEX.sub(r".\1", TAGGED_PATHS.get(path, path))


def check_members(fields: Fields, allowed: Collection[str], rules: AnthropicRules, tag: str = "") -> None:
    """Refuse a member that the original does not have, if the rules are strict. ``tag``: the block's type.

    Raises Invalid.
    """
    if not rules.strict:
        return
    for name in fields.member_names:
        if name not in allowed:
            path = fields.member_path(f"{tag}.{name[:60]}" if tag else name[:60])
            raise WORDING.invalid_error(path, "Extra inputs are not permitted")


def unsupported_value(fields: Fields, name: str, value: str) -> Unsupported:
    """Return the error for a value that the original has and this server has not."""
    path = fields.member_path(name)
    return Unsupported(f"{dotted_path(path)}: {excerpt(value)} is not supported by this server", field=path)


def message_id(unique_id: str) -> str:
    """Return the id of a message: ``msg_01`` and the request's 128 bits in base 58."""
    number, characters = int(unique_id, 16), ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(BASE58))
        characters = BASE58[digit] + characters
    return f"msg_01{characters}"


def error_type(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_object(error: ParleyError, request_uuid: str) -> dict[str, Any]:
    """Return an error with its type, sentence and the id of its request. Anthropic's SDKs read ``details``: they send a
    refused thread as a conversation without one."""
    members: dict[str, Any] = {"type": error_type(error.status), "message": error_sentence(error)}
    if error.code == UNSUPPORTED_THREAD:
        members["details"] = {"error_code": error.code, "unsupported": [error.field]}
    return {
        "type": "error",
        "error": members,
        "request_id": f"{REQUEST_ID_PREFIX}{request_uuid}" if request_uuid else None,
    }


def error_sentence(error: ParleyError) -> str:
    """Return the sentence of an error. Claude Code matches the one about a prompt that is too long, and compacts."""
    match error:
        case ContextLength(limit=int() as limit) if error.prompt is not None or error.prompt_over is not None:
            # Of a prompt that was not counted to its end, the smallest possible length.
            tokens = error.prompt if error.prompt is not None else (error.prompt_over or 0) + 1
            return f"prompt is too long: {tokens} tokens > {limit - 1} maximum"
        case UnknownModel() if error.name:
            return f"model: {error.name[:256]}"
    return error.message


def render_error(rules: AnthropicRules, error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    status = OVERLOADED_STATUS if rules.strict and error.status == 503 else error.status
    return Answer(status, encode_json(error_object(error, error.request_uuid)))


def sse_event(name: str, data: Any) -> bytes:
    """Return one event of a stream. Clients drop events without a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))


def input_counts(usage: Usage, *, marked: bool) -> dict[str, int]:
    """Return the prompt's tokens in three parts, which clients add up: computed, stored in the cache, found there.

    ``marked``: the request has a ``cache_control``. All that was computed is then stored, because every page is.
    """
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": 0 if marked else computed,
        "cache_creation_input_tokens": computed if marked else 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def usage_object(usage: Usage, ttl: str | None, *, reasons: bool) -> dict[str, Any]:
    """Return the usage of a message. ``ttl``: of its ``cache_control``, None without one; ``reasons``: it may think."""
    counts = input_counts(usage, marked=ttl is not None)
    created_tokens = counts["cache_creation_input_tokens"]
    return {
        **counts,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created_tokens if ttl == "5m" else 0,
            "ephemeral_1h_input_tokens": created_tokens if ttl == "1h" else 0,
        },
        **output_counts(usage, reasons=reasons),
        "service_tier": "standard",
        "inference_geo": "not_available",
    }


def output_counts(usage: Usage, *, reasons: bool) -> dict[str, Any]:
    """Return the answer's tokens, and how many of them are thinking if it may think."""
    counts: dict[str, Any] = {"output_tokens": usage.completion_tokens}
    return counts | {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if reasons else counts


def limit_headers(states: KeyLimitStates, now: float) -> list[tuple[bytes, bytes]]:
    """Return Anthropic's headers about the limits of a key. Times are those of RFC 3339. ``now``: since the epoch."""
    headers = []
    for kind, state in (("requests", states.requests), ("tokens", states.tokens)):
        if state is not None:
            reset = datetime.fromtimestamp(math.ceil(now + state.reset_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            values = {"limit": state.limit, "remaining": state.remaining, "reset": reset}
            headers += [
                (f"anthropic-ratelimit-{kind}-{name}".encode(), str(value).encode()) for name, value in values.items()
            ]
    return headers
