"""How ``parley bench`` requests a stream of tokens from Triton's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import NO_MESSAGE, BenchApi, EventSummary, LoadShape, error_message


def triton_stream_body(shape: LoadShape, text: str) -> dict[str, Any]:
    """Return the body of a streamed request for greedy tokens up to the length; ``text`` is the prompt."""
    return {
        "text_input": text,
        "stream": True,
        "max_tokens": shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
    }


def read_triton_event(data: bytes) -> EventSummary:
    """Read one event; its count of output tokens is that of the event alone."""
    event = json.loads(data)
    if "error" in event:
        return EventSummary(error=error_message(event) or NO_MESSAGE)
    tokens = int(event.get("num_output_tokens") or 0)
    is_last = event.get("finish_reason") not in (None, "", "None", "null")
    return EventSummary(tokens > 0, int(event.get("num_input_tokens") or 0), tokens, last=is_last)


APIS = {
    "triton": BenchApi(
        "/v2/models/{model}/generate_stream", triton_stream_body, read_triton_event, takes_token_ids=False
    )
}
