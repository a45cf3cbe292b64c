"""What Databricks' routes have in common: the two manners, how refusals are worded, the form of errors, usage and ids.

An error is a code in capitals and a sentence. OpenAI's clients of the same API look for an ``error`` object inside a
stream, so there it stands beside them.
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

BODY = 4 << 20  # bytes that the original takes
SYSTEM = "system.ai."  # the original's catalogue of models, which its users write before their names

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode

INDEX = re.compile(r"\[\d+\]")
UNPRINTABLE = re.compile(rb"[^ -~]")  # what a header may not hold
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
    """What the two manners read differently.

    ``strict``: names that are not documented are refused, turns must be in order, and content and the choice's index
    are the documented ones. ``functions`` a request may have, and ``keys`` of each one's parameters (None: any number).
    """

    strict: bool
    functions: int
    keys: int | None


STRICT = Rules(strict=True, functions=32, keys=15)
LENIENT = Rules(strict=False, functions=128, keys=None)

Tree = Mapping[str, Any]  # names of members, each with those inside it; an empty one: nobody looks inside


def refuse_unknown(value: Any, tree: Tree) -> None:
    """Raise Malformed for the first name that the tree does not have."""
    for item in value if isinstance(value, list) else (value,):
        if not isinstance(item, dict):
            continue
        for name, inner in item.items():
            if name not in tree:
                raise Malformed(f"json: unknown field {encode(name[:100]).decode()}\n")
            if tree[name]:
                refuse_unknown(inner, tree[name])


class Words(words.Words):
    """``task``: how a sentence about what is missing calls the request."""

    def __init__(self, task: str = "Chat", code: str | None = None):
        self.task, self.code = task, code

    def missing(self, path: str) -> BadRequest:
        owner, _, name = path.rpartition(".")
        if not owner:
            return Missing(f"Missing required {self.task} parameter: '{path}'", field=path, code=self.code)
        top, *inner = INDEX.sub("", owner).split(".")
        whose = f'"{inner[-1]}" object' if inner else "an object"
        return Invalid(f'"{name}" is a required property for {whose} in parameter "{top}"', field=path, code=self.code)

    def mistyped(self, path: str, expected: str, value: Any) -> BadRequest:
        wanted = JSON_TYPES.get(expected, expected)
        got = kind(value)
        return WrongType(
            f"Unable to parse json body for request, field '{INDEX.sub('', path)}' expects input with json type "
            f"'{wanted}' but got '{JSON_TYPES.get(got, got)}'",
            field=path,
            code=self.code,
        )

    def outside(self, path: str, value: float, low: float | None, high: float | None, *, open: bool) -> BadRequest:
        least = f"{'greater than' if open else 'at least'} {low}"
        allowed = f"at most {high}" if low is None else least if _endless(high) else f"{least} and at most {high}"
        return self.invalid(path, f"must be {allowed}, but got {excerpt(value)}")

    def unlisted(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        listed = ", ".join(f'"{name}"' for name in allowed)
        return self.invalid(path, f"must be one of {listed}, but got {excerpt(value)}")

    def empty(self, path: str, what: str) -> BadRequest:
        return self.invalid(path, "must not be empty")

    def long(self, path: str, what: str, size: int, cap: int) -> BadRequest:
        unit = "characters" if what == "string" else "members"
        return self.invalid(path, f"must have at most {cap} {unit}, but has {size}")

    def invalid(self, path: str, reason: str) -> BadRequest:
        return Invalid(f'parameter "{path}" {reason}', field=path, code=self.code)


def _endless(high: float | None) -> bool:
    return high is None or high >= 2**31 - 1


def code_of(error: ParleyError) -> tuple[int, str]:
    """The HTTP status, and the code in capitals."""
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
    """Code and sentence."""
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
    """An error as the whole answer."""
    return Answer(code_of(error)[0], encode(told(error)))


def failure(error: ParleyError) -> bytes:
    """The end of a stream that an error cuts short."""
    said = told(error)
    inner = {"message": said["message"], "type": said["error_code"], "param": error.field, "code": said["error_code"]}
    return frame(said | {"error": inner}) + DONE


def frame(chunk: Any) -> bytes:
    """One event of the stream."""
    return b"data: " + encode(chunk) + b"\n\n"


def identity(head: Head) -> str:
    """The id of an answer, in the form of a UUID."""
    hexes = f"{head.id:0<32}"[:32]
    return "-".join((hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:]))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Count:
    """The tokens read and given so far: every chunk of a stream tells them."""

    def __init__(self) -> None:
        self.prompt = self.given = 0

    def add(self, event: Event) -> None:
        match event:
            case Accepted():
                self.prompt += len(event.token_ids)
            case Delta():
                self.given += len(event.tokens)

    def told(self) -> dict[str, int]:
        return usage(self.prompt, self.given)


def served_header(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Which of the endpoint's models answered."""
    return [(b"served-model-name", UNPRINTABLE.sub(b"?", reply.served.encode()))] if reply.served else []


def told_usage(body: Fields, stream: bool) -> bool:
    """Do chunks tell the usage? They do unless a client says otherwise."""
    options = body.object("stream_options")
    if options is None:
        return True
    if not stream:
        raise body.fail("stream_options", "is only allowed when 'stream' is true")
    return options.boolean("include_usage", True)
