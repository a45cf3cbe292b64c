"""How this API says that something went wrong: one sentence in ``{"error": …}``, and a status that is its own.

What cannot be read as JSON, or has another JSON type than is read, counts here as the server's failure (500), as the
original has it; what was read and is not allowed is a 400. Clients tell errors apart by the sentence alone.
"""

from __future__ import annotations

import msgspec

from parley.dialects.dialect import Answer
from parley.errors import (
    BadRequest,
    Expired,
    Invalid,
    Malformed,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    TooLarge,
    UnknownCoding,
    UnknownModel,
)

encode = msgspec.json.Encoder().encode


class Internal(Malformed):
    """What could not be read."""

    status = 500


def mistaken(kind: str, what: str = "'data'", *, read: str = "") -> Internal:
    """``what`` was to be parsed and is not of the JSON type ``kind``, as which (or as ``read``) it would be read."""
    return Internal(f"Unable to parse {what}: attempt to access JSON non-{kind} as {read or kind}")


def about(id: str, sentence: str) -> BadRequest:
    """What is wrong with the inputs of the request of that id."""
    return Invalid(f"[request id: {id[:256] or '<id_unknown>'}] {sentence}")


def quoted(text: str) -> str:
    """A name that the client gave, as messages show it."""
    return f"'{text if len(text) <= 256 else text[:255] + '…'}'"


def body(message: str) -> bytes:
    return encode({"error": message})


def error(error: ParleyError) -> Answer:
    """An error that is the whole answer."""
    status, message = error.status, error.message
    match error:
        case NotAllowed():
            message = "Method Not Allowed"
        case UnknownModel(name=name, served=served, field="adapter"):
            known = f"LoRA {quoted(name)[1:-1]} is not supported, we currently support {list(served)}"
            message = known if served else "LoRA feature is not enabled."
        case UnknownModel(name=name):
            message = f"Request for unknown model: {quoted(name)} is not found" if name else message
        case NotFound():
            message = "Not Found"
        case TooLarge():
            status = 400
        case UnknownCoding():
            status, message = 501, "Unsupported compression type"
        case Overloaded():
            status = 503
        case Expired(limit="client"):
            status, message = 503, "Request timeout expired"
    return Answer(status, body(message))


def failure(error: ParleyError) -> bytes:
    """The end of a stream that an error cuts short."""
    return b"data: " + body(error.message) + b"\n\n"
