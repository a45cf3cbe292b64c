"""Shared by MindIE's interfaces: the wording of refusals, and the form of errors.

Every refusal of a body is a 422, whichever fault it has. Refusals by the engine are a 424. A stream that has begun ends
with the bare text of the error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from parley.dialects import error_wording
from parley.dialects.dialect import Answer, RequestContext
from parley.dialects.json_answer import encode_json
from parley.dialects.mindie.members.media import media_sentence
from parley.dialects.mindie.rules import MindieRules
from parley.errors import (
    BadMedia,
    BadRequest,
    ContextLength,
    Expired,
    InUse,
    Invalid,
    Malformed,
    Missing,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    Stopping,
    TooLarge,
    UnknownModel,
    UnknownToken,
    WrongType,
)

I32 = 2**31 - 1
U64 = 2**64 - 1
F32 = 3.4028234663852886e38
DEFAULT_RULES = MindieRules()

NO_PROMPT_TEXT = json.dumps(  # a text in JSON, with the blanks that the original prints
    {
        "Error": "`inputs` or `prompt` must be necessary and data type must be string. "
        "Additionally, the request body must be valid json",
        "error_type": "validation",
    }
)

TYPE_NAMES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "float",
    "a string": "string",
    "an array": "array",
    "an object": "object",
}
UNSIGNED = ("seed", "n", "best_of", "priority", "timeout", "top_logprobs", "logprobs")
# Messages for numbers out of range, independent of the interface's range. {1} is its upper limit.
RANGE_MESSAGES = {
    "temperature": "Parameter temperature must be in (0.0,{1:g}], got {0}.",
    "top_k": "Parameter top_k must be in -1 || (0,2147483647], got {0}",
    "top_p": "Parameter top_p must be in (0.0,1.0], got {0}.",
    "typical_p": "Parameter typical_p must be in (0.0,1.0], got {0}.",
    "seed": "Parameter seed must be in [0, 9223372036854775807], got {0}.",
    "repetition_penalty": "Parameter 'repetition_penalty' must be in (0.0, {1:g}], got {0}.",
    "presence_penalty": "Parameter presence_penalty not in [-2.0, 2.0], but got {0}.",
    "frequency_penalty": "Parameter frequency_penalty should be in [-2.0, 2.0], got {0}.",
    "max_new_tokens": "Parameter max_new_tokens must be in (0,2147483647], got {0}.",
    "max_tokens": "Parameter max_tokens must be (0,2147483647], got {0}",
    "truncate": "truncate must be in (0,2147483647], got {0}.",
    "batch_size": "Parameter batch_size must be in (0,2147483647], got {0}.",
    "priority": "Parameter priority must be in [1,5], got {0}.",
    "timeout": "Parameter timeout must be strictly positive and small than 65535 seconds, got {0}.",
    "n": "Parameter [n] should be in [1, 8192], got {0}. ",
    "best_of": "Parameter [best_of] should be in [1, 128], got {0}.",
    "top_logprobs": "Parameter top logprobs must be in [0, 20], got {0}.",
    "logprobs": "logprobs should be in range [0, 5], got {0}.",
    "thinking_budget": "Parameter thinking_budget must be in [1,2147483647], got {0}",
}
TIMEOUT_MESSAGES = {
    "client": "Engine callback timeout: client timeout",
    "server": "Engine callback timeout: server e2eTimeout",
    "token": "Engine callback timeout: server tokenTimeout",
}
TYPE_MESSAGES = {"max_tokens": "Parameter max_tokens not number_integer"}  # messages for a wrong type


class MindieErrorWording(error_wording.ErrorWording):
    """MindIE's wording. ``unreadable_body``: the message for a body that is no JSON object; each route has its own."""

    whole_floats = False

    def __init__(self, unread: str = ""):
        self.unreadable_body = unread

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        return Missing(f"Request should contain '{path}' and the type should be string.", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        name = path.rpartition(".")[2]
        expected_type = (
            "unsigned" if name in UNSIGNED and expected == "an integer" else TYPE_NAMES.get(expected, expected)
        )
        return WrongType(TYPE_MESSAGES.get(name, f"{name} must be {expected_type} type."), field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        name = path.rpartition(".")[2]
        if name in UNSIGNED and value < 0:
            return self.type_error(path, "an integer", value)
        return value_error(path, value, high)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(reason, field=path)

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return Malformed(self.unreadable_body)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is not a JSON object."""
        return Malformed(self.unreadable_body)


MINDIE_WORDING = MindieErrorWording("Failed to parse request context to json")


def value_error(path: str, value: Any, high: float | None = None) -> BadRequest:
    """Return the error for a parameter's value that its interface does not accept."""
    return Invalid(RANGE_MESSAGES[path.rpartition(".")[2]].format(encode_json(value).decode(), high or 0), field=path)


def utf16_length(text: str) -> int:
    """Return a text's length in UTF-16 units, as the original counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def mindie_error_answer(error: ParleyError, rules: MindieRules = DEFAULT_RULES) -> Answer:
    """Return an error as a whole answer."""
    match error:
        case TooLarge(limit=limit):
            megabytes = min(rules.body_megabytes, (limit or sys.maxsize) / 2**20)  # the server's own limit may be lower
            text = f"Request body too large. Maximum allowed size is {megabytes:g}MB."
            return Answer(413, encode_json({"message": text}))
        case ContextLength():
            return mindie_error_json(424, _context_length_message(error), "Generation Error")
        case Expired():
            return mindie_error_json(500, TIMEOUT_MESSAGES[error.limit], "Incomplete Generation")
        case InUse():
            message = "Failed to enqueue inferRequest. Runtime request has been used before."
            return mindie_error_json(500, message, "Incomplete Generation")
        case UnknownModel():
            return mindie_error_json(404, f"Model {error.name} not found.", "NotFoundError")
        case NotFound():
            return mindie_error_json(404, error.message, "NotFoundError")
        case UnknownToken():
            return mindie_error_json(424, "Failed to enqueue inferRequest. Invalid Input Ids", "Generation Error")
        case BadRequest():
            return refuse_body(_refusal_sentence(error))
        case Stopping():
            return mindie_error_json(503, "The service has been stopped", "Service Unavailable")
        case NotReady() if rules.strict:
            return Answer(503)
        case NotReady() | Overloaded():
            return mindie_error_json(503, error.message, "Service Unavailable")
        case _ if type(error) is ParleyError and rules.strict:
            return Answer(500, b"Server internal error")  # not JSON, despite the content type
        case _ if error.status >= 500:
            return mindie_error_json(500, error.message, "Incomplete Generation")
        case _:
            return mindie_error_json(error.status, error.message, "Bad Request")


def header_request_id(context: RequestContext) -> str:
    """Return the request's id from its header; no two open requests may share it."""
    return context.headers.get(b"req-id", b"").decode("utf-8", "replace")


def request_name(context: RequestContext) -> str:
    """Return the request's name: its header's id, or a numbered one like the original's."""
    return header_request_id(context) or f"endpoint_common_{int(context.unique_id[-8:], 16)}"


def refuse_body(text: str) -> Answer:
    """Return the refusal of a body."""
    return mindie_error_json(422, text, "Input Validation Error")


def mindie_failure_text(error: ParleyError) -> bytes:
    """Return the end of a stream after an error."""
    return TIMEOUT_MESSAGES[error.limit].encode() if isinstance(error, Expired) else _refusal_sentence(error).encode()


def _refusal_sentence(error: ParleyError) -> str:
    return media_sentence(error) if isinstance(error, BadMedia) else error.message


def _context_length_message(error: ContextLength) -> str:
    length = f"over {error.prompt_over}" if error.prompt is None else error.prompt
    if error.limit is None:
        return f"Failed to enqueue inferRequest. {error.message}"
    return (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than "
        f"{error.limit - 1},the input ids length is {length}"
    )


def mindie_error_json(status: int, text: str, error_type: str) -> Answer:
    """Return an error answer in JSON."""
    return Answer(status, encode_json({"error": text, "error_type": error_type}))
