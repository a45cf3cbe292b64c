"""Reads the model and the prompt of a gRPC request directly from the message's bytes.

For callers that need nothing else and may lack the protobuf package. Knows the wire format and the numbers of a few
fields. Bytes that are no valid message yield empty results; the full reader refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEL, INPUT, RAW = 1, 5, 7  # of ModelInferRequest
NAME, CONTENTS, BYTES = 1, 5, 8  # of its inputs; BYTES is a field of their contents
PROMPT = b"text_input"
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5  # wire types
LONGEST = 10  # bytes of a varint
MOST = 4096  # fields read; no real client sends more, so a longer message is treated as invalid


class _Broken(Exception):
    """The bytes are not a valid message."""


def model(data: bytes) -> str:
    """Return the model that a request names, or "" if it names none."""
    try:
        names = [bytes(value) for number, value in _fields(memoryview(data)) if number == MODEL]
        return names[-1].decode() if names else ""
    except (_Broken, UnicodeDecodeError):
        return ""


def prompt(data: bytes) -> bytes:
    """Return the text of a request's prompt, or b"" if it has none."""
    try:
        return bytes(_prompt(memoryview(data)))
    except _Broken:
        return b""


def _prompt(data: memoryview) -> memoryview | bytes:
    inputs, raw = [], []
    for number, value in _fields(data):
        if number == INPUT:
            inputs.append(value)
        elif number == RAW:
            raw.append(value)
    for place, tensor in enumerate(inputs):
        fields = dict(_fields(tensor))
        if fields.get(NAME) == PROMPT:
            if raw:
                return raw[place][4:] if place < len(raw) else b""  # after its length, 4 bytes
            return dict(_fields(fields.get(CONTENTS, memoryview(b"")))).get(BYTES, b"")
    return b""


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the numbers and values of all length-delimited fields. Raises _InvalidMessage."""
    at = 0
    for _ in range(MOST):
        if at >= len(data):
            return
        tag, at = _number(data, at)
        kind = tag & 7
        if kind == VARINT:
            _, at = _number(data, at)
        elif kind == LENGTH:
            size, at = _number(data, at)
            if size > len(data) - at:
                raise _Broken
            yield tag >> 3, data[at : at + size]
            at += size
        elif kind in (EIGHT, FOUR):
            at += 8 if kind == EIGHT else 4
        else:
            raise _Broken
    raise _Broken


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it. Raises _InvalidMessage."""
    value = 0
    for place, byte in enumerate(data[at : at + LONGEST]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _Broken
