"""Errors as answers of MindIE's interfaces.

Every refusal of a body is a 422, whichever fault it has. Refusals by the engine are a 424. A stream that has begun ends
with the bare text of the error.
"""

from __future__ import annotations

import sys

from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.members.media import mindie_media_sentence
from parley.dialects.reply import Answer
from parley.errors import (
    BadMedia,
    BadRequest,
    ContextLength,
    InUse,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    ServerStopping,
    TimeLimitPassed,
    TooLarge,
    UnknownModel,
    UnknownToken,
)

DEFAULT_RULES = MindieRules()
TIMEOUT_MESSAGES = {
    "client": "Engine callback timeout: client timeout",
    "server": "Engine callback timeout: server e2eTimeout",
    "token": "Engine callback timeout: server tokenTimeout",
}


def mindie_error_answer(error: ParleyError, rules: MindieRules = DEFAULT_RULES) -> Answer:
    """Return an error as a whole answer."""
    match error:
        case TooLarge(limit=limit):
            megabytes = min(rules.body_megabytes, (limit or sys.maxsize) / 2**20)  # the server's own limit may be lower
            text = f"Request body too large. Maximum allowed size is {megabytes:g}MB."
            return Answer(413, encode_json({"message": text}))
        case ContextLength():
            return mindie_json_error_answer(424, _context_length_message(error), "Generation Error")
        case TimeLimitPassed():
            return mindie_json_error_answer(500, TIMEOUT_MESSAGES[error.limit], "Incomplete Generation")
        case InUse():
            message = "Failed to enqueue inferRequest. Runtime request has been used before."
            return mindie_json_error_answer(500, message, "Incomplete Generation")
        case UnknownModel():
            return mindie_json_error_answer(404, f"Model {error.name} not found.", "NotFoundError")
        case NotFound():
            return mindie_json_error_answer(404, error.message, "NotFoundError")
        case UnknownToken():
            return mindie_json_error_answer(
                424, "Failed to enqueue inferRequest. Invalid Input Ids", "Generation Error"
            )
        case BadRequest():
            return body_refusal_answer(_refusal_sentence(error))
        case ServerStopping():
            return mindie_json_error_answer(503, "The service has been stopped", "Service Unavailable")
        case NotReady() if rules.strict:
            return Answer(503)
        case NotReady() | Overloaded():
            return mindie_json_error_answer(503, error.message, "Service Unavailable")
        case _ if type(error) is ParleyError and rules.strict:
            return Answer(500, b"Server internal error")  # not JSON, despite the content type
        case _ if error.status >= 500:
            return mindie_json_error_answer(500, error.message, "Incomplete Generation")
        case _:
            return mindie_json_error_answer(error.status, error.message, "Bad Request")


def body_refusal_answer(text: str) -> Answer:
    """Return the refusal of a body."""
    return mindie_json_error_answer(422, text, "Input Validation Error")


def mindie_failure_text(error: ParleyError) -> bytes:
    """Return the end of a stream after an error."""
    return (
        TIMEOUT_MESSAGES[error.limit].encode()
        if isinstance(error, TimeLimitPassed)
        else _refusal_sentence(error).encode()
    )


def _refusal_sentence(error: ParleyError) -> str:
    return mindie_media_sentence(error) if isinstance(error, BadMedia) else error.message


def _context_length_message(error: ContextLength) -> str:
    length = f"over {error.prompt_over}" if error.prompt is None else error.prompt
    if error.limit is None:
        return f"Failed to enqueue inferRequest. {error.message}"
    return (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
        f"{error.limit - 1},the input ids length is {length}"
    )


def mindie_json_error_answer(status: int, text: str, error_type: str) -> Answer:
    """Return an error answer in JSON."""
    return Answer(status, encode_json({"error": text, "error_type": error_type}))
