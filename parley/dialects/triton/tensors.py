"""Tensors on the wire: types, elements as JSON and as bytes, and the errors in them.

Binary elements are little-endian in row-major order; a BYTES element is its length in 32 bits followed by its content.
In Python an element is a bool, int, float or str.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parley.dialects.triton.errors import mistaken, quoted
from parley.errors import BadRequest, Invalid

Element = bool | int | float | str

FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "BF16": "H",
    "FP32": "f",
    "FP64": "d",
}
NUMBERS = tuple(name for name in FORMATS if name != "BOOL")
INTEGERS = {name: code for name, code in FORMATS.items() if "INT" in name}
MAX_RANK = 32
HALVES = ("FP16", "BF16")


@dataclass(slots=True)
class Tensor:
    """A named tensor with its elements in row-major order."""

    name: str
    datatype: str
    shape: list[int]
    elements: Sequence[Element]


def from_json(name: str, datatype: str, values: Sequence[Any]) -> list[Element]:
    """Convert JSON values to elements. Raises UnreadableInput, or Invalid for types JSON cannot carry."""
    if datatype == "BYTES":
        if any(not isinstance(value, str) for value in values):
            raise mistaken("string", "JSON bytes array")
        return list(values)
    if datatype == "BOOL":
        if any(not isinstance(value, bool) for value in values):
            raise mistaken("boolean")
        return list(values)
    if datatype in HALVES:
        raise Invalid(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if datatype in INTEGERS:
        signed = INTEGERS[datatype].islower()
        bits = 8 * struct.calcsize(INTEGERS[datatype])
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if any(not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high for value in values):
            raise mistaken("signed-integer" if signed else "unsigned-integer")
        return list(values)
    if any(not isinstance(value, int | float) or isinstance(value, bool) for value in values):
        raise mistaken("number", read="double")
    return [_double(value) for value in values]


def flatten(name: str, data: Any, count: int) -> list[Any]:
    """Return exactly ``count`` scalars of nested arrays in row-major order. Raises BadRequest."""
    if not isinstance(data, list):
        raise mistaken("array")
    while any(isinstance(item, list) for item in data):
        if not all(isinstance(item, list) for item in data):
            raise _misshapen()
        data = [child for item in data for child in item]
    if len(data) != count:
        raise _misshapen()
    return data


def from_bytes(name: str, datatype: str, count: int, data: memoryview, model: str) -> list[Element]:
    """Convert bytes to exactly ``count`` elements. Raises Invalid for a wrong size, or text that is not UTF-8."""
    if datatype == "BYTES":
        return _texts(name, count, data, model)
    code = FORMATS[datatype]
    wanted = count * struct.calcsize(code)
    if len(data) != wanted:
        raise _size(name, wanted - len(data), model)
    if datatype == "BOOL":
        return [byte != 0 for byte in data]
    values = struct.unpack(f"<{count}{code}", data)
    if datatype == "BF16":
        return [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]
    return list(values)


def to_bytes(tensor: Tensor) -> bytes:
    """Convert a tensor's elements to bytes."""
    if tensor.datatype == "BYTES":
        parts = []
        for text in tensor.elements:
            content = str(text).encode()
            parts += [struct.pack("<I", len(content)), content]
        return b"".join(parts)
    return struct.pack(f"<{len(tensor.elements)}{FORMATS[tensor.datatype]}", *tensor.elements)


def to_json(tensor: Tensor) -> list[Element]:
    """Convert elements to JSON values; a 32-bit float becomes the double that equals it."""
    if tensor.datatype == "FP32":
        return [struct.unpack("f", struct.pack("f", value))[0] for value in tensor.elements]
    return list(tensor.elements)


def _texts(name: str, count: int, data: memoryview, model: str) -> list[Element]:
    texts: list[Element] = []
    at = 0
    for _ in range(count):
        if at + 4 > len(data):
            raise _size(name, at + 4 - len(data), model)
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + size > len(data):
            raise _size(name, at + size - len(data), model)
        try:
            texts.append(str(data[at : at + size], "utf-8"))
        except UnicodeDecodeError as error:
            raise Invalid(f"input {quoted(name)} is not UTF-8 text (at byte {error.start})") from None
        at += size
    if at != len(data):
        raise Invalid(f"unexpected size for input {quoted(name)}, {len(data) - at} bytes too many for model '{model}'")
    return texts


def _double(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _size(name: str, missing: int, model: str) -> BadRequest:
    if missing < 0:
        return Invalid(f"unexpected size for input {quoted(name)}, {-missing} bytes too many for model '{model}'")
    return Invalid(
        f"unexpected size for input {quoted(name)}, expecting {missing} additional bytes for model '{model}'"
    )


def _misshapen() -> BadRequest:
    return Invalid("Unable to parse 'data': Shape does not match true shape of 'data' field")


def extent(shape: Any) -> list[int]:
    """Check a tensor's shape and return it. Raises UnreadableInput, or Invalid for too many dimensions."""
    if not isinstance(shape, list):
        raise mistaken("array", "'shape'")
    if len(shape) > MAX_RANK:
        raise Invalid(f"Unable to parse 'shape': at most {MAX_RANK} dimensions are allowed")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
            raise mistaken("unsigned-integer", "'shape'")
    return shape
