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

from parley.dialects.triton.error_answers import quote_name, wrong_type_error
from parley.errors import BadRequest, InvalidValue

TensorElement = bool | int | float | str

STRUCT_FORMATS = {
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
NUMBER_TYPES = tuple(name for name in STRUCT_FORMATS if name != "BOOL")
INTEGER_FORMATS = {name: code for name, code in STRUCT_FORMATS.items() if "INT" in name}
MAX_RANK = 32
HALF_TYPES = ("FP16", "BF16")


@dataclass(slots=True)
class TritonTensor:
    """A named tensor with its elements in row-major order."""

    name: str
    datatype: str
    shape: list[int]
    elements: Sequence[TensorElement]


def elements_from_json(name: str, datatype: str, values: Sequence[Any]) -> list[TensorElement]:
    """Convert JSON values to elements. Raises UnreadableInput, or InvalidValue for types JSON cannot carry."""
    if datatype == "BYTES":
        if any(not isinstance(value, str) for value in values):
            raise wrong_type_error("string", "JSON bytes array")
        return list(values)
    if datatype == "BOOL":
        if any(not isinstance(value, bool) for value in values):
            raise wrong_type_error("boolean")
        return list(values)
    if datatype in HALF_TYPES:
        raise InvalidValue(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if datatype in INTEGER_FORMATS:
        signed = INTEGER_FORMATS[datatype].islower()
        bits = 8 * struct.calcsize(INTEGER_FORMATS[datatype])
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if any(not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high for value in values):
            raise wrong_type_error("signed-integer" if signed else "unsigned-integer")
        return list(values)
    if any(not isinstance(value, int | float) or isinstance(value, bool) for value in values):
        raise wrong_type_error("number", read_as="double")
    return [_to_double(value) for value in values]


def flatten_json(name: str, data: Any, count: int) -> list[Any]:
    """Return exactly ``count`` scalars of nested arrays in row-major order. Raises BadRequest."""
    if not isinstance(data, list):
        raise wrong_type_error("array")
    while any(isinstance(item, list) for item in data):
        if not all(isinstance(item, list) for item in data):
            raise _shape_error()
        data = [child for item in data for child in item]
    if len(data) != count:
        raise _shape_error()
    result: list[Any] = data
    return result


def elements_from_bytes(name: str, datatype: str, count: int, data: memoryview, model: str) -> list[TensorElement]:
    """Convert bytes to exactly ``count`` elements. Raises InvalidValue for a wrong size, or text that is not UTF-8."""
    if datatype == "BYTES":
        return _texts_from_bytes(name, count, data, model)
    code = STRUCT_FORMATS[datatype]
    expected_size = count * struct.calcsize(code)
    if len(data) != expected_size:
        raise _size_error(name, expected_size - len(data), model)
    if datatype == "BOOL":
        return [byte != 0 for byte in data]
    values = struct.unpack(f"<{count}{code}", data)
    if datatype == "BF16":
        return [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]
    return list(values)


def tensor_to_bytes(tensor: TritonTensor) -> bytes:
    """Convert a tensor's elements to bytes."""
    if tensor.datatype == "BYTES":
        parts = []
        for text in tensor.elements:
            content = str(text).encode()
            parts += [struct.pack("<I", len(content)), content]
        return b"".join(parts)
    return struct.pack(f"<{len(tensor.elements)}{STRUCT_FORMATS[tensor.datatype]}", *tensor.elements)


def tensor_to_json(tensor: TritonTensor) -> list[TensorElement]:
    """Convert elements to JSON values; a 32-bit float becomes the double that equals it."""
    if tensor.datatype == "FP32":
        return [struct.unpack("f", struct.pack("f", value))[0] for value in tensor.elements]
    return list(tensor.elements)


def _texts_from_bytes(name: str, count: int, data: memoryview, model: str) -> list[TensorElement]:
    texts: list[TensorElement] = []
    position = 0
    for _ in range(count):
        if position + 4 > len(data):
            raise _size_error(name, position + 4 - len(data), model)
        (size,) = struct.unpack_from("<I", data, position)
        position += 4
        if position + size > len(data):
            raise _size_error(name, position + size - len(data), model)
        try:
            texts.append(str(data[position : position + size], "utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidValue(f"input {quote_name(name)} is not UTF-8 text (at byte {error.start})") from None
        position += size
    if position != len(data):
        raise InvalidValue(
            f"unexpected size for input {quote_name(name)}, {len(data) - position} bytes too many for model '{model}'"
        )
    return texts


def _to_double(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _size_error(name: str, missing: int, model: str) -> BadRequest:
    if missing < 0:
        return InvalidValue(
            f"unexpected size for input {quote_name(name)}, {-missing} bytes too many for model '{model}'"
        )
    return InvalidValue(
        f"unexpected size for input {quote_name(name)}, expecting {missing} additional bytes for model '{model}'"
    )


def _shape_error() -> BadRequest:
    return InvalidValue("Unable to parse 'data': Shape does not match true shape of 'data' field")


def check_shape(shape: Any) -> list[int]:
    """Check a tensor's shape and return it. Raises UnreadableInput, or InvalidValue for too many dimensions."""
    if not isinstance(shape, list):
        raise wrong_type_error("array", "'shape'")
    if len(shape) > MAX_RANK:
        raise InvalidValue(f"Unable to parse 'shape': at most {MAX_RANK} dimensions are allowed")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63:
            raise wrong_type_error("unsigned-integer", "'shape'")
    return shape
