"""Encodes spans as OTLP messages, without objects of messages: those take much longer, and requests wait meanwhile.

Format: https://github.com/open-telemetry/opentelemetry-proto, and
https://protobuf.dev/programming-guides/encoding for its bytes. A field is a tag, which is the field's number and the
kind of its value, and the value; texts and messages begin with their length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Literal

from parley.tracing.trace_context import TraceContext
from parley.version import __version__

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]
SpanKind = Literal["server", "client", "internal"]

NO_ATTRIBUTES: Attributes = {}
VARINT, LENGTH = 0, 2  # kinds of values
KINDS = {"internal": b"\x30\x01", "server": b"\x30\x02", "client": b"\x30\x03"}  # field 6
STATUS_ERROR = 2
CACHED_CHARACTERS = 32  # most characters of a cached value; ids of requests, which do not repeat, are longer
TRACE_ID, SPAN_ID, PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # tags and lengths of fields 1, 2 and 4
START_TIME, END_TIME = 0x39, 0x41  # tags of fields 7 and 8, of the kind FIXED_64
FLAGS = b"\x85\x01" + struct.pack("<I", 1)  # field 16: sampled
pack_double = struct.Struct("<d").pack
pack_times = struct.Struct("<BQBQ").pack


def encode_batch(encoded_spans: Iterable[bytes], resource: Mapping[str, AttributeValue]) -> bytes:
    """Return the ExportTraceServiceRequest of spans that ``encode_span`` encoded. ``resource``: the attributes of this
    server."""
    scope = _encode_field(1, _encode_field(1, b"parley") + _encode_field(2, __version__.encode()))
    return _encode_field(
        1, _encode_field(1, _encode_pairs(1, resource)) + _encode_field(2, scope + b"".join(encoded_spans))
    )


def encode_span(
    name: str,
    kind: SpanKind,
    context: TraceContext,
    parent: TraceContext | None,
    start_time: int,
    end_time: int,
    attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES,
    error: str = "",
    encoded_attributes: bytes = b"",
) -> bytes:
    """Return a span that has ended, as an item of a batch. Times in nanoseconds since 1970; ``error``: why its work
    failed, "" if it did not; ``encoded_attributes``: further ones, from ``encode_attributes``."""
    parts = [
        TRACE_ID,
        context.trace_id.to_bytes(16),
        SPAN_ID,
        context.span_id.to_bytes(8),
        _encode_name_and_kind(name, kind),
        pack_times(START_TIME, start_time, END_TIME, end_time),
    ]
    if parent is not None:
        parts += PARENT_ID, parent.span_id.to_bytes(8)
    if encoded_attributes:
        parts.append(encoded_attributes)
    if attributes:
        parts.append(_encode_pairs(9, attributes))
    if context.state:
        parts.append(_encode_field(3, context.state))
    if error:
        parts.append(
            _encode_field(15, _encode_field(2, _as_utf8(error)) + bytes((_encode_tag(3, VARINT), STATUS_ERROR)))
        )
    return _encode_field(2, b"".join(parts))


def encode_attributes(attributes: Mapping[str, AttributeValue]) -> bytes:
    """Return attributes of a span as bytes, which a caller may keep for several spans."""
    return _encode_pairs(9, attributes)


@lru_cache(1024)  # names are those of the code, with a route or a model
def _encode_name_and_kind(name: str, kind: SpanKind) -> bytes:
    """Return the fields of a span that all of its kind have in common."""
    return _encode_field(5, _as_utf8(name)) + KINDS[kind] + FLAGS


def _encode_pairs(number: int, attributes: Mapping[str, AttributeValue]) -> bytes:
    """Return attributes as the repeated field ``number`` of KeyValue messages."""
    return b"".join(
        [
            _double_head(number, name) + pack_double(value)
            if type(value) is float
            else _encode_pair(number, name, value)
            if type(value) is not str or len(value) <= CACHED_CHARACTERS
            else _encode_long_text(number, name, value)
            for name, value in attributes.items()
        ]
    )


@lru_cache(1024, typed=True)  # most values are those of other requests as well
def _encode_pair(number: int, name: str, value: AttributeValue) -> bytes:
    return _encode_field(number, _encode_name(name) + _encode_field(2, _encode_value(value)))


def _encode_long_text(number: int, name: str, text: str) -> bytes:
    encoded = _as_utf8(text)
    return _text_head(number, name, len(encoded)) + encoded


@lru_cache(256)  # ids have the same length in all requests
def _text_head(number: int, name: str, size: int) -> bytes:
    """Return a pair whose value is a text of ``size`` bytes, without these bytes, its last ones."""
    pair = _encode_field(number, _encode_name(name) + _encode_field(2, _encode_field(1, bytes(size))))
    return pair[: len(pair) - size]


@cache  # names are those of the code
def _encode_name(name: str) -> bytes:
    return _encode_field(1, name.encode())


@cache
def _double_head(number: int, name: str) -> bytes:
    """Return a pair whose value is a double, without its last eight bytes, the value."""
    return _encode_field(number, _encode_name(name) + _encode_field(2, _encode_value(0.0)))[:-8]


def _encode_value(value: AttributeValue) -> bytes:
    """Return a value as an AnyValue message."""
    if isinstance(value, str):
        return _encode_field(1, _as_utf8(value))
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return (
            b"\x18" + _encode_varint(value & (1 << 64) - 1)
            if -(1 << 63) <= value < 1 << 63
            else _encode_value(str(value))
        )
    if isinstance(value, float):
        return b"\x21" + pack_double(value)
    return _encode_field(5, b"".join([_encode_field(1, _encode_value(item)) for item in value]))


def _encode_field(number: int, content: bytes) -> bytes:
    """Return a field with a length: text or a message."""
    size = len(content)
    tag = number << 3 | LENGTH  # not by a call, because this runs for each text
    return bytes((tag, size)) + content if size < 0x80 else bytes((tag,)) + _encode_varint(size) + content


def _encode_tag(number: int, kind: int) -> int:
    """Return the tag of a field with a number below 16, which is one byte."""
    return number << 3 | kind


def _encode_varint(value: int) -> bytes:
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
