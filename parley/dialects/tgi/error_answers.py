"""Errors as answers of TGI's API.

They come from two layers, which clients distinguish. Errors that the original's web framework would raise (invalid
JSON, a wrong type, a missing field) are plain text; errors of its validation are JSON with ``error`` and
``error_type``.
"""

from __future__ import annotations

from collections.abc import Mapping

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.tgi.answer_parts import tgi_event
from parley.dialects.tgi.api_rules import STRICT_TGI_RULES, TgiRules
from parley.dialects.tgi.images import tgi_image_sentence
from parley.errors import (
    BadMedia,
    BadRequest,
    ContextLength,
    EngineError,
    MalformedBody,
    MissingField,
    NotAllowed,
    NotFound,
    NoTokens,
    NotReady,
    Overloaded,
    ParleyError,
    TooLarge,
    Unauthorized,
    UnknownModel,
    WrongType,
)

PLAIN_TEXT = b"text/plain; charset=utf-8"
INCOMPLETE = "incomplete_generation"  # a type that clients know; inside a stream it has another name
NOT_JSON_MESSAGE = b"Expected request with `Content-Type: application/json`"
# A coordinator's answer if it has no memory for a body.
NO_MEMORY_BODY = b'{"error":"Memory limit exceeded","error_type":"overloaded"}'
# Errors with a type of their own, and the start of their messages.
SPECIAL_ERRORS = {
    "tool_error": "Tool error: ",
    "template_error": "Template error: ",
    "suffix not supported": "",
    "batch size exceeded": "",
    "Input validation error": "",
}


def special_error_type(error: ParleyError) -> str:
    """Return an error's special type, or "". The chat template refuses with a plain BadRequest about ``messages``."""
    if type(error) is BadRequest and error.field == "messages":
        return "template_error"
    return error.code if error.code in SPECIAL_ERRORS else ""


def framework_answer(error: ParleyError) -> Answer | None:
    """Return the plain text that the original's web framework answers; None for errors that it does not know."""
    match error:
        case MalformedBody():
            return Answer(400, f"Failed to parse the request body as JSON: {error.message}".encode(), PLAIN_TEXT)
        case MissingField() | WrongType():
            text = f"Failed to deserialize the JSON body into the target type: {error.message}"
            return Answer(422, text.encode(), PLAIN_TEXT)
        case TooLarge():
            return Answer(413, b"Failed to buffer the request body: length limit exceeded", PLAIN_TEXT)
        case UnknownModel():
            return None
        case Unauthorized() | NotFound() | NotAllowed():
            return Answer(error.status, b"", PLAIN_TEXT)
    return None


def tgi_error_answer(rules: TgiRules, error: ParleyError) -> Answer:
    """Return an error as a whole answer."""
    if (answer := framework_answer(error)) is not None:
        return answer
    if isinstance(error, UnknownModel):
        return Answer(424, encode_json(tgi_error_object(error, rules)))
    status = 422 if isinstance(error, BadRequest) else 424 if isinstance(error, EngineError) else error.status
    return Answer(status, encode_json(tgi_error_object(error, rules)))


def error_as_stream(error: ParleyError, rules: TgiRules = STRICT_TGI_RULES) -> Answer:
    """Return an error as a whole stream, as the original does if one occurs before the first event."""
    return Answer(200, tgi_failure_event(error, rules), b"text/event-stream")


def tgi_failure_event(error: ParleyError, rules: TgiRules = STRICT_TGI_RULES) -> bytes:
    """Return the event that ends a stream after an error."""
    error_body = tgi_error_object(error, rules)
    if error_body["error_type"] == INCOMPLETE and rules.strict and not rules.old:
        error_body = {"error": "Incomplete generation stream", "error_type": f"{INCOMPLETE}_stream"}
    return tgi_event(error_body, rules)


def tgi_error_object(error: ParleyError, rules: TgiRules) -> dict[str, str]:
    """Return an error's JSON object. Like the original, strict rules give no details of server faults."""
    detail = "" if rules.strict else f": {error.message}"
    match error:
        case BadRequest() if special := special_error_type(error):
            return {"error": SPECIAL_ERRORS[special] + error.message, "error_type": special}
        case BadRequest():
            return {"error": f"Input validation error: {_error_sentence(error)}", "error_type": "validation"}
        case Overloaded():
            return {"error": "Model is overloaded", "error_type": "overloaded"}
        case EngineError() | UnknownModel():  # an unknown model name means an unknown adapter here
            return {"error": f"Request failed during generation: {error.message}", "error_type": "generation"}
        case NotReady():
            return {"error": f"unhealthy{detail}", "error_type": "healthcheck"}
        case ParleyError(status=status) if status >= 500:
            return {"error": f"Incomplete generation{detail}", "error_type": INCOMPLETE}
        case _:
            return {"error": error.message, "error_type": "refused"}


def _error_sentence(error: BadRequest) -> str:
    if isinstance(error, NoTokens):
        return "`inputs` cannot be empty"
    if isinstance(error, BadMedia):
        return tgi_image_sentence(error)
    if not isinstance(error, ContextLength) or error.limit is None:
        return error.message
    if error.prompt is None:
        if error.prompt_over is None:
            return error.message
        return f"`inputs` must have less than {error.limit - 1} tokens. Given: over {error.prompt_over}"
    if error.requested is None or error.prompt >= error.limit:
        return f"`inputs` must have less than {error.limit - 1} tokens. Given: {error.prompt}"
    return (
        f"`inputs` tokens + `max_new_tokens` must be <= {error.limit}. "
        f"Given: {error.prompt} `inputs` tokens and {error.requested} `max_new_tokens`"
    )


def refuse_other_content(headers: Mapping[bytes, bytes]) -> Answer | None:
    """Return the original's answer to a body whose content type is not JSON; None if it is."""
    if _is_json_content(headers.get(b"content-type", b"")):
        return None
    return Answer(415, NOT_JSON_MESSAGE, PLAIN_TEXT)


def _is_json_content(content_type: bytes) -> bool:
    main, _, sub = content_type.partition(b";")[0].strip().lower().partition(b"/")
    return main == b"application" and (sub == b"json" or sub.endswith(b"+json"))
