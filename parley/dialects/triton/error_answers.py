"""Errors as answers of Triton's API: one sentence in ``{"error": …}``, with a status of its own.

As in the original, invalid JSON and wrong JSON types are server errors (500) where the API is strict; values that were
read but are not allowed are a 400. Clients can tell errors apart only by the sentence.
"""

from __future__ import annotations

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.sse import encoded_event
from parley.errors import (
    BadRequest,
    InvalidValue,
    MalformedBody,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    TimeLimitPassed,
    TooLarge,
    UnknownCoding,
    UnknownModel,
)

TOO_LARGE_MESSAGE = (
    "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. Use "
    "--http-max-input-size to increase the limit."
)


class UnreadableInput(MalformedBody):
    """A body or value that could not be read."""

    status = 500


def wrong_type_error(kind: str, subject: str = "'data'", *, read_as: str = "") -> UnreadableInput:
    """Return the error for a subject not of the JSON type ``kind``; ``read_as``: Triton's name for that type."""
    return UnreadableInput(f"Unable to parse {subject}: attempt to access JSON non-{kind} as {read_as or kind}")


def inputs_error(request_id: str, sentence: str) -> BadRequest:
    """Return an error about the inputs of the request with this id."""
    return InvalidValue(f"[request id: {request_id[:256] or '<id_unknown>'}] {sentence}")


def quote_name(text: str) -> str:
    """Return a client's name in quotes, cut to 256 characters, for messages."""
    return f"'{text if len(text) <= 256 else text[:255] + '…'}'"


def triton_error_body(message: str) -> bytes:
    """Return the JSON body of an error."""
    return encode_json({"error": message})


def triton_error_answer(error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
    status, message = error.status, error.message
    match error:
        case NotAllowed():
            message = "Method Not Allowed"
        case UnknownModel(name=name, served=served, field="adapter"):
            lora_message = f"LoRA {quote_name(name)[1:-1]} is not supported, we currently support {list(served)}"
            message = lora_message if served else "LoRA feature is not enabled."
        case UnknownModel(name=name):
            message = f"Request for unknown model: {quote_name(name)} is not found" if name else message
        case NotFound():
            message = "Not Found"
        case TooLarge(size=size, limit=limit):
            status = 400
            message = TOO_LARGE_MESSAGE.format(size=size, limit=limit) if size else message
        case UnknownCoding():
            status, message = 501, "Unsupported compression type"
        case Overloaded():
            status = 503
        case TimeLimitPassed(limit="client"):
            status, message = 503, "Request timeout expired"
    return Answer(status, triton_error_body(message))


def lenient_error_answer(error: ParleyError) -> Answer:
    """Return an error as a whole answer. A body that cannot be read is the client's mistake here (400)."""
    if isinstance(error, TooLarge):  # the original's sentence names an option of its own
        return Answer(400, triton_error_body(error.message))
    answer = triton_error_answer(error)
    return answer._replace(status=400) if isinstance(error, UnreadableInput) else answer


def triton_failure_event(error: ParleyError) -> bytes:
    """Return the event that ends a stream after an error."""
    return encoded_event(triton_error_answer(error).body)
