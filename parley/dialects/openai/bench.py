"""How ``parley bench`` requests a token stream from OpenAI's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import SILENT, Api, Seen, Shape, reason


def body(shape: Shape) -> dict[str, Any]:
    """Return the members that completions and conversations have in common."""
    return {
        "model": shape.model,
        "max_tokens": shape.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def see(data: bytes) -> Seen:
    """Read one event. Raises ValueError, TypeError or AttributeError if the data is not an event."""
    if data == b"[DONE]":
        return Seen(last=True)
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    choices = event.get("choices") or []
    said = any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)
    usage = event.get("usage") or {}
    return Seen(
        said,
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or 0,
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def completion(shape: Shape, ids: Any) -> dict[str, Any]:
    """Return the body for a prompt of token ids."""
    return body(shape) | {"prompt": ids}


def conversation(shape: Shape, text: str) -> dict[str, Any]:
    """Return the body for a conversation of one user turn."""
    return body(shape) | {"messages": [{"role": "user", "content": text}]}


APIS = {
    "openai": Api("/v1/completions", completion, see),
    "chat": Api("/v1/chat/completions", conversation, see, ids=False, talks=True),
}
