"""Shared by the TGI routes: limits, the layers of errors, numbers and stream frames.

Clients distinguish the layers, so they are kept. Errors that the original's web framework would raise (invalid JSON, a
wrong type, a missing field) are plain text; errors of its validation are JSON with ``error`` and ``error_type``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parley.dialects import error_wording
from parley.dialects.dialect import Answer, HeaderList, RequestTimings
from parley.dialects.json_answer import encode_json
from parley.dialects.tgi.images import media_sentence
from parley.errors import (
    BadMedia,
    BadRequest,
    ContextLength,
    EngineError,
    Invalid,
    Malformed,
    Missing,
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
    excerpt,
)
from parley.types import ChoiceDone

U32 = 2**32 - 1
U64 = 2**64 - 1
I32 = 2**31 - 1
F32 = 3.4028234663852886e38

TGI_VERSION = "3.3.7"  # version of the original that this API follows; clients infer the supported members from it
TGI_FIELD_NAMES = {  # neutral names of fields in the server's errors, and the names here
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "n": "best_of",
    "top_logprobs": "top_n_tokens",
    "prompt_logprobs": "decoder_input_details",
}
PLAIN_TEXT = b"text/plain; charset=utf-8"
INCOMPLETE = "incomplete_generation"  # a type that clients know; inside a stream it has another name
NOT_JSON_MESSAGE = b"Expected request with `Content-Type: application/json`"
# A coordinator's answer if it has no memory for a body.
NO_MEMORY = b'{"error":"Memory limit exceeded","error_type":"overloaded"}'


@dataclass(frozen=True, slots=True)
class TgiRules:
    """The limits the original is started with, and whether its ``strict`` readings apply.

    Strict: an error of a stream is reported inside it, with status 200. Otherwise: temperature 0 is greedy; a top_p,
    typical_p or top_k that keeps every token is off; ``stop`` may be a single string; 5.0 is an integer; null means the
    default for every member.
    """

    strict: bool
    max_best_of: int
    max_stops: int
    max_top: int  # top alternatives per token
    max_prompts: int  # per completion
    max_body: int | None = None  # bytes
    old: bool = False  # like version 0.9.4: its defaults and framing, fewer members and headers

    @property
    def line_prefix(self) -> bytes:
        """The start of each line of a stream."""
        return b"data:" if self.old else b"data: "

    @property
    def wording(self) -> TgiErrorWording:
        """The wording of refusals of a body's members."""
        return STRICT_TGI_WORDING if self.strict else TGI_WORDING


STRICT = TgiRules(strict=True, max_best_of=2, max_stops=4, max_top=5, max_prompts=4, max_body=2_000_000)
OLD = TgiRules(strict=True, max_best_of=2, max_stops=4, max_top=0, max_prompts=1, max_body=2 << 20, old=True)
EXTENDED = TgiRules(strict=False, max_best_of=128, max_stops=1024, max_top=20, max_prompts=128)

RUST_TYPES = {
    "max_new_tokens": "u32",
    "max_tokens": "u32",
    "max_completion_tokens": "u32",
    "top_logprobs": "u32",
    "n": "u32",
    "top_n_tokens": "u32",
    "best_of": "usize",
    "truncate": "usize",
    "dimensions": "usize",
    "seed": "u64",
    "top_k": "i32",
    "a number": "f32",
    "an array": "a sequence",
    "a string or an array of strings": "a sequence",
    "an object": "a map",
}


class TgiErrorWording(error_wording.ErrorWording):
    """Refusals worded like the original's JSON reader (serde), but without its line and column."""

    def __init__(self, *, whole_floats: bool = True):
        self.whole_floats = whole_floats

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        where, _, name = path.rpartition(".")
        return Missing(f"{where + ': ' if where else ''}missing field `{name}`", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        name = path.rpartition(".")[2]
        expected_type = (
            RUST_TYPES.get(name, "an integer") if expected == "an integer" else RUST_TYPES.get(expected, expected)
        )
        return WrongType(f"{path}: invalid type: {_describe_json_value(value)}, expected {expected_type}", field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        expected_type = RUST_TYPES.get(path.rpartition(".")[2], "f32")
        return WrongType(f"{path}: invalid value: {_describe_json_value(value)}, expected {expected_type}", field=path)

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        allowed_names = ", ".join(f"`{name}`" for name in allowed)
        return WrongType(f"{path}: unknown variant `{str(value)[:60]}`, expected one of {allowed_names}", field=path)

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty string or array."""
        name = "inputs" if path == "messages" else path  # the prompt that no messages make
        return Invalid(f"`{name}` cannot be empty", field=path)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a string, array or object that is too long."""
        return Invalid(f"`{path}` is too long: {size}, where at most {cap} are allowed", field=path)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return Invalid(f"`{path}` {reason}", field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is not a JSON object."""
        return WrongType(f"invalid type: {_describe_json_value(value)}, expected a map")


TGI_WORDING = TgiErrorWording()
STRICT_TGI_WORDING = TgiErrorWording(whole_floats=False)


def _describe_json_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{excerpt(value)}`"
        case float():
            return f"floating point `{value!r}`"
        case str():
            return f"string {encode_json(value[:60]).decode()}"
        case list():
            return "sequence"
        case _:
            return "map"


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
        case Malformed():
            return Answer(400, f"Failed to parse the request body as JSON: {error.message}".encode(), PLAIN_TEXT)
        case Missing() | WrongType():
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


def error_as_stream(error: ParleyError, rules: TgiRules = STRICT) -> Answer:
    """Return an error as a whole stream, as the original does if one occurs before the first event."""
    return Answer(200, tgi_failure_frame(error, rules), b"text/event-stream")


def tgi_failure_frame(error: ParleyError, rules: TgiRules = STRICT) -> bytes:
    """Return the event that ends a stream after an error."""
    error_body = tgi_error_object(error, rules)
    if error_body["error_type"] == INCOMPLETE and rules.strict and not rules.old:
        error_body = {"error": "Incomplete generation stream", "error_type": f"{INCOMPLETE}_stream"}
    return tgi_frame(error_body, rules)


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
        return media_sentence(error)
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


def tgi_finish_reason(done: ChoiceDone, limit: int | None) -> str:
    """Return the finish reason. Length wins: it is reported even if the last allowed token would also have ended."""
    if done.reason not in ("stop", "tool") or done.usage.completion_tokens == limit:
        return "length"
    return "eos_token" if done.stop is None else "stop_sequence"


def tgi_answer_headers(
    rules: TgiRules, device: str, characters: int, timings: RequestTimings | None, prompt: int, generated: int
) -> HeaderList:
    """Return an answer's headers. ``timings`` is None for streams; ``prompt`` and ``generated`` count tokens."""
    compute_type = [(b"x-compute-type", f"{device}+optimized".encode())]
    size = [(b"x-compute-characters", b"%d" % characters)]
    if timings is None:
        return compute_type + size
    timing_headers = [
        *compute_type,
        (b"x-compute-time", whole_milliseconds(timings.total) if rules.old else f"{timings.total:.9f}".encode()),
        *size,
        (b"x-total-time", whole_milliseconds(timings.total)),
        (b"x-validation-time", whole_milliseconds(timings.validation)),
        (b"x-queue-time", whole_milliseconds(timings.queue)),
        (b"x-inference-time", whole_milliseconds(timings.inference)),
        (b"x-time-per-token", whole_milliseconds(timings.inference / max(1, generated))),
    ]
    counts = [(b"x-prompt-tokens", b"%d" % prompt), (b"x-generated-tokens", b"%d" % generated)]
    return timing_headers if rules.old else timing_headers + counts


def whole_milliseconds(seconds: float) -> bytes:
    """Return a time in milliseconds, rounded down, as headers have it."""
    return b"%d" % (seconds * 1000)


def tgi_frame(event: Any, rules: TgiRules = STRICT) -> bytes:
    """Encode one event of a stream."""
    return rules.line_prefix + encode_json(event) + b"\n\n"
