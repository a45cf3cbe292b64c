"""Shared by Databricks' routes: strict and lenient rules, the wording of refusals, the form of errors, usage and ids.

An error is a code in capitals and a sentence. OpenAI's clients of this API expect an ``error`` object inside a stream,
so streams have both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from parley.dialects import words
from parley.dialects.dialect import Answer, Head, Reply
from parley.dialects.fields import Fields
from parley.dialects.words import kind
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
    TimedOut,
    Unauthorized,
    UnknownModel,
    WrongType,
    excerpt,
)
from parley.types import Accepted, Delta, Event

BODY = 4 << 20  # bytes of a body that the original accepts
SYSTEM = "system.ai."  # the original's model catalogue, which its users prefix to names

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode

INDEX = re.compile(r"\[\d+\]")
UNPRINTABLE = re.compile(rb"[^ -~]")  # bytes that a header must not contain
JSON_TYPES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "number",
    "a string": "string",
    "an array": "array",
    "an object": "object",
    "a decimal": "number",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """The differences between strict and lenient rules.

    ``strict``: undocumented members are refused, turns must be in order, and content and the choices' indexes are as
    documented. ``max_functions``: per request. ``max_keys``: of a function's parameters; None: no limit.
    """

    strict: bool
    functions: int
    keys: int | None


STRICT = Rules(strict=True, functions=32, keys=15)
LENIENT = Rules(strict=False, functions=128, keys=None)

Tree = Mapping[str, Any]  # names of members, each with the tree of its own members; an empty tree is not checked


def refuse_unknown(value: Any, tree: Tree) -> None:
    """Raise Malformed for the first member that the tree does not have."""
    for item in value if isinstance(value, list) else (value,):
        if not isinstance(item, dict):
            continue
        for name, inner in item.items():
            if name not in tree:
                raise Malformed(f"json: unknown field {encode(name[:100]).decode()}\n")
            if tree[name]:
                refuse_unknown(inner, tree[name])


class Words(words.Words):
    """Databricks' wording. ``task``: the request's name in sentences about missing members."""

    def __init__(self, task: str = "Chat", code: str | None = None):
        self.task, self.code = task, code

    def missing(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        owner, _, name = path.rpartition(".")
        if not owner:
            return Missing(f"Missing required {self.task} parameter: '{path}'", field=path, code=self.code)
        top, *inner = INDEX.sub("", owner).split(".")
        whose = f'"{inner[-1]}" object' if inner else "an object"
        return Invalid(f'"{name}" is a required property for {whose} in parameter "{top}"', field=path, code=self.code)

    def mistyped(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        wanted = JSON_TYPES.get(expected, expected)
        got = kind(value)
        return WrongType(
            f"Unable to parse json body for request, field '{INDEX.sub('', path)}' expects input with json type "
            f"'{wanted}' but got '{JSON_TYPES.get(got, got)}'",
            field=path,
            code=self.code,
        )

    def outside(self, path: str, value: float, low: float | None, high: float | None, *, open: bool) -> BadRequest:
        """Return the error for a number out of range."""
        least = f"{'greater than' if open else 'at least'} {low}"
        allowed = f"at most {high}" if low is None else least if _endless(high) else f"{least} and at most {high}"
        return self.invalid(path, f"must be {allowed}, but got {excerpt(value)}")

    def unlisted(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        listed = ", ".join(f'"{name}"' for name in allowed)
        return self.invalid(path, f"must be one of {listed}, but got {excerpt(value)}")

    def empty(self, path: str, what: str) -> BadRequest:
        """Return the error for an empty string or array."""
        return self.invalid(path, "must not be empty")

    def long(self, path: str, what: str, size: int, cap: int) -> BadRequest:
        """Return the error for a string, array or object that is too long."""
        unit = "characters" if what == "string" else "members"
        return self.invalid(path, f"must have at most {cap} {unit}, but has {size}")

    def invalid(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(f'parameter "{path}" {reason}', field=path, code=self.code)


def _endless(high: float | None) -> bool:
    return high is None or high >= 2**31 - 1


def code_of(error: ParleyError) -> tuple[int, str]:
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
        case Overloaded():
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


def told(error: ParleyError) -> dict[str, Any]:
    """Return an error's code and sentence."""
    status, code = code_of(error)
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


def error(error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
    return Answer(code_of(error)[0], encode(told(error)))


def failure(error: ParleyError) -> bytes:
    """Return the events that end a stream after an error."""
    said = told(error)
    inner = {"message": said["message"], "type": said["error_code"], "param": error.field, "code": said["error_code"]}
    return frame(said | {"error": inner}) + DONE


def frame(chunk: Any) -> bytes:
    """Encode one event of a stream."""
    return b"data: " + encode(chunk) + b"\n\n"


def identity(head: Head) -> str:
    """Return the id of an answer, in the form of a UUID."""
    hexes = f"{head.id:0<32}"[:32]
    return "-".join((hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Count:
    """The prompt and output tokens so far, which every chunk of a stream reports."""

    def __init__(self) -> None:
        self.prompt = self.given = 0

    def add(self, event: Event) -> None:
        """Count the tokens of an event."""
        match event:
            case Accepted():
                self.prompt += len(event.token_ids)
            case Delta():
                self.given += len(event.tokens)

    def told(self) -> dict[str, int]:
        """Return the ``usage`` object so far."""
        return usage(self.prompt, self.given)


def served_header(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return the header that names the endpoint's model that answered."""
    return [(b"served-model-name", UNPRINTABLE.sub(b"?", reply.served.encode()))] if reply.served else []


def told_usage(body: Fields, stream: bool) -> bool:
    """Return whether chunks report the usage: yes, unless the client turns it off. Raises BadRequest."""
    options = body.object("stream_options")
    if options is None:
        return True
    if not stream:
        raise body.fail("stream_options", "is only allowed when 'stream' is true")
    return options.boolean("include_usage", True)
