"""Spans as bytes of OTLP's messages. Its time is taken from requests, and objects of messages take much longer.

Format: https://github.com/open-telemetry/opentelemetry-proto, and
https://protobuf.dev/programming-guides/encoding for its bytes. A field is a tag, which is the field's number and the
kind of its value, and the value; texts and messages begin with their length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import cache

from parley.tracing.request_trace import AttributeValue, Span
from parley.version import __version__

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5  # kinds of values
KINDS = {"internal": 1, "server": 2, "client": 3}
STATUS_ERROR = 2
FLAGS = b"\x85\x01" + struct.pack("<I", 1)  # field 16: sampled
pack_double = struct.Struct("<d").pack
pack_times = struct.Struct("<BQBQ").pack


def encode_batch(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> bytes:
    """Return the ExportTraceServiceRequest of these spans. ``resource``: the attributes of this server."""
    scope = _field(1, _field(1, b"parley") + _field(2, __version__.encode()))
    scope_spans = scope + b"".join([_field(2, _encode_span(span)) for span in spans])
    return _field(1, _field(1, _encode_pairs(1, resource)) + _field(2, scope_spans))


def _encode_span(span: Span) -> bytes:
    context, parent = span.context, span.parent
    return b"".join(
        (
            b"\x0a\x10" + context.trace_id.to_bytes(16) + b"\x12\x08" + context.span_id.to_bytes(8),
            _field(3, context.state) if context.state else b"",
            b"\x22\x08" + parent.span_id.to_bytes(8) if parent is not None else b"",
            _field(5, _as_utf8(span.name)),
            bytes((_tag(6, VARINT), KINDS[span.kind])),
            pack_times(_tag(7, FIXED_64), span.start_time, _tag(8, FIXED_64), span.end_time),
            _encode_pairs(9, span.attributes),
            _field(15, _field(2, _as_utf8(span.error)) + bytes((_tag(3, VARINT), STATUS_ERROR))) if span.error else b"",
            FLAGS,
        )
    )


def _encode_pairs(number: int, attributes: Mapping[str, AttributeValue]) -> bytes:
    """Return attributes as the repeated field ``number`` of KeyValue messages."""
    return b"".join(
        [_field(number, _encode_name(name) + _field(2, _encode_value(value))) for name, value in attributes.items()]
    )


@cache  # names are those of the code
def _encode_name(name: str) -> bytes:
    return _field(1, name.encode())


def _encode_value(value: AttributeValue) -> bytes:
    """Return a value as an AnyValue message."""
    if isinstance(value, str):
        return _field(1, _as_utf8(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & (1 << 64) - 1) if -(1 << 63) <= value < 1 << 63 else _encode_value(str(value))
    if isinstance(value, float):
        return b"\x21" + pack_double(value)
    return _field(5, b"".join([_field(1, _encode_value(each)) for each in value]))


def _field(number: int, content: bytes) -> bytes:
    """Return a field with a length: text or a message."""
    size = len(content)
    tag = number << 3 | LENGTH  # not by a call, because this runs for each text
    return bytes((tag, size)) + content if size < 0x80 else bytes((tag,)) + _varint(size) + content


def _tag(number: int, kind: int) -> int:
    """Return the tag of a field with a number below 16, which is one byte."""
    return number << 3 | kind


def _varint(value: int) -> bytes:
    """Return a number that is not negative, in groups of seven bits, the lowest ones first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _as_utf8(text: str) -> bytes:
    """Return a text in UTF-8; lone surrogates, which would spoil the whole batch, are escaped."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
