"""The checks that MindIE's coordinator makes on a body before any instance sees it.

Only a strict coordinator of parley makes them, because instances report faults more precisely. Pure: bytes in, an error
text out.
"""

from __future__ import annotations

from typing import Any

import msgspec

FORMAT = "Request format is invalid"
NEITHER = "Invalid request format: Missing both 'prompt' or 'messages'"
LEAST = "UINT32"  # the datatype of token tensors


def body_fault(path: str, body: bytes) -> str:
    """Return the documented error text, or "" for a valid body. ``path`` is the route's pattern."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return FORMAT
    if not isinstance(said, dict) or not isinstance(said.get("stream", False), bool):
        return FORMAT
    if path.endswith("/completions"):
        if "messages" not in said and "prompt" not in said:
            return NEITHER
        return "" if "messages" in said or isinstance(said["prompt"], str) else FORMAT
    return "" if _input(path, said) else FORMAT


def _input(path: str, said: dict[str, Any]) -> bool:
    """True if the body has exactly one prompt of a type that the interface accepts."""
    if path.endswith("/infer") and path.startswith("/v2/"):
        tensors = said.get("inputs")
        return isinstance(tensors, list) and any(
            isinstance(each, dict) and each.get("datatype") == LEAST for each in tensors
        )
    if path.startswith("/v2/"):
        return isinstance(said.get("text_input"), str)
    if path in ("/infer", "/infer_token"):
        text, tokens = said.get("inputs"), said.get("input_id")
        return (text is None) != (tokens is None) and (text is None or isinstance(text, str))
    return isinstance(said.get("inputs", said.get("prompt")), str)
