"""What others say in JSON, taken as it may come: whatever is not of the type that it should be counts as not said."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import msgspec

MOST = sys.float_info.max


def members(body: bytes) -> dict[str, Any] | None:
    """The object in a body, None if it is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None


def amount(value: Any) -> TypeGuard[int | float]:
    """Is it a number from 0 on that a double holds? JSON's may have hundreds of digits."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def count(value: Any) -> TypeGuard[int]:
    """Is it a whole number from 0 on, of 64 bits?"""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
