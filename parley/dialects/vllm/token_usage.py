"""The tokens of a request, as vLLM's API counts them."""

from __future__ import annotations

from typing import Any

from parley.dialects.request_context import RequestContext
from parley.types import Usage


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


def vllm_final_usage(total: Usage, created: int | None = None) -> dict[str, Any]:
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
