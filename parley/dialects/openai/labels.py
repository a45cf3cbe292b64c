"""Members that only OpenAI's own service acts on. Here they have no effect, but their values are checked."""

from __future__ import annotations

from typing import Any

from parley.dialects.fields import Fields

MAX_LABEL = 512  # characters of a label that is only shown again
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
VERBOSITIES = ("low", "medium", "high")


def read_labels(body: Fields) -> dict[str, Any]:
    """Return the members without effect that chat completions and Responses have in common. Raises BadRequest."""
    body.object("prompt_cache_options")
    return {
        "prompt_cache_key": body.string("prompt_cache_key", None, cap=MAX_LABEL),
        "prompt_cache_retention": body.string(
            "prompt_cache_retention", None, allowed=("in_memory", "in-memory", "24h")
        ),
        "safety_identifier": body.string("safety_identifier", None, cap=MAX_LABEL),
        "service_tier": body.string("service_tier", "auto", allowed=SERVICE_TIERS),
        "user": body.string("user", None, cap=MAX_LABEL),
    }
