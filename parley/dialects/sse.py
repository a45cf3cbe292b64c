"""Server-sent events, the form of most APIs' streams: a line ``data:`` with JSON, in some APIs after a line
``event:``."""

from __future__ import annotations

from typing import Any

from parley.dialects.json_answer import encode_json

DATA_START, EVENT_END = b"data: ", b"\n\n"
STREAM_END = b"[DONE]"  # the data of the last event of a stream in OpenAI's form
STREAM_DONE = DATA_START + STREAM_END + EVENT_END


def data_event(value: Any) -> bytes:
    """Return an event without a name."""
    return encoded_event(encode_json(value))


def encoded_event(data: bytes) -> bytes:
    """Return an event without a name. ``data``: JSON in one line."""
    return DATA_START + data + EVENT_END


def choice_event_start(envelope: dict[str, Any]) -> bytes:
    """Return the start of an event, up to its first choice. ``envelope``: its value, whose last member is an empty list
    of choices."""
    return DATA_START + encode_json(envelope).removesuffix(b"]}")


def named_event(name: str, value: Any) -> bytes:
    """Return an event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete events in a part of a stream, without their ends, and the beginning of the next event."""
    *events, tail = data.split(EVENT_END)
    return events, tail


def read_event_data(event: bytes) -> bytes:
    """Return the data of an event, with or without a name; b"" for a comment."""
    return event.partition(DATA_START)[2]
