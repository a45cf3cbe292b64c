"""Shared by the TEI routes: limits, errors, and the headers of answers.

Errors that the original's web framework would raise are plain text, as TGI's are. Those of its own checks are JSON with
``error`` and ``error_type``; the type decides the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parley.dialects.dialect import Answer, HeaderList, RequestContext, RequestTimings
from parley.dialects.json_answer import encode_json
from parley.dialects.tgi.shared import (
    STRICT_TGI_WORDING,
    TGI_WORDING,
    TgiErrorWording,
    framework_answer,
    refuse_other_content,
    whole_milliseconds,
)
from parley.errors import (
    BadRequest,
    ContextLength,
    EngineError,
    Incapable,
    Invalid,
    NotReady,
    Overloaded,
    ParleyError,
    TooManyDimensions,
    UnknownModel,
    UnknownPromptName,
)

TEI_VERSION = "1.9.3"  # version of the original that this API follows
FIELD_NAMES = {"prompt": "inputs"}  # neutral names of fields in the server's errors, and the names here
STATUSES = {
    "Unhealthy": 503,
    "Backend": 424,
    "Overloaded": 429,
    "Tokenizer": 422,
    "Validation": 422,
    "Empty": 400,
}
NO_MEMORY = b'{"error":"Model is overloaded","error_type":"Overloaded"}'


@dataclass(frozen=True, slots=True)
class TeiRules:
    """The limits the original is started with. ``strict``: bodies must be declared as JSON, name no
    model, and have no 5.0 for an integer.

    ``auto_truncate``: texts that are too long are cut unless a request says otherwise.
    """

    strict: bool
    max_batch: int
    auto_truncate: bool
    max_body: int | None = None  # bytes

    @property
    def wording(self) -> TgiErrorWording:
        """The wording of refusals of a body's members, which is TGI's."""
        return STRICT_TGI_WORDING if self.strict else TGI_WORDING


STRICT_RULES = TeiRules(strict=True, max_batch=32, auto_truncate=True, max_body=2_000_000)
EXTENDED_RULES = TeiRules(strict=False, max_batch=2048, auto_truncate=False)


class EmptyInput(Invalid):
    """A text or a batch is empty."""


class BatchTooLarge(Invalid):
    """A batch has more texts than are allowed."""


class UnfitModel(Invalid):
    """The model lacks the requested ability."""


def check_batch(rules: TeiRules, size: int, name: str) -> None:
    """Raise EmptyInput or BatchTooLarge unless a request may have this number of texts in the member ``name``."""
    if not size:
        raise EmptyInput(f"`{name}` cannot be empty", field=name)
    if size > rules.max_batch:
        message = f"batch size {size} > maximum allowed batch size {rules.max_batch}"
        raise BatchTooLarge(message, field=name)


def tei_error_answer(error: ParleyError) -> Answer:
    """Return an error as an answer."""
    if (answer := framework_answer(error)) is not None:
        return answer
    error_type, message = describe_error(error)
    body = encode_json({"error": message, "error_type": error_type})
    return Answer(error_status(error, error_type), body)


def openai_error_answer(error: ParleyError) -> Answer:
    """Return an error as the original's OpenAI routes do."""
    if (answer := framework_answer(error)) is not None:
        return answer
    error_type, message = describe_error(error)
    status = error_status(error, error_type)
    return Answer(status, encode_json({"message": message, "code": status, "type": error_type}))


def error_status(error: ParleyError, error_type: str) -> int:
    """Return the status of an error; those that the original does not have keep their own."""
    is_original = isinstance(error, BadRequest | Overloaded | NotReady | EngineError | UnknownModel)
    return STATUSES[error_type] if is_original else error.status


def describe_error(error: ParleyError) -> tuple[str, str]:
    """Return the type and the message of an error."""
    match error:
        case EmptyInput():
            return "Empty", error.message
        case BatchTooLarge():
            return "Validation", error.message
        case UnfitModel() | Incapable() | EngineError() | UnknownModel():
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


def refuse_content(rules: TeiRules, headers: Mapping[bytes, bytes]) -> Answer | None:
    """Return the answer to a body that is not declared as JSON, None if it is or need not be."""
    return refuse_other_content(headers) if rules.strict else None


def timing_headers(context: RequestContext, timings: RequestTimings | None, characters: int, tokens: int) -> HeaderList:
    """Return an answer's headers: how large the request was, and where its time went."""
    assert timings is not None, "no answer is a stream"
    return [
        (b"x-compute-type", f"{context.device}+optimized".encode()),
        (b"x-compute-time", whole_milliseconds(timings.total)),
        (b"x-compute-characters", b"%d" % characters),
        (b"x-compute-tokens", b"%d" % tokens),
        (b"x-total-time", whole_milliseconds(timings.total)),
        (b"x-tokenization-time", whole_milliseconds(timings.validation)),
        (b"x-queue-time", whole_milliseconds(timings.queue)),
        (b"x-inference-time", whole_milliseconds(timings.inference)),
    ]
