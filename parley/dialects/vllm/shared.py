"""Common parts of vLLM's routes: its version, envelopes, usage and error objects."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import msgspec

from parley.dialects import orca
from parley.dialects.dialect import Answer, ApiOptions, HeaderList, Reply, RequestContext, RequestTimings
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.timings import metrics_member
from parley.dialects.vllm.media_wording import media_error_members
from parley.dialects.vllm.refusal_wording import unknown_ids_sentence, unknown_token_sentence
from parley.errors import (
    BadMedia,
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
    UnknownRecord,
    UnknownToken,
    UnknownTokenIds,
    WrongType,
)
from parley.types import ChoiceDelta, ChoiceDone, OutputOptions, Request, Usage

VLLM_VERSION = "0.33.0"  # the version of the original whose API this is; clients use it to detect features
STREAM_DONE = b"data: [DONE]\n\n"
BUSY_SENTENCE = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)

ADAPTER_ERROR_TYPE = "InvalidUserInput"  # the error type of a wrong adapter request
STORE_ERROR_TYPE = "invalid_request_error"  # the error type of a wrong use of stored responses

# The coordinator's refusal when it has no memory for a body.
NO_MEMORY_BODY = b'{"error":"Memory limit exceeded","error_type":"overloaded"}'


def vllm_frame(chunk: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + encode_json(chunk) + b"\n\n"


def vllm_envelope(
    answer_id: str, object_name: str, context: RequestContext, request: Request, choices: list[Any]
) -> dict[str, Any]:
    """Return the common first members of every answer and chunk."""
    return {
        "id": answer_id,
        "object": object_name,
        "created": context.created,
        "model": request.model,
        "choices": choices,
    }


def vllm_call_id(call_id: str | None) -> str:
    """Return the id of a call in vLLM's form, from the part that distinguishes calls here."""
    return f"chatcmpl-tool-{(call_id or '')[-16:]}"


def attach_done(pieces: list[tuple[ChoiceDelta | None, ChoiceDone | None]], done: ChoiceDone) -> None:
    """Attach the end of a choice to its last text, if that is among the pieces; not to the last piece of a call."""
    for place in range(len(pieces) - 1, -1, -1):
        delta, _ = pieces[place]
        if delta is not None and delta.index == done.index:
            if delta.output_part != "tool":
                pieces[place] = (delta, done)
                return
            break
    pieces.append((None, done))


def with_prompt_logprobs(options: OutputOptions) -> OutputOptions:
    """Return the options with log-probabilities of the prompt: as many alternatives as for the output."""
    return msgspec.structs.replace(options, prompt_logprobs=options.logprobs or 0)


def vllm_usage(total: Usage, created: int | None = None) -> dict[str, Any]:
    """Return the usage of an answer, with null for absent values. ``created``: tokens of the prompt in new pages of the
    prefix cache; None where the original does not count them."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "completion_tokens": total.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": total.cached_tokens,
            "created_cache_tokens": created,
            "multimodal_tokens": total.media_tokens or None,
        },
        "completion_tokens_details": {"reasoning_tokens": total.reasoning_tokens} if total.reasoning_tokens else None,
    }


def created_cache_tokens(total: Usage, context: RequestContext) -> int:
    """Return how many tokens of the prompt are in pages of the prefix cache that were computed for it."""
    page = context.page_tokens
    return max(0, total.prompt_tokens // page * page - total.cached_tokens) if page else 0


def final_usage(total: Usage, created: int | None = None) -> dict[str, Any]:
    """Return the usage at the end of a stream, without nulls. ``created``: as in ``vllm_usage``."""
    members = vllm_usage(total, created)
    details = members["prompt_tokens_details"]
    members["prompt_tokens_details"] = {name: value for name, value in details.items() if value is not None}
    return {name: value for name, value in members.items() if value is not None}


def vllm_running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the usage in the middle of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "completion_tokens_details": None,
    }


def embedding_usage(total: Usage) -> dict[str, Any]:
    """Return the usage of an answer without generated tokens."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def load_header(context: RequestContext) -> HeaderList:
    """Return the load header of the model, for balancers that request it."""
    share = context.cached_tokens / context.cache_capacity if context.cache_capacity else 0.0
    metrics = {"num_requests_waiting": float(context.waiting_sequences), "kv_cache_usage_perc": share}
    return orca.orca_header(
        context, metrics, number_format="%s", encode=lambda metric_map: json.dumps(metric_map).encode()
    )


class VllmStreamMixin(Reply):
    """Common parts of both reply classes: the end of a stream, and the headers of an answer in one piece."""

    _context: RequestContext
    _options: ApiOptions
    _chunk_start: bytes  # the first bytes of a plain chunk, after the first one was built

    def finish_stream(self, usage: Usage) -> bytes:
        """Return the usage chunk, if requested, and the ``[DONE]`` mark."""
        if not self.request.output_options.usage:
            return STREAM_DONE
        last_members = {
            "usage": final_usage(usage, self.created_tokens(usage)),
            "system_fingerprint": self._context.fingerprint,
        }
        for name, metrics in metrics_member(self, self._options, usage).items():
            last_members[name] = {key: value for key, value in metrics.items() if value is not None}
        return vllm_frame(self._chunk_envelope([]) | last_members) + STREAM_DONE

    def fail_stream(self, error: ParleyError) -> bytes:
        """Return vLLM's error event and the ``[DONE]`` mark."""
        return vllm_failed_stream_end(error)

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the load header of an answer in one piece, if the client asks for it; none for a stream."""
        return load_header(self._context) if timings is not None else ()

    def created_tokens(self, usage: Usage) -> int | None:
        """Return how many tokens of the prompt are in new pages of the prefix cache, None if the usage lacks that."""
        return None

    def _start_of_chunk(self) -> bytes:
        if not self._chunk_start:  # the model's name is final only after the server has resolved it
            self._chunk_start = b"data: " + encode_json(self._chunk_envelope([])).removesuffix(b"]}")
        return self._chunk_start

    def _chunk_envelope(self, choices: list[Any]) -> dict[str, Any]:
        """Return the envelope with these choices."""
        raise NotImplementedError


class UnsupportedCall(ParleyError):
    """The call is part of this API, but the server does not support it."""

    status = 501


def vllm_error(error: ParleyError) -> Answer:
    """Return an error as a complete answer. Wrong keys and paths are refused by layers without an error object."""
    match error:
        case Unauthorized():
            return Answer(401, b'{"error":"Unauthorized"}')
        case UnknownModel() | UnknownRecord():
            pass
        case NotFound() | Incapable():  # in the original a model has only the routes that it can serve
            return Answer(404, b'{"detail":"Not Found"}')
        case NotAllowed():
            return Answer(405, b'{"detail":"Method Not Allowed"}')
    body = vllm_error_object(error)
    return Answer(body["error"]["code"], encode_json(body))


def vllm_failed_stream_end(error: ParleyError) -> bytes:
    """Return the end of a stream that an error cuts short; like the original with spaces and escaped non-ASCII."""
    return b"data: " + json.dumps(vllm_error_object(error)).encode() + b"\n\n" + STREAM_DONE


def vllm_error_object(error: ParleyError) -> dict[str, Any]:
    """Return the error object of an answer, with the original's types and sentences."""
    message, field, status = error.message, error.field, error.status
    match error:
        case BadMedia():
            status, error_type, message = media_error_members(error)
        case Malformed() | Missing() | WrongType():
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
        case UnknownToken(token_id=int() as token_id):
            error_type, message, field = "BadRequestError", unknown_token_sentence(token_id), None
        case UnknownTokenIds():
            error_type, message = (
                "BadRequestError",
                unknown_ids_sentence(field or "", error.token_ids, error.vocabulary),
            )
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
