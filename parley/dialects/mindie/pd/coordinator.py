"""The checks that MindIE's coordinator makes on a body before any instance sees it.

Only a strict coordinator of parley makes them, because instances report faults more precisely. Pure: bytes in, an error
text out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.json_body import decode_json

INVALID_FORMAT = "Request format is invalid"
NO_PROMPT = "Invalid request format: Missing both 'prompt' or 'messages'"
TOKEN_DATATYPE = "UINT32"  # the datatype of token tensors


def find_body_fault(path: str, body: bytes) -> str:
    """Return the documented error text, or "" for a valid body. ``path`` is the route's pattern."""
    try:
        members = decode_json(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return INVALID_FORMAT
    if not isinstance(members, dict) or not isinstance(members.get("stream", False), bool):
        return INVALID_FORMAT
    if path.endswith("/completions"):
        if "messages" not in members and "prompt" not in members:
            return NO_PROMPT
        return "" if "messages" in members or isinstance(members["prompt"], str) else INVALID_FORMAT
    return "" if _has_one_prompt(path, members) else INVALID_FORMAT


def _has_one_prompt(path: str, members: dict[str, Any]) -> bool:
    """True if the body has exactly one prompt of a type that the interface accepts."""
    if path.endswith("/infer") and path.startswith("/v2/"):
        tensors = members.get("inputs")
        return isinstance(tensors, list) and any(
            isinstance(tensor, dict) and tensor.get("datatype") == TOKEN_DATATYPE for tensor in tensors
        )
    if path.startswith("/v2/"):
        return isinstance(members.get("text_input"), str)
    if path in ("/infer", "/infer_token"):
        text, tokens = members.get("inputs"), members.get("input_id")
        return (text is None) != (tokens is None) and (text is None or isinstance(text, str))
    return isinstance(members.get("inputs", members.get("prompt")), str)
