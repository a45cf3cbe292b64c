"""How ``parley bench`` requests a stream of tokens from TGI's API and reads its events."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import SILENT, Api, Seen, Shape, reason


def body(shape: Shape, text: str) -> dict[str, Any]:
    """Return the body of a streamed request; ``text`` is the prompt."""
    return {"inputs": text, "parameters": {"max_new_tokens": shape.output, "details": True}}


def see(data: bytes) -> Seen:
    """Read one event. Token counts come only in the last one."""
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    details = event.get("details") or {}
    last = event["generated_text"] is not None if "generated_text" in event else False
    read = details.get("input_length") or details.get("prompt_tokens") or 0  # MindIE's name for it
    return Seen(True, read, details.get("generated_tokens") or 0, last=last)


APIS = {"tgi": Api("/generate_stream", body, see, ids=False)}
