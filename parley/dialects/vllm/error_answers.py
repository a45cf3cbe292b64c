"""Errors as answers of vLLM's API, with the original's types and sentences."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.sse import STREAM_DONE, encoded_event
from parley.dialects.vllm.media_wording import media_error_members
from parley.dialects.vllm.refusal_wording import unknown_ids_sentence, unknown_token_sentence
from parley.errors import (
    BadMedia,
    ContextLength,
    EngineError,
    MalformedBody,
    MissingField,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    Unauthorized,
    UnknownModel,
    UnknownRecord,
    UnknownToken,
    UnknownTokenIds,
    UnsuitableModel,
    WrongType,
)

BUSY_SENTENCE = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
ADAPTER_ERROR_TYPE = "InvalidUserInput"  # the error type of a wrong adapter request
STORE_ERROR_TYPE = "invalid_request_error"  # the error type of a wrong use of stored responses
# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"error":"Memory limit exceeded","error_type":"overloaded"}'


class UnsupportedCall(ParleyError):
    """The call is part of this API, but the server does not support it."""

    status = 501


def vllm_error_answer(error: ParleyError) -> Answer:
    """Return an error as a complete answer. Wrong keys and paths are refused by layers without an error object."""
    match error:
        case Unauthorized():
            return Answer(401, b'{"error":"Unauthorized"}')
        case UnknownModel() | UnknownRecord():
            pass
        case NotFound() | UnsuitableModel():  # in the original a model has only the routes that it can serve
            return Answer(404, b'{"detail":"Not Found"}')
        case NotAllowed():
            return Answer(405, b'{"detail":"Method Not Allowed"}')
    body = vllm_error_object(error)
    return Answer(body["error"]["code"], encode_json(body))


def vllm_failure_events(error: ParleyError) -> bytes:
    """Return the end of a stream that an error cuts short; like the original with spaces and escaped non-ASCII."""
    return encoded_event(json.dumps(vllm_error_object(error)).encode()) + STREAM_DONE


def vllm_error_object(error: ParleyError) -> dict[str, Any]:
    """Return the error object of an answer, with the original's types and sentences."""
    message, field, status = error.message, error.field, error.status
    match error:
        case BadMedia():
            status, error_type, message = media_error_members(error)
        case MalformedBody() | MissingField() | WrongType():
            error_type = "Bad Request"
        case UnknownModel():
            error_type = "NotFoundError"
            message = f"The model `{error.name[:256]}` does not exist."
            if error.served:
                message += f" Valid aliases: {', '.join(error.served)}."
        case UnknownRecord():
            error_type, field = STORE_ERROR_TYPE, "response_id"
        case ContextLength():
            error_type = "BadRequestError"
            message, field = _context_length_error(error)
            message += f" ({error.place})" if error.place and error.place not in message else ""
        case UnknownToken(token_id=int() as token_id):
            error_type, message, field = "BadRequestError", unknown_token_sentence(token_id), None
        case UnknownTokenIds():
            error_type = "BadRequestError"
            message = unknown_ids_sentence(field or "", error.token_ids, error.vocabulary)
        case Overloaded():
            error_type, status, message = "Service Unavailable", 503, BUSY_SENTENCE
        case EngineError():
            error_type, status = "InternalServerError", 500
        case UnsupportedCall():
            error_type = "NotImplementedError"
        case ParleyError(status=400):
            error_type = error.code if error.code in (ADAPTER_ERROR_TYPE, STORE_ERROR_TYPE) else "BadRequestError"
        case ParleyError(status=status) if status >= 500 and status != 503:
            error_type = "InternalServerError"
        case _:
            error_type = HTTPStatus(status).phrase
    return {"error": {"message": message, "type": error_type, "param": field, "code": status}}


def _context_length_error(error: ContextLength) -> tuple[str, str]:
    prompt_tokens = error.prompt if error.prompt is not None else (error.prompt_over or 0) + 1
    if error.limit is None or prompt_tokens <= error.limit:
        return f"{error.message} (parameter=input_tokens)", "input_tokens"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your prompt contains at least "
        f"{prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of the input prompt. (parameter=input_tokens, value={prompt_tokens})"
    ), "input_tokens"
