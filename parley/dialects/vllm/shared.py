"""What vLLM's routes have in common: its version, what it says of errors, and the frame of a stream's last record."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import msgspec

from parley.dialects.dialect import Answer
from parley.errors import (
    ContextLength,
    EngineError,
    Malformed,
    Missing,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    Unauthorized,
    UnknownModel,
    WrongType,
)

SPOKEN = "0.32.0"  # the version of the original whose API this is; clients tell from it what they may ask for
DONE = b"data: [DONE]\n\n"
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."

encode = msgspec.json.Encoder().encode


class Unbuilt(ParleyError):
    """A call of this API that the server does not answer."""

    status = 501


def error(error: ParleyError) -> Answer:
    """An error as the whole answer. A key or path that is wrong is refused by layers that know no error object."""
    match error:
        case Unauthorized():
            return Answer(401, b'{"error":"Unauthorized"}')
        case UnknownModel():
            pass
        case NotFound():
            return Answer(404, b'{"detail":"Not Found"}')
        case NotAllowed():
            return Answer(405, b'{"detail":"Method Not Allowed"}')
    told = error_object(error)
    return Answer(told["error"]["code"], encode(told))


def failure(error: ParleyError) -> bytes:
    """The end of a stream that an error cuts short; the original writes it with blanks, and escapes all but ASCII."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n" + DONE


def error_object(error: ParleyError) -> dict[str, Any]:
    message, field, status = error.message, error.field, error.status
    match error:
        case Malformed() | Missing() | WrongType():
            kind = "Bad Request"
        case UnknownModel():
            kind = "NotFoundError"
            message = f"The model `{error.name[:256]}` does not exist."
            if error.served:
                message += f" Valid aliases: {', '.join(error.served)}."
        case ContextLength():
            kind = "BadRequestError"
            message, field = _overflow(error)
        case Overloaded():
            kind, status, message = "Service Unavailable", 503, BUSY
        case EngineError():
            kind, status = "InternalServerError", 500
        case Unbuilt():
            kind = "NotImplementedError"
        case ParleyError(status=400):
            kind = "BadRequestError"
        case ParleyError(status=status) if status >= 500 and status != 503:
            kind = "InternalServerError"
        case _:
            kind = HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _overflow(error: ContextLength) -> tuple[str, str]:
    if error.prompt is None or error.limit is None or error.prompt <= error.limit:
        return f"{error.message} (parameter=input_tokens)", "input_tokens"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your prompt contains at least "
        f"{error.prompt} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of the input prompt. (parameter=input_tokens, value={error.prompt})"
    ), "input_tokens"
