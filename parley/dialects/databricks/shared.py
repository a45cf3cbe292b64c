"""Shared by Databricks' routes: strict and lenient rules, the wording of refusals, the form of errors, usage and ids.

An error is a code in capitals and a sentence. OpenAI's clients of this API expect an ``error`` object inside a stream,
so streams have both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parley.dialects import error_wording
from parley.dialects.dialect import Answer, Reply, RequestContext
from parley.dialects.error_wording import json_type
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.shared import usage_counts
from parley.errors import (
    BadRequest,
    Conflict,
    EngineDied,
    Expired,
    Forbidden,
    Invalid,
    Malformed,
    Missing,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    RateLimited,
    TimedOut,
    Unauthorized,
    UnknownModel,
    WrongType,
    excerpt,
)
from parley.types import ChoiceDelta, Event, PromptAccepted

MAX_BODY = 4 << 20  # bytes of a body that the original accepts
SYSTEM_CATALOGUE = "system.ai."  # the original's model catalogue, which its users prefix to names

DONE_FRAME = b"data: [DONE]\n\n"

INDEX_PATTERN = re.compile(r"\[\d+\]")
UNPRINTABLE = re.compile(rb"[^ -~]")  # bytes that a header must not contain
JSON_TYPE_NAMES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "number",
    "a string": "string",
    "an array": "array",
    "an object": "object",
    "a decimal": "number",
}


@dataclass(frozen=True, slots=True)
class DatabricksRules:
    """The differences between strict and lenient rules.

    ``strict``: undocumented members are refused, turns must be in order, and content and the choices' indexes are as
    documented. ``max_functions``: per request. ``max_keys``: of a function's parameters; None: no limit.
    """

    strict: bool
    max_functions: int
    max_keys: int | None


STRICT_RULES = DatabricksRules(strict=True, max_functions=32, max_keys=15)
LENIENT_RULES = DatabricksRules(strict=False, max_functions=128, max_keys=None)

MemberTree = Mapping[str, Any]  # names of members, each with the tree of its own members; an empty tree is not checked


def refuse_unknown_members(value: Any, tree: MemberTree) -> None:
    """Raise Malformed for the first member that the tree does not have."""
    for item in value if isinstance(value, list) else (value,):
        if not isinstance(item, dict):
            continue
        for name, inner in item.items():
            if name not in tree:
                raise Malformed(f"json: unknown field {encode_json(name[:100]).decode()}\n")
            if tree[name]:
                refuse_unknown_members(inner, tree[name])


class DatabricksErrorWording(error_wording.ErrorWording):
    """Databricks' wording. ``task``: the request's name in sentences about missing members."""

    def __init__(self, task: str = "Chat", code: str | None = None):
        self.task, self.code = task, code

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        owner, _, name = path.rpartition(".")
        if not owner:
            return Missing(f"Missing required {self.task} parameter: '{path}'", field=path, code=self.code)
        top, *inner = INDEX_PATTERN.sub("", owner).split(".")
        object_text = f'"{inner[-1]}" object' if inner else "an object"
        return Invalid(
            f'"{name}" is a required property for {object_text} in parameter "{top}"', field=path, code=self.code
        )

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        expected_type = JSON_TYPE_NAMES.get(expected, expected)
        actual_type = json_type(value)
        return WrongType(
            f"Unable to parse json body for request, field '{INDEX_PATTERN.sub('', path)}' expects input with "
            "json type "
            f"'{expected_type}' but got '{JSON_TYPE_NAMES.get(actual_type, actual_type)}'",
            field=path,
            code=self.code,
        )

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        least = f"{'greater than' if low_excluded else 'at least'} {low}"
        allowed = f"at most {high}" if low is None else least if _is_unlimited(high) else f"{least} and at most {high}"
        return self.invalid_error(path, f"must be {allowed}, but got {excerpt(value)}")

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        allowed_names = ", ".join(f'"{name}"' for name in allowed)
        return self.invalid_error(path, f"must be one of {allowed_names}, but got {excerpt(value)}")

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty string or array."""
        return self.invalid_error(path, "must not be empty")

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a string, array or object that is too long."""
        unit = "characters" if container == "string" else "members"
        return self.invalid_error(path, f"must have at most {cap} {unit}, but has {size}")

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(f'parameter "{path}" {reason}', field=path, code=self.code)


def _is_unlimited(high: float | None) -> bool:
    return high is None or high >= 2**31 - 1


def status_and_code(error: ParleyError) -> tuple[int, str]:
    """Return the HTTP status, and the code in capitals."""
    match error:
        case UnknownModel():
            return 404, "RESOURCE_DOES_NOT_EXIST"
        case NotFound():
            return 404, error.code or "ENDPOINT_NOT_FOUND"
        case Missing():
            return 400, "INVALID_PARAMETER_VALUE"
        case BadRequest():
            return 400, error.code if error.code == "INVALID_PARAMETER_VALUE" else "BAD_REQUEST"
        case Unauthorized(code=""):
            return 401, "UNAUTHENTICATED"
        case Unauthorized() | Forbidden():
            return 403, "PERMISSION_DENIED"
        case Conflict():
            return 409, error.code or "RESOURCE_CONFLICT"
        case Overloaded() | RateLimited():
            return 429, "REQUEST_LIMIT_EXCEEDED"
        case NotReady() | EngineDied():
            return 503, "TEMPORARILY_UNAVAILABLE"
        case Expired():
            return 504, "DEADLINE_EXCEEDED"
        case TimedOut():
            return 408, "DEADLINE_EXCEEDED"
        case _ if error.status < 500:
            return error.status, "BAD_REQUEST"
        case _:
            return error.status, "INTERNAL_ERROR"


def databricks_error_object(error: ParleyError) -> dict[str, Any]:
    """Return an error's code and sentence."""
    status, code = status_and_code(error)
    message = error.message
    if isinstance(error, UnknownModel):
        message = f"Endpoint with name '{error.name[:100]}' does not exist."
    elif status == 401:
        message = "Credential was not sent or was of an unsupported type for this API."
    elif isinstance(error, Unauthorized):
        message = "Invalid access token."
    elif code == "BAD_REQUEST" and not isinstance(error, WrongType):
        message = f"Bad request: {message}"
    return {"error_code": code, "message": message}


def databricks_error_answer(error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
    return Answer(status_and_code(error)[0], encode_json(databricks_error_object(error)))


def databricks_failure_frames(error: ParleyError) -> bytes:
    """Return the events that end a stream after an error."""
    error_body = databricks_error_object(error)
    inner = {
        "message": error_body["message"],
        "type": error_body["error_code"],
        "param": error.field,
        "code": error_body["error_code"],
    }
    return databricks_frame(error_body | {"error": inner}) + DONE_FRAME


def databricks_frame(chunk: Any) -> bytes:
    """Encode one event of a stream."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def answer_uuid(context: RequestContext) -> str:
    """Return the id of an answer, in the form of a UUID."""
    hexes = f"{context.unique_id:0<32}"[:32]
    return "-".join((hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]))


class TokenCount:
    """The prompt and output tokens so far, which every chunk of a stream reports."""

    def __init__(self) -> None:
        self.prompt = self.output = 0

    def count_event(self, event: Event) -> None:
        """Count the tokens of an event."""
        match event:
            case PromptAccepted():
                self.prompt += len(event.token_ids)
            case ChoiceDelta():
                self.output += len(event.tokens)

    def usage_so_far(self) -> dict[str, int]:
        """Return the ``usage`` object so far."""
        return usage_counts(self.prompt, self.output)


def served_model_header(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return the header that names the endpoint's model that answered."""
    return [(b"served-model-name", UNPRINTABLE.sub(b"?", reply.served_model.encode()))] if reply.served_model else []


def wants_usage(body: Fields, stream: bool) -> bool:
    """Return whether chunks report the usage: yes, unless the client turns it off. Raises BadRequest."""
    options = body.object("stream_options")
    if options is None:
        return True
    if not stream:
        raise body.member_error("stream_options", "is only allowed when 'stream' is true")
    return options.boolean("include_usage", True)
