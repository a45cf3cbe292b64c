"""How ``parley bench`` requests a token stream from Anthropic's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, error_message


def build_message(shape: LoadShape, content: Any) -> dict[str, Any]:
    """Return the body for a conversation of one user turn."""
    return {
        "model": shape.model,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "messages": [{"role": "user", "content": content}],
    }


def read_message_event(data: bytes) -> EventSummary:
    """Read one event. Raises ValueError, TypeError or AttributeError if the data is not an event."""
    event = json.loads(data)
    match event.get("type"):
        case "error":
            return EventSummary(error=error_message(event) or NO_MESSAGE)
        case "content_block_delta":
            return EventSummary(output=bool(event["delta"].get("text")))
        case "message_delta":
            usage = event["usage"]
            cached = usage.get("cache_read_input_tokens") or 0  # not every server counts them
            return EventSummary(False, (usage.get("input_tokens") or 0) + cached, usage["output_tokens"], cached)
    return EventSummary(last=event.get("type") == "message_stop")


BENCH_APIS = {
    "messages": BenchApi(
        "/v1/messages", build_message, read_message_event, takes_token_ids=False, messages_member="messages"
    )
}
