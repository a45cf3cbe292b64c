"""The member ``metrics`` of an answer: the times of its phases, in the form of vLLM's
``--enable-per-request-metrics``.
"""

from __future__ import annotations

from typing import Any

from parley.dialects.reply import Reply, RequestTimings
from parley.dialects.request_context import ApiOptions
from parley.types import Usage


def metrics_member(reply: Reply, options: ApiOptions, usage: Usage) -> dict[str, Any]:
    """Return the member, or nothing if it is not wanted. As in vLLM, an answer with several choices has none."""
    if not options.per_request_metrics or reply.timings is None:
        return {}
    if reply.request.n * len(reply.request.prompts) != 1:
        return {}
    return {"metrics": _metrics_object(reply.timings, usage.completion_tokens)}


def _metrics_object(timings: RequestTimings, tokens: int) -> dict[str, float | None]:
    """Return times in milliseconds, null for those of tokens that do not exist, and the rate of all tokens."""
    prefill, decode = timings.prefill, timings.decode
    generation_time = None if decode is None else 1000 * decode
    inference = (prefill or 0.0) + (decode or 0.0)
    return {
        "time_to_first_token_ms": None if prefill is None else 1000 * prefill,
        "generation_time_ms": generation_time,
        "queue_time_ms": 1000 * timings.queue,
        "mean_itl_ms": None if generation_time is None or tokens < 2 else generation_time / (tokens - 1),
        "tokens_per_second": tokens / inference if inference else None,
        "speculative_decoding": None,
    }
