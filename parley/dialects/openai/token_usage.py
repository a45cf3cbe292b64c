"""The tokens of a request, as OpenAI's API counts them."""

from __future__ import annotations

from typing import Any

from parley.types import Usage


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return a usage object without details, as chunks in the middle of a stream have it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def openai_usage(total: Usage) -> dict[str, Any]:
    """Return the usage object of a finished request."""
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "total_tokens": total.prompt_tokens + total.completion_tokens,
        "prompt_tokens_details": _prompt_details(total),
        "completion_tokens_details": {
            "reasoning_tokens": total.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": total.accepted_tokens,
            "rejected_prediction_tokens": total.rejected_tokens,
        },
    }


def _prompt_details(total: Usage) -> dict[str, int]:
    """Return the prompt tokens by kind, where there are media. Those of a video count as those of images."""
    audio = total.media_tokens.get("audio", 0)
    details = {"cached_tokens": total.cached_tokens, "audio_tokens": audio}
    if not total.media_tokens:
        return details
    images = total.media_tokens.get("image", 0) + total.media_tokens.get("video", 0)
    return details | {"image_tokens": images, "text_tokens": total.prompt_tokens - audio - images}
