"""Errors as answers of OpenAI's API, and as the end of a stream."""

from __future__ import annotations

from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.sse import STREAM_DONE, data_event
from parley.errors import BadMedia, MediaFault, NotFound, Overloaded, ParleyError, RateLimited

# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"error":{"message":"Memory limit exceeded","type":"server_error","code":429}}'
# Codes of errors about media; {} is the kind. OpenAI documents those of images.
MEDIA_CODES: dict[MediaFault, str] = {
    "bad_address": "invalid_{}_url",
    "bad_data_url": "invalid_{}_url",
    "forbidden_address": "invalid_{}_url",
    "not_found": "invalid_{}_url",
    "unreachable": "invalid_{}_url",
    "bad_base64": "invalid_base64",
    "unknown_format": "invalid_{}_format",
    "undecodable": "{}_parse_error",
    "refused_by_model": "{}_parse_error",
    "too_slow": "{}_parse_error",
    "too_large": "{}_too_large",
    "too_long": "{}_too_large",
    "too_many_pixels": "{}_too_large",
}


def openai_error_object(error: ParleyError) -> dict[str, Any]:
    """Return the error object of an OpenAI answer."""
    match error:
        case RateLimited(kind=kind):
            error_type = kind
        case Overloaded():
            error_type = "requests"
        case ParleyError(status=503):
            error_type = "service_unavailable"
        case ParleyError(status=status) if status >= 500:
            error_type = "server_error"
        case _:
            error_type = "invalid_request_error"
    code = error.code or ("unknown_url" if type(error) is NotFound else None)
    if isinstance(error, BadMedia):
        code = MEDIA_CODES.get(error.reason, error.code or "").format(error.kind)
    return {"error": {"message": error.message, "type": error_type, "param": error.field, "code": code}}


def openai_error_answer(error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    return Answer(error.status, encode_json(openai_error_object(error)))


def openai_failure_events(error: ParleyError) -> bytes:
    """Return the end of a stream that an error cuts short."""
    return data_event(openai_error_object(error)) + STREAM_DONE
