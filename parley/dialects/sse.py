"""Server-sent events, in which most APIs write their streams: a line ``data:`` with JSON, or ``event:`` before it."""

from __future__ import annotations

from typing import Any

from parley.dialects.json_answer import encode_json

STREAM_DONE = b"data: [DONE]\n\n"  # the last event of a stream in OpenAI's form


def data_event(value: Any) -> bytes:
    """Return an event without a name."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """Return an event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))
