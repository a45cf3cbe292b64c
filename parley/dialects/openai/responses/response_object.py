"""The response object, with its members in the service's order."""

from __future__ import annotations

from typing import Any, Literal

from parley.types import Usage

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
MEMBER_ORDER = (
    "id", "object", "created_at", "status", "background", "completed_at", "conversation", "error", "frequency_penalty",
    "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "model", "output",
    "parallel_tool_calls", "presence_penalty", "previous_response_id", "prompt_cache_key", "prompt_cache_retention",
    "reasoning", "safety_identifier", "service_tier", "store", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "truncation", "usage", "user", "metadata",
)  # fmt: skip
CHANGING_MEMBERS = ("status", "completed_at", "error", "incomplete_details", "output", "usage")


class ResponseObject:
    """A response. ``settings``: the members that the request decides and that do not change."""

    def __init__(self, settings: dict[str, Any]):
        members = settings | dict.fromkeys(CHANGING_MEMBERS)
        self._members = {name: members[name] for name in MEMBER_ORDER if name in members}

    def snapshot(
        self,
        status: ResponseStatus,
        output: list[dict[str, Any]] | None = None,
        *,
        completed_at: int | None = None,
        incomplete_reason: str | None = None,
        usage: Usage | None = None,
    ) -> dict[str, Any]:
        """Return the object in this state."""
        response = self._members | {"status": status, "output": output or []}
        if status not in ("queued", "in_progress"):
            response["completed_at"] = completed_at
            response["incomplete_details"] = None if incomplete_reason is None else {"reason": incomplete_reason}
            response["service_tier"] = "default"
            response["usage"] = None if usage is None else usage_object(usage)
        return response


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a finished response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
