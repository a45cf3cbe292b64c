"""Vectors as answers hold them: as numbers, as base64, as bytes. They come as float32 in little endian."""

from __future__ import annotations

import base64
import struct
import sys
from array import array


def numbers(values: bytes) -> list[float]:
    """Each number as it is, which in decimal takes more digits than its 24 bits would need."""
    vector = array("f", values)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tolist()


def text(values: bytes) -> str:
    """In base64."""
    return base64.b64encode(values).decode()


def form(values: bytes, dtype: str, *, big: bool = False) -> bytes:
    """As float32, float16 or bfloat16, rounded to the nearest; what float16 cannot hold is infinite."""
    order = ">" if big else "<"
    vector = numbers(values)
    if dtype == "float16":
        return struct.pack(f"{order}{len(vector)}e", *map(_half, vector))
    if dtype == "bfloat16":
        words = struct.unpack(f"<{len(vector)}I", values)
        return struct.pack(f"{order}{len(words)}H", *((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words))
    return struct.pack(f"{order}{len(vector)}f", *vector) if big else values


def _half(number: float) -> float:
    return number if abs(number) < 65520 else float("inf") if number > 0 else float("-inf")
