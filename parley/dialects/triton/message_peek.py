"""Reads the model and the prompt of a gRPC request directly from the message's bytes.

For callers that need nothing else and may lack the protobuf package. Knows the wire format and the numbers of a few
fields. Bytes that are no valid message yield empty results; the full reader refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEL_FIELD, INPUT_FIELD, RAW_FIELD = 1, 5, 7  # of ModelInferRequest
NAME_FIELD, CONTENTS_FIELD, BYTES_FIELD = 1, 5, 8  # of its inputs; BYTES is a field of their contents
PROMPT_INPUT = b"text_input"
VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5  # wire types
MAX_VARINT = 10  # bytes of a varint
MAX_FIELDS = 4096  # fields read; no real client sends more, so a longer message is treated as invalid


class _InvalidMessage(Exception):
    """The bytes are not a valid message."""


def peek_model(data: bytes) -> str:
    """Return the model that a request names, or "" if it names none."""
    try:
        names = [bytes(value) for number, value in _length_fields(memoryview(data)) if number == MODEL_FIELD]
        return names[-1].decode() if names else ""
    except (_InvalidMessage, UnicodeDecodeError):
        return ""


def peek_prompt(data: bytes) -> bytes:
    """Return the text of a request's prompt, or b"" if it has none."""
    try:
        return bytes(_find_prompt(memoryview(data)))
    except _InvalidMessage:
        return b""


def _find_prompt(data: memoryview) -> memoryview | bytes:
    inputs, raw = [], []
    for number, value in _length_fields(data):
        if number == INPUT_FIELD:
            inputs.append(value)
        elif number == RAW_FIELD:
            raw.append(value)
    for index, tensor in enumerate(inputs):
        fields = dict(_length_fields(tensor))
        if fields.get(NAME_FIELD) == memoryview(PROMPT_INPUT):
            if raw:
                return raw[index][4:] if index < len(raw) else b""  # after its length, 4 bytes
            return dict(_length_fields(fields.get(CONTENTS_FIELD, memoryview(b"")))).get(BYTES_FIELD, b"")
    return b""


def _length_fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the numbers and values of all length-delimited fields. Raises _InvalidMessage."""
    position = 0
    for _ in range(MAX_FIELDS):
        if position >= len(data):
            return
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == VARINT:
            _, position = _read_varint(data, position)
        elif kind == LENGTH_DELIMITED:
            size, position = _read_varint(data, position)
            if size > len(data) - position:
                raise _InvalidMessage
            yield tag >> 3, data[position : position + size]
            position += size
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            position += 8 if kind == EIGHT_BYTES else 4
        else:
            raise _InvalidMessage
    raise _InvalidMessage


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it. Raises _InvalidMessage."""
    value = 0
    for index, byte in enumerate(data[position : position + MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise _InvalidMessage
