"""Parts of TGI's answers: events of a stream, finish reasons, and headers."""

from __future__ import annotations

from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import HeaderList, RequestTimings
from parley.dialects.tgi.api_rules import STRICT_TGI_RULES, TgiRules
from parley.types import ChoiceDone

TGI_FIELD_NAMES = {  # neutral names of fields in the server's errors, and the names here
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "n": "best_of",
    "top_logprobs": "top_n_tokens",
    "prompt_logprobs": "decoder_input_details",
}


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


def tgi_event(event: Any, rules: TgiRules = STRICT_TGI_RULES) -> bytes:
    """Encode one event of a stream."""
    return rules.line_prefix + encode_json(event) + b"\n\n"
