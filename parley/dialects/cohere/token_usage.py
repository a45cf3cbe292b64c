"""The tokens of a request, as Cohere's API counts them."""

from __future__ import annotations

from typing import Any

from parley.types import Usage


def cohere_usage(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a request. Those of images are counted apart, and billed as input."""
    image_tokens = usage.media_tokens.get("image", 0)
    tokens = {"input_tokens": usage.prompt_tokens - image_tokens, "output_tokens": usage.completion_tokens}
    return {
        "billed_units": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
        "tokens": tokens | {"image_tokens": image_tokens} if image_tokens else tokens,
        "cached_tokens": usage.cached_tokens,
    }
