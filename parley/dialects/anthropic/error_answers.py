"""Errors as answers of Anthropic's API: a type that follows from the status, a sentence, and the request's id."""

from __future__ import annotations

from typing import Any

from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.errors import ContextLength, ParleyError, UnknownModel

REQUEST_ID_PREFIX = "req_"
OVERLOADED_STATUS = 529  # the original's own status
UNSUPPORTED_THREAD = "thread_unsupported_request"  # the code of a refusal to hold a conversation between requests
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_type(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def anthropic_error_object(error: ParleyError, request_uuid: str) -> dict[str, Any]:
    """Return an error with its type, sentence and the id of its request. Anthropic's SDKs read ``details``: they send a
    refused thread as a conversation without one."""
    members: dict[str, Any] = {"type": anthropic_error_type(error.status), "message": anthropic_error_sentence(error)}
    if error.code == UNSUPPORTED_THREAD:
        members["details"] = {"error_code": error.code, "unsupported": [error.field]}
    return {
        "type": "error",
        "error": members,
        "request_id": f"{REQUEST_ID_PREFIX}{request_uuid}" if request_uuid else None,
    }


def anthropic_error_sentence(error: ParleyError) -> str:
    """Return the sentence of an error. Claude Code matches the one about a prompt that is too long, and compacts."""
    match error:
        case ContextLength(limit=int() as limit) if error.prompt is not None or error.prompt_over is not None:
            # Of a prompt that was not counted to its end, the smallest possible length.
            tokens = error.prompt if error.prompt is not None else (error.prompt_over or 0) + 1
            return f"prompt is too long: {tokens} tokens > {limit - 1} maximum"
        case UnknownModel() if error.name:
            return f"model: {error.name[:256]}"
    return error.message


def anthropic_error_answer(rules: AnthropicRules, error: ParleyError) -> Answer:
    """Return an error as a complete answer."""
    status = OVERLOADED_STATUS if rules.strict and error.status == 503 else error.status
    return Answer(status, encode_json(anthropic_error_object(error, error.request_uuid)))
