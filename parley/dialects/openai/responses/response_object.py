"""The response object, with its members in the service's order."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.types import Usage

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
MEMBER_ORDER = (
    "id", "object", "created_at", "status", "background", "completed_at", "conversation", "error", "frequency_penalty",
    "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "model", "output",
    "parallel_tool_calls", "presence_penalty", "previous_response_id", "prompt_cache_key", "prompt_cache_retention",
    "reasoning", "safety_identifier", "service_tier", "store", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "truncation", "usage", "user", "metadata",
)  # fmt: skip


class ResponseObject(msgspec.Struct, frozen=True):
    """A response. ``settings``: the members that the request decides and that do not change."""

    settings: dict[str, Any]

    def snapshot(
        self,
        status: ResponseStatus,
        output: list[dict[str, Any]] | None = None,
        *,
        completed_at: int | None = None,
        error: dict[str, str] | None = None,
        incomplete_reason: str | None = None,
        usage: Usage | None = None,
    ) -> dict[str, Any]:
        """Return the object in this state."""
        is_open = status in ("queued", "in_progress")
        members = self.settings | {
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
            "output": output or [],
            "service_tier": self.settings["service_tier"] if is_open else "default",
            "usage": None if usage is None else usage_object(usage),
        }
        return {name: members[name] for name in MEMBER_ORDER if name in members}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a finished response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
