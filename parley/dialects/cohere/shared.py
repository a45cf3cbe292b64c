"""Common parts of Cohere's routes: its rules, the wording of refusals, errors, ids, usage and events.

The sentences are those of Cohere's page of errors, with the value and its range after them. Every error is an object
with the request's id and a message.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from parley.dialects import error_wording
from parley.dialects.dialect import Answer
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.vllm.pooling.cohere import input_type_sentence
from parley.errors import (
    BadRequest,
    ContextLength,
    Invalid,
    Malformed,
    Missing,
    ParleyError,
    UnknownModel,
    UnknownPromptName,
    Unsupported,
    WrongType,
    excerpt,
)
from parley.types import Usage

UNREADABLE_STATUS = 422  # of a body with a member of a wrong type, or one that the API does not have
REFERENCE = "For proper usage, please refer to https://docs.cohere.com/v2/reference/chat"
MISSING_MODEL = "a model parameter is required for this endpoint."
STREAM_DONE = b"data: [DONE]\n\n"
# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"message":"Memory limit exceeded"}'
HEX_ID = re.compile(r"[0-9a-fA-F]{1,32}")
TYPE_NAMES = {
    "a string": "string",
    "an integer": "int32",
    "a number": "float32",
    "a decimal": "number",
    "a boolean": "bool",
    "an array": "array",
    "an object": "object",
}


@dataclass(frozen=True, slots=True)
class CohereRules:
    """``strict``: members that the original does not have, and values beyond its ranges, are refused."""

    strict: bool = False


LENIENT_RULES, STRICT_RULES = CohereRules(), CohereRules(strict=True)


class CohereWording(error_wording.ErrorWording):
    """The original's sentences."""

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        if path == "model":
            return Missing(MISSING_MODEL, field=path)
        return Missing(f"invalid request: required '{path}' param is missing or empty.", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        actual = error_wording.json_type(value)
        actual_name = "number" if actual == "an integer" else TYPE_NAMES.get(actual, actual)
        error = WrongType(
            f"invalid type: parameter '{path}' is of type {actual_name} but should be of type "
            f"{TYPE_NAMES.get(expected, expected)}. {REFERENCE}",
            field=path,
        )
        error.status = UNREADABLE_STATUS
        return error

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        if low is None or high is None:
            bounds = f"at least {low}" if high is None else f"at most {high}"
        else:
            bounds = f"between {low} (exclusive) and {high}" if low_excluded else f"between {low} and {high} inclusive"
        return Invalid(f"invalid request: {path} must be {bounds}, but got {excerpt(value)}.", field=path)

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        names = " or ".join(f"'{name}'" for name in allowed)
        return Invalid(f"invalid request: {path} must be one of {names}, but got {excerpt(value)}.", field=path)

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty value."""
        return Invalid(f"invalid request: {path} must not be empty.", field=path)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a value that is too long."""
        unit = "characters" if container == "string" else "elements"
        return Invalid(f"invalid request: {path} must have at most {cap} {unit} - received {size}.", field=path)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(f"invalid request: '{path}': {reason}", field=path)

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return Malformed(f"invalid json syntax: {reason}")

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return Malformed(
            f"invalid json syntax: the body must be an object, but it is {error_wording.json_type(value)}."
        )


WORDING = CohereWording()


def check_members(fields: Fields, allowed: Collection[str], rules: CohereRules) -> None:
    """Refuse a member that the original does not have, if the rules are strict. Raises Invalid."""
    if not rules.strict:
        return
    for name in fields.member_names:
        if name not in allowed:
            raise unknown_member_error(fields.member_path(name[:60]))


def unknown_member_error(path: str) -> Invalid:
    """Return the error for a member that the original does not have."""
    error = Invalid(f"unknown field: parameter '{path}' is not a valid field. {REFERENCE}", field=path)
    error.status = UNREADABLE_STATUS
    return error


def unsupported_value(fields: Fields, name: str, sentence: str) -> Unsupported:
    """Return the error for a value that the original has and this server has not. ``sentence``: the reason."""
    path = fields.member_path(name)
    return Unsupported(f"invalid request: {path} {excerpt(fields.raw_value(name))} {sentence}", field=path)


def uuid_text(unique_id: str) -> str:
    """Return a request's id as the original writes ids: a UUID."""
    return str(UUID(hex=unique_id.rjust(32, "0"))) if HEX_ID.fullmatch(unique_id) else unique_id


def error_sentence(error: ParleyError) -> str:
    """Return the sentence of an error."""
    match error:
        case UnknownModel() if error.name:
            return (
                f"model '{error.name[:256]}' not found, make sure the correct model ID was used and that you have "
                "access to the model."
            )
        case ContextLength(limit=int() as limit) if error.prompt is not None or error.prompt_over is not None:
            # Of a prompt that was not counted to its end, the smallest possible length.
            tokens = error.prompt if error.prompt is not None else (error.prompt_over or 0) + 1
            return (
                f"too many tokens: total number of tokens in the prompt cannot exceed {limit - 1} - received {tokens}. "
                "Try using a shorter prompt."
            )
        case UnknownPromptName():
            return input_type_sentence(error)
        case ContextLength():
            return f"too many tokens: {error.message}"
    return error.message


def cohere_error(error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    members = {"id": uuid_text(error.request_uuid)} if error.request_uuid else {}
    return Answer(error.status, encode_json(members | {"message": error_sentence(error)}))


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a request. Those of pictures are counted apart, and billed as input."""
    image_tokens = usage.media_tokens.get("image", 0)
    tokens = {"input_tokens": usage.prompt_tokens - image_tokens, "output_tokens": usage.completion_tokens}
    return {
        "billed_units": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
        "tokens": tokens | {"image_tokens": image_tokens} if image_tokens else tokens,
        "cached_tokens": usage.cached_tokens,
    }


def sse_event(event: dict[str, Any]) -> bytes:
    """Return one event of a stream, with its type as its name."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))
