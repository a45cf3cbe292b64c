"""Tolerant reading of other servers' JSON: values of an unexpected type are treated as absent."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import msgspec

from parley.dialects.json_body import decode_json

MAX_DOUBLE = sys.float_info.max


def parse_object(body: bytes) -> dict[str, Any] | None:
    """Parse a body as a JSON object; None if it is none."""
    try:
        value = decode_json(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def is_amount(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a number of at least 0 that fits a double. JSON numbers may have hundreds of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_DOUBLE


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number of at least 0 that fits 64 bits, unsigned."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
