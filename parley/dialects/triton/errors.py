"""Errors of this API: one sentence in ``{"error": …}``, with a status of its own.

As in the original, invalid JSON and wrong JSON types are server errors (500); values that were read but are not allowed
are a 400. Clients can tell errors apart only by the sentence.
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
    """A body or value that could not be read."""

    status = 500


def mistaken(kind: str, what: str = "'data'", *, read: str = "") -> Internal:
    """Return the error for a subject not of the JSON type ``kind``; ``read_as``: Triton's name for that type."""
    return Internal(f"Unable to parse {what}: attempt to access JSON non-{kind} as {read or kind}")


def about(id: str, sentence: str) -> BadRequest:
    """Return an error about the inputs of the request with this id."""
    return Invalid(f"[request id: {id[:256] or '<id_unknown>'}] {sentence}")


def quoted(text: str) -> str:
    """Return a client's name in quotes, cut to 256 characters, for messages."""
    return f"'{text if len(text) <= 256 else text[:255] + '…'}'"


def body(message: str) -> bytes:
    """Return the JSON body of an error."""
    return encode({"error": message})


def error(error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
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
    """Return the event that ends a stream after an error."""
    return b"data: " + body(error.message) + b"\n\n"
