"""Encodings of embedding vectors in answers: numbers, base64, bytes. The input is float32, little endian, or pairs of a
token's id and its weight for sparse vectors."""

from __future__ import annotations

import base64
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from math import ldexp
from operator import mul

from parley.types import PromptVector

TOKENS_AT_ONCE = 256  # of one text that are compared with all tokens of another


def _code_magnitudes(mantissa: int, bias: int, last: int) -> list[float]:
    """Return the absolute values of the codes 0 .. ``last`` of an 8-bit float; the last may stand for infinity."""
    parts = 1 << mantissa
    return [
        ldexp(code % parts + (parts if code >= parts else 0), max(1, code // parts) - bias - mantissa)
        for code in range(last + 1)
    ]


MAX_FLOAT32 = 3.4028234663852886e38
FLOAT8 = {"fp8_e4m3": _code_magnitudes(3, 7, 126), "fp8_e5m2": _code_magnitudes(2, 15, 124)}


def vector_numbers(values: bytes) -> list[float]:
    """Return the exact value of each number. In decimal this takes more digits than 24 bits of precision need."""
    vector = array("f", values)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tolist()


def vector_rows(values: bytes, rows: int) -> list[list[float]]:
    """Return the numbers of several vectors of the same length."""
    size = len(values) // rows
    return [vector_numbers(values[row * size : (row + 1) * size]) for row in range(rows)]


_SPARSE_PAIR = struct.Struct("<If")


def sparse_pairs(values: bytes) -> Iterator[tuple[int, float]]:
    """Yield the tokens of a sparse vector with their weights."""
    return _SPARSE_PAIR.iter_unpack(values)


_FLOAT32 = struct.Struct("f")


def shortest_float32(value: float | None) -> float | None:
    """Return the float whose shortest decimal form is that of its 32-bit value; None for NaN and infinity."""
    if value is None or not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
        return None
    packed = _FLOAT32.pack(value)
    (exact,) = _FLOAT32.unpack(packed)
    for digits in (6, 7, 8):  # six digits also yield all shorter forms
        short = float(f"{exact:.{digits}g}")
        if _FLOAT32.pack(short) == packed:
            return short
    return float(f"{exact:.9g}")


def clamped_cosine(first: list[float], second: list[float]) -> float:
    """Return the cosine of two vectors of length 1, clamped against rounding errors."""
    result: float = max(-1.0, min(1.0, sum(map(mul, first, second))))
    return result


def max_similarity(first: PromptVector, second: PromptVector) -> float:
    """Return the sum, over the tokens of the first text, of the largest product with a token of the second."""
    import numpy as np  # nothing else in this process needs it, and it takes 0.1 s

    first_rows, second_rows = (np.frombuffer(text.values, "<f4").reshape(text.rows, -1) for text in (first, second))
    # Parts bound the memory of the products. einsum uses no BLAS, whose threads would wait for the engines' cores.
    parts = (first_rows[start : start + TOKENS_AT_ONCE] for start in range(0, len(first_rows), TOKENS_AT_ONCE))
    return float(sum(np.einsum("ik,jk->ij", part, second_rows).max(1).sum() for part in parts))


def vector_base64(values: bytes) -> str:
    """Return the bytes in base64."""
    return base64.b64encode(values).decode()


def encode_vector(values: bytes, dtype: str, *, big_endian: bool = False) -> bytes:
    """Convert to float32, float16, bfloat16 or one of ``FLOAT8``, rounding to nearest. ``big_endian``: in big endian.

    Overflow becomes infinity in float16 and fp8_e5m2; fp8_e4m3 has no infinity and saturates at its largest value.
    """
    if dtype in FLOAT8:
        table = _float8_codes(dtype)
        words = struct.unpack(f"<{len(values) // 4}I", values)
        return bytes([table[word >> 16 | (word & 0xFFFF != 0)] for word in words])
    order = ">" if big_endian else "<"
    vector = vector_numbers(values)
    if dtype == "float16":
        return struct.pack(f"{order}{len(vector)}e", *map(_clamp_float16, vector))
    if dtype == "bfloat16":
        words = struct.unpack(f"<{len(vector)}I", values)
        return struct.pack(f"{order}{len(words)}H", *((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words))
    return struct.pack(f"{order}{len(vector)}f", *vector) if big_endian else values


@cache
def _float8_codes(dtype: str) -> bytes:
    """Return the code for each possible upper half of a float32. The half's lowest bit must also be set if any lower
    bit of the number is, which breaks ties."""
    positive = bytes(
        _nearest_code(struct.unpack(">f", struct.pack(">HH", half, 0))[0], FLOAT8[dtype]) for half in range(1 << 15)
    )
    return positive + bytes(code | 0x80 for code in positive)


def _nearest_code(size: float, magnitudes: list[float]) -> int:
    """Return the code of the nearest value in the ascending list, the even code on a tie."""
    code = min(bisect_left(magnitudes, size), len(magnitudes) - 1)
    if code and size < magnitudes[code]:
        below, above = size - magnitudes[code - 1], magnitudes[code] - size
        code -= below < above or (below == above and code % 2)
    return code


def _clamp_float16(number: float) -> float:
    return number if abs(number) < 65520 else float("inf") if number > 0 else float("-inf")
