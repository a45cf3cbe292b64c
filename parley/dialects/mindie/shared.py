"""What MindIE's interfaces have in common: how refusals are worded, and the form of errors.

Every refusal of a body is a 422, whatever is wrong with it. What engines refuse is a 424 there; a stream that has begun
ends with the bare text of the error.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects import fields
from parley.dialects.dialect import Answer
from parley.errors import (
    BadRequest,
    ContextLength,
    Invalid,
    Malformed,
    Missing,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    TooLarge,
    UnknownModel,
    WrongType,
)

I32 = 2**31 - 1
U64 = 2**64 - 1
F32 = 3.4028234663852886e38
TEXT = 41_943_040  # characters of an input: the original's limit of a body, 40 MB
MAX_STOP, MAX_STOPS = 1024, 32_768  # characters of a stop string, and of a list of them

encode = msgspec.json.Encoder().encode

TYPES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "float",
    "a string": "string",
    "an array": "array",
    "an object": "object",
}
UNSIGNED = ("seed",)
# What is said of a number out of range, whatever the range of the interface is.
RANGES = {
    "temperature": "Parameter temperature must be in (0.0,3.40282e+38], got {}.",
    "top_k": "Parameter top_k must be in -1 || (0,2147483647], got {}",
    "top_p": "Parameter top_p must be in (0.0,1.0], got {}.",
    "typical_p": "Parameter typical_p must be in (0.0,1.0], got {}.",
    "seed": "Parameter seed must be in [0, 9223372036854775807], got {}.",
    "repetition_penalty": "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got {}.",
    "max_new_tokens": "Parameter max_new_tokens must be in (0,2147483647], got {}.",
    "truncate": "truncate must be in (0,2147483647], got {}.",
}


class Words(fields.Words):
    """``unread``: what is said of a body that is no JSON object; each route has its own sentence."""

    def __init__(self, unread: str = ""):
        self.unread = unread

    def missing(self, path: str) -> BadRequest:
        return Missing(f"Request should contain '{path}' and the type should be string.", field=path)

    def mistyped(self, path: str, expected: str, value: Any) -> BadRequest:
        name = path.rpartition(".")[2]
        type_ = "unsigned" if name in UNSIGNED else TYPES.get(expected, expected)
        return WrongType(f"{name} must be {type_} type.", field=path)

    def outside(self, path: str, value: float, low: float | None, high: float | None, *, open: bool) -> BadRequest:
        name = path.rpartition(".")[2]
        if name in UNSIGNED and value < 0:
            return self.mistyped(path, "an integer", value)
        return Invalid(RANGES[name].format(encode(value).decode()), field=path)

    def invalid(self, path: str, reason: str) -> BadRequest:
        return Invalid(reason, field=path)

    def unreadable(self, body: bytes, reason: str) -> BadRequest:
        return Malformed(self.unread)

    def shapeless(self, value: Any) -> BadRequest:
        return Malformed(self.unread)


def error(error: ParleyError) -> Answer:
    """An error as the whole answer."""
    match error:
        case TooLarge():
            text = f"Request body too large. Maximum allowed size is {TEXT >> 20}MB."
            return Answer(413, encode({"message": text}))
        case ContextLength():
            return answer(424, _reason(error), "Generation Error")
        case UnknownModel():
            return answer(404, f"Model {error.name} not found.", "NotFoundError")
        case NotFound():
            return answer(404, error.message, "NotFoundError")
        case BadRequest():
            return answer(422, error.message, "Input Validation Error")
        case NotReady() | Overloaded():
            return answer(503, error.message, "Service Unavailable")
        case _ if error.status >= 500:
            return answer(500, error.message, "Incomplete Generation")
        case _:
            return answer(error.status, error.message, "Bad Request")


def failure(error: ParleyError) -> bytes:
    """The end of a stream that an error cuts short."""
    return error.message.encode()


def _reason(error: ContextLength) -> str:
    if error.prompt is None or error.limit is None:
        return f"Failed to enqueue inferRequest. {error.message}"
    return (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
        f"{error.limit - 1},the input ids length is {error.prompt}"
    )


def answer(status: int, text: str, kind: str) -> Answer:
    return Answer(status, encode({"error": text, "error_type": kind}))
