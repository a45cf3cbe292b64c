"""Errors as answers of Ollama's API, and as the last line of a stream."""

from __future__ import annotations

from parley.dialects.ollama.go_encoding import encode_go, go_answer
from parley.dialects.ollama.model_names import NAME_PATTERN
from parley.dialects.reply import Answer
from parley.errors import ContextLength, NotAllowed, NotFound, Overloaded, ParleyError, UnknownModel

PLAIN_TYPE = b"text/plain"
QUEUE_FULL = "server busy, please try again.  maximum pending requests exceeded"
INPUT_TOO_LONG = "the input length exceeds the context length"
NO_ROOM = "input after truncation exceeds maximum context length"
NO_MEMORY_BODY = b'{"error":"Memory limit exceeded"}'  # the coordinator's refusal when it has no memory for a body


def ollama_error_sentence(error: ParleyError) -> str:
    """Return an error's sentence."""
    match error:
        case UnknownModel():
            return f"model '{error.name}' not found"
        case Overloaded():
            return QUEUE_FULL
        case ContextLength():
            return f"{INPUT_TOO_LONG}: {error.message}"
        case _:
            return error.message


def ollama_error_answer(error: ParleyError) -> Answer:
    """Return an error as a complete answer: an object, or plain text for a path or method that does not exist."""
    if type(error) is NotFound:
        return Answer(404, b"404 page not found", PLAIN_TYPE)
    if isinstance(error, UnknownModel) and not NAME_PATTERN.fullmatch(error.name):
        return go_answer({"error": "invalid model name"}, 400)
    if isinstance(error, NotAllowed):
        return Answer(405, b"405 method not allowed", PLAIN_TYPE)
    return go_answer({"error": ollama_error_sentence(error)}, 503 if isinstance(error, Overloaded) else error.status)


def ollama_failure_line(error: ParleyError) -> bytes:
    """Return the line that ends a stream which an error cuts short."""
    return encode_go({"error": ollama_error_sentence(error)}) + b"\n"
