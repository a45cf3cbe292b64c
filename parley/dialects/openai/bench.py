"""How ``parley bench`` requests a token stream from OpenAI's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, error_message


def common_members(shape: LoadShape) -> dict[str, Any]:
    """Return the members that completions and conversations have in common."""
    return {
        "model": shape.model,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def read_openai_event(data: bytes) -> EventSummary:
    """Read one event. Raises ValueError, TypeError or AttributeError if the data is not an event."""
    if data == b"[DONE]":
        return EventSummary(last=True)
    event = json.loads(data)
    if "error" in event:
        return EventSummary(error=error_message(event) or NO_MESSAGE)
    choices = event.get("choices") or []
    has_output = any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices)
    usage = event.get("usage") or {}
    return EventSummary(
        has_output,
        usage.get("prompt_tokens") or 0,
        usage.get("completion_tokens") or 0,
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def completion_bench_body(shape: LoadShape, ids: Any) -> dict[str, Any]:
    """Return the body for a prompt of token ids."""
    return common_members(shape) | {"prompt": ids}


def chat_bench_body(shape: LoadShape, content: Any) -> dict[str, Any]:
    """Return the body for a conversation of one user turn, whose content is a text or a list of parts."""
    return common_members(shape) | {"messages": [{"role": "user", "content": content}]}


def responses_bench_body(shape: LoadShape, content: Any) -> dict[str, Any]:
    """Return the body of a request for a response."""
    members = {"model": shape.model, "max_output_tokens": shape.output_tokens, "temperature": 0, "ignore_eos": True}
    return members | {"stream": True, "input": content}


def read_response_event(data: bytes) -> EventSummary:
    """Read one event of a response. Raises ValueError, TypeError or AttributeError if the data is not an event."""
    if data == b"[DONE]":  # not every server sends it
        return EventSummary(last=True)
    event = json.loads(data)
    match event.get("type"):
        case "response.output_text.delta":
            return EventSummary(output=bool(event.get("delta")))
        case "response.completed" | "response.incomplete":
            usage = event.get("response").get("usage") or {}
            cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
            return EventSummary(False, usage.get("input_tokens") or 0, usage.get("output_tokens") or 0, cached, True)
        case "error" | "response.failed":
            return EventSummary(error=error_message(event.get("response", event)) or NO_MESSAGE)
    return EventSummary()


BENCH_APIS = {
    "openai": BenchApi("/v1/completions", completion_bench_body, read_openai_event),
    "chat": BenchApi(
        "/v1/chat/completions", chat_bench_body, read_openai_event, takes_token_ids=False, messages_member="messages"
    ),
    "responses": BenchApi(
        "/v1/responses", responses_bench_body, read_response_event, takes_token_ids=False, messages_member="input"
    ),
}
