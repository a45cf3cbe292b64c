"""The tokens of a message, as Anthropic's API counts them."""

from __future__ import annotations

from typing import Any

from parley.types import Usage


def input_usage(usage: Usage, *, marked: bool) -> dict[str, int]:
    """Return the prompt's tokens in three parts, which clients add up: computed, stored in the cache, found there.

    ``marked``: the request has a ``cache_control``. All that was computed is then stored, because every page is.
    """
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "input_tokens": 0 if marked else computed,
        "cache_creation_input_tokens": computed if marked else 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def message_usage(usage: Usage, ttl: str | None, *, reasons: bool) -> dict[str, Any]:
    """Return the usage of a message. ``ttl``: of its ``cache_control``, None without one; ``reasons``: it may think."""
    return {
        **_cached_usage(usage, ttl),
        **output_usage(usage, reasons=reasons),
        "service_tier": "standard",
        "inference_geo": "not_available",
    }


def divide_iterations(usage: Usage, summary_usage: Usage, ttl: str | None) -> tuple[Usage, dict[str, Any]]:
    """Return the usage of an answer without that of the summary before it, and ``iterations``, which tells both.

    The original bills the sum of all iterations, but its other counts leave those of summaries out.
    """
    answer_usage = Usage(
        prompt_tokens=usage.prompt_tokens - summary_usage.prompt_tokens,
        completion_tokens=usage.completion_tokens - summary_usage.completion_tokens,
        cached_tokens=usage.cached_tokens - summary_usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens - summary_usage.reasoning_tokens,
    )
    iterations = [
        {"type": kind, **_cached_usage(counts, ttl), "output_tokens": counts.completion_tokens}
        for kind, counts in (("compaction", summary_usage), ("message", answer_usage))
    ]
    return answer_usage, {"iterations": iterations}


def _cached_usage(usage: Usage, ttl: str | None) -> dict[str, Any]:
    """Return the prompt's tokens, with those stored in the cache by their lifetime."""
    counts = input_usage(usage, marked=ttl is not None)
    created_tokens = counts["cache_creation_input_tokens"]
    return {
        **counts,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created_tokens if ttl == "5m" else 0,
            "ephemeral_1h_input_tokens": created_tokens if ttl == "1h" else 0,
        },
    }


def output_usage(usage: Usage, *, reasons: bool) -> dict[str, Any]:
    """Return the answer's tokens, and how many of them are thinking if it may think."""
    counts: dict[str, Any] = {"output_tokens": usage.completion_tokens}
    return counts | {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if reasons else counts
