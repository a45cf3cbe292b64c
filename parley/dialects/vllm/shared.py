"""Common parts of vLLM's routes: its version, envelopes, usage and error objects."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import msgspec

from parley.dialects import orca
from parley.dialects.dialect import Answer, Head, Headers, Timings
from parley.errors import (
    ContextLength,
    EngineError,
    Incapable,
    Malformed,
    Missing,
    NotAllowed,
    NotFound,
    Overloaded,
    ParleyError,
    Unauthorized,
    UnknownModel,
    WrongType,
)
from parley.types import Delta, Done, Request, Usage, Want

SPOKEN = "0.32.0"  # the version of the original whose API this is; clients use it to detect features
DONE = b"data: [DONE]\n\n"
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."

UNUSABLE = "InvalidUserInput"  # the error type of a wrong adapter request

encode = msgspec.json.Encoder().encode
# The coordinator's refusal when it has no memory for a body.
NO_MEMORY = b'{"error":"Memory limit exceeded","error_type":"overloaded"}'


def frame(chunk: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + encode(chunk) + b"\n\n"


def envelope(id: str, object: str, head: Head, request: Request, choices: list[Any]) -> dict[str, Any]:
    """Return the common first members of every answer and chunk."""
    return {"id": id, "object": object, "created": head.created, "model": request.model, "choices": choices}


def finish(pieces: list[tuple[Delta | None, Done | None]], done: Done) -> None:
    """Attach the end of a choice to its last text, if that is among the pieces; not to the last piece of a call."""
    for place in range(len(pieces) - 1, -1, -1):
        delta, _ = pieces[place]
        if delta is not None and delta.index == done.index:
            if delta.part != "tool":
                pieces[place] = (delta, done)
                return
            break
    pieces.append((None, done))


def scored(want: Want) -> Want:
    """Return the options with log-probabilities of the prompt: as many alternatives as for the output."""
    return msgspec.structs.replace(want, prompt_logprobs=want.logprobs or 0)


def usage(total: Usage) -> dict[str, Any]:
    """Return the usage of an answer, with null for absent values."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "completion_tokens": total.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": total.cached_tokens,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": {"reasoning_tokens": total.reasoning_tokens} if total.reasoning_tokens else None,
    }


def final(total: Usage) -> dict[str, Any]:
    """Return the usage at the end of a stream, without nulls."""
    told = usage(total)
    told["prompt_tokens_details"] = {"cached_tokens": total.cached_tokens}
    return {name: value for name, value in told.items() if value is not None}


def progress(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage in the middle of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "completion_tokens_details": None,
    }


def embedded(total: Usage) -> dict[str, Any]:
    """Return the usage of an answer without generated tokens."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def load(head: Head) -> Headers:
    """Return the load header of the model, for balancers that request it."""
    share = head.cached / head.capacity if head.capacity else 0.0
    metrics = {"num_requests_waiting": float(head.waiting), "kv_cache_usage_perc": share}
    return orca.report(head, metrics, number="%s", encode=lambda told: json.dumps(told).encode())


class Streamed:
    """Common parts of both reply classes: the end of a stream, and the headers of an answer in one piece."""

    request: Request
    _head: Head
    _before: bytes  # the first bytes of a plain chunk, after the first one was built

    def end(self, usage: Usage) -> bytes:
        if not self.request.want.usage:
            return DONE
        return frame(self._wrap([]) | {"usage": final(usage), "system_fingerprint": self._head.fingerprint}) + DONE

    def fail(self, error: ParleyError) -> bytes:
        return failure(error)

    def headers(self, timings: Timings | None) -> Headers:
        return load(self._head) if timings is not None else ()

    def _before_chunk(self) -> bytes:
        if not self._before:  # the model's name is final only after the server has resolved it
            self._before = b"data: " + encode(self._wrap([])).removesuffix(b"]}")
        return self._before

    def _wrap(self, choices: list[Any]) -> dict[str, Any]:
        """Return the envelope with these choices."""
        raise NotImplementedError


class Unbuilt(ParleyError):
    """The call is part of this API, but the server does not support it."""

    status = 501


def error(error: ParleyError) -> Answer:
    """Return an error as a complete answer. Wrong keys and paths are refused by layers without an error object."""
    match error:
        case Unauthorized():
            return Answer(401, b'{"error":"Unauthorized"}')
        case UnknownModel():
            pass
        case NotFound() | Incapable():  # in the original a model has only the routes that it can serve
            return Answer(404, b'{"detail":"Not Found"}')
        case NotAllowed():
            return Answer(405, b'{"detail":"Method Not Allowed"}')
    told = error_object(error)
    return Answer(told["error"]["code"], encode(told))


def failure(error: ParleyError) -> bytes:
    """Return the end of a stream that an error cuts short; like the original with spaces and escaped non-ASCII."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n" + DONE


def error_object(error: ParleyError) -> dict[str, Any]:
    """Return the error object of an answer, with the original's types and sentences."""
    message, field, status = error.message, error.field, error.status
    match error:
        case Malformed() | Missing() | WrongType():
            kind = "Bad Request"
        case UnknownModel():
            kind = "NotFoundError"
            message = f"The model `{error.name[:256]}` does not exist."
            if error.served:
                message += f" Valid aliases: {', '.join(error.served)}."
        case ContextLength():
            kind = "BadRequestError"
            message, field = _overflow(error)
        case Overloaded():
            kind, status, message = "Service Unavailable", 503, BUSY
        case EngineError():
            kind, status = "InternalServerError", 500
        case Unbuilt():
            kind = "NotImplementedError"
        case ParleyError(status=400):
            kind = UNUSABLE if error.code == UNUSABLE else "BadRequestError"
        case ParleyError(status=status) if status >= 500 and status != 503:
            kind = "InternalServerError"
        case _:
            kind = HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _overflow(error: ContextLength) -> tuple[str, str]:
    if error.prompt is None or error.limit is None or error.prompt <= error.limit:
        return f"{error.message} (parameter=input_tokens)", "input_tokens"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your prompt contains at least "
        f"{error.prompt} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of the input prompt. (parameter=input_tokens, value={error.prompt})"
    ), "input_tokens"
