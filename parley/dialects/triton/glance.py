"""A glance at a request over gRPC: the model and the prompt, read off a message's bytes.

For who has to know no more of it, and may lack the packages that read messages. Knows the wire's form and the numbers
of a few fields; what is no message says nothing, and is refused by who reads it in full.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEL, INPUT, RAW = 1, 5, 7  # of ModelInferRequest
NAME, CONTENTS, BYTES = 1, 5, 8  # of its inputs; of their contents
PROMPT = b"text_input"
VARINT, EIGHT, LENGTH, FOUR = 0, 1, 2, 5  # how a field's value is written
LONGEST = 10  # bytes of a number
MOST = 4096  # fields that are read: what has more is none that a client would write, and may be anything


class _Broken(Exception):
    """It is no message."""


def model(data: bytes) -> str:
    """The model that a request names, empty if it names none."""
    try:
        names = [bytes(value) for number, value in _fields(memoryview(data)) if number == MODEL]
        return names[-1].decode() if names else ""
    except (_Broken, UnicodeDecodeError):
        return ""


def prompt(data: bytes) -> bytes:
    """The text of a request's prompt, empty if it has none."""
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
                return raw[place][4:] if place < len(raw) else b""  # behind its length
            return dict(_fields(fields.get(CONTENTS, memoryview(b"")))).get(BYTES, b"")
    return b""


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The numbers and values of those fields that have a length. Raises _Broken."""
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
    """A number of seven bits in each byte, and where it ends. Raises _Broken."""
    value = 0
    for place, byte in enumerate(data[at : at + LONGEST]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _Broken
