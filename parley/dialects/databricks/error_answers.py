"""Errors as answers of Databricks' API: a code in capitals and a sentence.

OpenAI's clients of this API expect an ``error`` object inside a stream, so streams have both.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.sse import STREAM_DONE, data_event
from parley.errors import (
    BadRequest,
    BodyTimedOut,
    EngineDied,
    Forbidden,
    MissingField,
    NotFound,
    NotReady,
    ObjectConflict,
    Overloaded,
    ParleyError,
    RateLimited,
    TimeLimitPassed,
    Unauthorized,
    UnknownModel,
    WrongType,
)


def status_and_code(error: ParleyError) -> tuple[int, str]:
    """Return the HTTP status, and the code in capitals."""
    match error:
        case UnknownModel():
            return 404, "RESOURCE_DOES_NOT_EXIST"
        case NotFound():
            return 404, error.code or "ENDPOINT_NOT_FOUND"
        case MissingField():
            return 400, "INVALID_PARAMETER_VALUE"
        case BadRequest():
            return 400, error.code if error.code == "INVALID_PARAMETER_VALUE" else "BAD_REQUEST"
        case Unauthorized(code=""):
            return 401, "UNAUTHENTICATED"
        case Unauthorized() | Forbidden():
            return 403, "PERMISSION_DENIED"
        case ObjectConflict():
            return 409, error.code or "RESOURCE_CONFLICT"
        case Overloaded() | RateLimited():
            return 429, "REQUEST_LIMIT_EXCEEDED"
        case NotReady() | EngineDied():
            return 503, "TEMPORARILY_UNAVAILABLE"
        case TimeLimitPassed():
            return 504, "DEADLINE_EXCEEDED"
        case BodyTimedOut():
            return 408, "DEADLINE_EXCEEDED"
        case _ if error.status < 500:
            return error.status, "BAD_REQUEST"
        case _:
            return error.status, "INTERNAL_ERROR"


def databricks_error_object(error: ParleyError) -> dict[str, Any]:
    """Return an error's code and sentence."""
    status, code = status_and_code(error)
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


def databricks_error_answer(error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
    return Answer(status_and_code(error)[0], encode_json(databricks_error_object(error)))


def databricks_failure_events(error: ParleyError) -> bytes:
    """Return the events that end a stream after an error."""
    error_body = databricks_error_object(error)
    inner = {
        "message": error_body["message"],
        "type": error_body["error_code"],
        "param": error.field,
        "code": error_body["error_code"],
    }
    return data_event(error_body | {"error": inner}) + STREAM_DONE
