"""JSON, times and durations as Go writes them."""

from __future__ import annotations

import re
import time
from typing import Any

from parley.dialects.json_answer import encode_json
from parley.dialects.reply import Answer

JSON_TYPE = b"application/json; charset=utf-8"
GO_ESCAPED = re.compile(rb"[<>&]|\xe2\x80[\xa8\xa9]")  # Go's encoder escapes these, for HTML and JavaScript


def encode_go(value: Any) -> bytes:
    """Return a value in JSON, with the escapes of Go's encoder."""
    return GO_ESCAPED.sub(_escape_for_go, encode_json(value))


def _escape_for_go(match: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(match[0].decode())


def go_answer(value: Any, status: int = 200) -> Answer:
    """Return a value as a whole answer."""
    return Answer(status, encode_go(value), JSON_TYPE)


def go_time(seconds: float) -> str:
    """Return a time in whole seconds since the epoch, as Go writes it.

    Clients such as OllamaKit demand a fraction, which times of the original practically always have, and Go leaves out
    zeros at the end: so it is a nanosecond.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000001Z", time.gmtime(seconds))


def duration_nanoseconds(seconds: float | None) -> int:
    """Return a duration as the API has it; at least 1, because clients divide by it."""
    return max(1, round((seconds or 0.0) * 1e9))
