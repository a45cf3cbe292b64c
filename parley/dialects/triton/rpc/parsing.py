"""Parses messages of limited complexity: their fields are counted before anything is built.

An empty message inside another takes two bytes on the wire and a hundred in memory, and one gRPC message may have
sixteen million of them. The wire format: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import contextlib
from typing import Any

from parley.dialects.triton.rpc.messages import ProtoMessage
from parley.errors import InvalidValue

MAX_FIELDS = 1 << 16  # fields of a message, those of inner messages included
MAX_NUMBERS = 1 << 21  # numbers in arrays: a prompt may be an array of token ids
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
LENGTH_DELIMITED_TYPES = frozenset({9, 11, 12})  # string, message, bytes
FREE_SIZE = 1 << 14  # bytes of a message that need no counting

_CONTINUED_BYTES = bytes(range(128, 256))  # all bytes of a number in base 128 but its last


def parse_message(message_class: Any, data: bytes) -> ProtoMessage:
    """Parse a message of this class. Raises google.protobuf's DecodeError, and InvalidValue if it has too many
    fields."""
    if len(data) > FREE_SIZE:
        with contextlib.suppress(IndexError):  # cut off: the parser reports it
            _FieldCounter(data).count_fields(message_class.DESCRIPTOR, 0, len(data))
    return message_class.FromString(data)


class _FieldCounter:
    """Counts the fields of a message. Raises InvalidValue if there are too many, IndexError if the message is cut
    off."""

    def __init__(self, data: bytes):
        self._data, self._fields, self._numbers = data, 0, 0

    def count_fields(self, descriptor: Any, position: int, end: int) -> None:
        """Count the fields of a message of the described type, at these bytes."""
        while position < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise InvalidValue(f"The message has more than {MAX_FIELDS} fields.")
            key, position = self._read_number(position)
            kind = key & 7
            if kind == VARINT:
                _, position = self._read_number(position)
            elif kind == DELIMITED:
                size, position = self._read_number(position)
                self._count_content(descriptor.fields_by_number.get(key >> 3), position, min(position + size, end))
                position += size
            elif kind in FIXED_SIZES:
                position += FIXED_SIZES[kind]
            else:
                raise IndexError

    def _count_content(self, field: Any, position: int, end: int) -> None:
        if field is None:
            return
        if field.message_type is not None:
            self.count_fields(field.message_type, position, end)
        elif field.type not in LENGTH_DELIMITED_TYPES:
            self._numbers += len(self._data[position:end].translate(None, _CONTINUED_BYTES))
            if self._numbers > MAX_NUMBERS:
                raise InvalidValue(f"The message has more than {MAX_NUMBERS} numbers.")

    def _read_number(self, position: int) -> tuple[int, int]:
        """Return a number in base 128, and the position after it."""
        number = shift = 0
        while (byte := self._data[position]) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            position += 1
            if shift > 63:
                raise IndexError
        return number | byte << shift, position + 1
