"""Errors as answers of TEI's API.

Errors that the original's web framework would raise are plain text, as TGI's are. Those of its own checks are JSON with
``error`` and ``error_type``; the type decides the status.
"""

from __future__ import annotations

from collections.abc import Mapping

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer
from parley.dialects.tei.api_rules import TeiRules
from parley.dialects.tgi.error_answers import framework_answer, refuse_other_content
from parley.errors import (
    BadRequest,
    ContextLength,
    EngineError,
    InvalidValue,
    NotReady,
    Overloaded,
    ParleyError,
    TooManyDimensions,
    UnknownModel,
    UnknownPromptName,
    UnsuitableModel,
)

TYPE_STATUSES = {
    "Unhealthy": 503,
    "Backend": 424,
    "Overloaded": 429,
    "Tokenizer": 422,
    "Validation": 422,
    "Empty": 400,
}
NO_MEMORY_BODY = b'{"error":"Model is overloaded","error_type":"Overloaded"}'


class EmptyInput(InvalidValue):
    """A text or a batch is empty."""


class BatchTooLarge(InvalidValue):
    """A batch has more texts than are allowed."""


class UnfitModel(InvalidValue):
    """The model lacks the requested ability."""


def tei_error_answer(error: ParleyError) -> Answer:
    """Return an error as an answer."""
    if (answer := framework_answer(error)) is not None:
        return answer
    error_type, message = error_type_and_message(error)
    body = encode_json({"error": message, "error_type": error_type})
    return Answer(error_status(error, error_type), body)


def tei_openai_error_answer(error: ParleyError) -> Answer:
    """Return an error as the original's OpenAI routes do."""
    if (answer := framework_answer(error)) is not None:
        return answer
    error_type, message = error_type_and_message(error)
    status = error_status(error, error_type)
    return Answer(status, encode_json({"message": message, "code": status, "type": error_type}))


def error_status(error: ParleyError, error_type: str) -> int:
    """Return the status of an error; those that the original does not have keep their own."""
    is_original = isinstance(error, BadRequest | Overloaded | NotReady | EngineError | UnknownModel)
    return TYPE_STATUSES[error_type] if is_original else error.status


def error_type_and_message(error: ParleyError) -> tuple[str, str]:
    """Return the type and the message of an error."""
    match error:
        case EmptyInput():
            return "Empty", error.message
        case BatchTooLarge():
            return "Validation", error.message
        case UnfitModel() | UnsuitableModel() | EngineError() | UnknownModel():
            return "Backend", f"Backend error: {error.message}"
        case BadRequest():
            return "Validation", f"Input validation error: {_validation_sentence(error)}"
        case Overloaded():
            return "Overloaded", "Model is overloaded"
        case NotReady():
            return "Unhealthy", "unhealthy"
        case _:
            return "Backend", error.message


def _validation_sentence(error: BadRequest) -> str:
    if isinstance(error, UnknownPromptName):
        start = f"`default-prompt-name` is set to `{error.name}` but "
        if not error.known:
            return start + "no prompts were found in the Sentence Transformers configuration"
        names = ", ".join(f'"{name}"' for name in error.known)
        return f"{start}it was not found in the Sentence Transformers prompts. Available prompts: [{names}]"
    if isinstance(error, TooManyDimensions):
        return "`dimensions` should be smaller than the maximum embedding dimension."
    if not isinstance(error, ContextLength) or error.limit is None:
        return error.message
    length = error.prompt if error.prompt is not None else f"over {error.prompt_over}"
    return f"`inputs` must have less than {error.limit} tokens. Given: {length}"


def refuse_other_content_if_strict(rules: TeiRules, headers: Mapping[bytes, bytes]) -> Answer | None:
    """Return the answer to a body that is not declared as JSON, None if it is or need not be."""
    return refuse_other_content(headers) if rules.strict else None
