"""How ``parley bench`` requests a token stream from Cohere's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, error_message


def build_chat(shape: LoadShape, content: Any) -> dict[str, Any]:
    """Return the body for a conversation of one user turn."""
    return {
        "model": shape.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "p": 1,
        "ignore_eos": True,
        "stream": True,
    }


def read_chat_event(data: bytes) -> EventSummary:
    """Read one event. Raises ValueError, TypeError or AttributeError if the data is not an event."""
    if data == b"[DONE]":
        return EventSummary(last=True)
    event = json.loads(data)
    match event.get("type"):
        case "content-delta":
            content = event.get("delta", {}).get("message", {}).get("content", {})
            return EventSummary(output=bool(content.get("text") or content.get("thinking")))
        case "message-end":
            delta = event["delta"]
            if "error" in delta:
                return EventSummary(error=delta["error"] or NO_MESSAGE)
            usage = delta["usage"]
            tokens, cached = usage["tokens"], usage.get("cached_tokens") or 0
            return EventSummary(False, tokens["input_tokens"], tokens["output_tokens"], cached)
        case None:
            return EventSummary(error=error_message(event) or NO_MESSAGE)
    return EventSummary()


BENCH_APIS = {
    "cohere": BenchApi("/v2/chat", build_chat, read_chat_event, takes_token_ids=False, messages_member="messages")
}
