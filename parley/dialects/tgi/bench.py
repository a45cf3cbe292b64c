"""How ``parley bench`` requests a stream of tokens from TGI's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, error_message


def tgi_stream_body(shape: LoadShape, text: str) -> dict[str, Any]:
    """Return the body of a streamed request; ``text`` is the prompt."""
    return {"inputs": text, "parameters": {"max_new_tokens": shape.output_tokens, "details": True}}


def read_tgi_event(data: bytes) -> EventSummary:
    """Read one event. Token counts come only in the last one."""
    event = json.loads(data)
    if "error" in event:
        return EventSummary(error=error_message(event) or NO_MESSAGE)
    details = event.get("details") or {}
    last = event["generated_text"] is not None if "generated_text" in event else False
    prompt_tokens = details.get("input_length") or details.get("prompt_tokens") or 0  # MindIE's name for it
    return EventSummary(True, prompt_tokens, details.get("generated_tokens") or 0, last=last)


APIS = {"tgi": BenchApi("/generate_stream", tgi_stream_body, read_tgi_event, takes_token_ids=False)}
