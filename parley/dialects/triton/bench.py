"""How ``parley bench`` requests a stream of tokens from Triton's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import SILENT, Api, Seen, Shape, reason


def body(shape: Shape, text: str) -> dict[str, Any]:
    """Return the body of a streamed request for greedy tokens up to the length; ``text`` is the prompt."""
    return {
        "text_input": text,
        "stream": True,
        "max_tokens": shape.output,
        "temperature": 0,
        "ignore_eos": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_finish_reason": True,
    }


def see(data: bytes) -> Seen:
    """Read one event; its count of output tokens is that of the event alone."""
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    tokens = int(event.get("num_output_tokens") or 0)
    ended = event.get("finish_reason") not in (None, "", "None", "null")
    return Seen(tokens > 0, int(event.get("num_input_tokens") or 0), tokens, last=ended)


APIS = {"triton": Api("/v2/models/{model}/generate_stream", body, see, ids=False)}
