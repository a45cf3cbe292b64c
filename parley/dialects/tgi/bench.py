"""How TGI's API is asked for a stream of tokens, and what its events say, for ``parley bench``."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects.bench import SILENT, Api, Seen, Shape, reason


def body(shape: Shape, text: str) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": shape.output, "details": True}}


def see(data: bytes) -> Seen:
    event = json.loads(data)
    if "error" in event:
        return Seen(error=reason(event) or SILENT)
    details = event.get("details") or {}
    last = event["generated_text"] is not None if "generated_text" in event else False
    read = details.get("input_length") or details.get("prompt_tokens") or 0  # as MindIE calls it
    return Seen(True, read, details.get("generated_tokens") or 0, last=last)


APIS = {"tgi": Api("/generate_stream", body, see, ids=False)}
