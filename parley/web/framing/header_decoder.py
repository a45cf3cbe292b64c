"""Decodes the headers of HTTP/2 requests (HPACK, RFC 7541) with a limit that the library lacks."""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder, HeaderTuple, HPACKDecodingError
from hpack.hpack import decode_integer

MAX_SIZE_UPDATES = 2  # of the table, at the start of a header block: section 4.2 needs no more
SIZE_UPDATE_MASK, SIZE_UPDATE = 0xE0, 0x20  # the first three bits of an update
SIZE_BITS = 5  # of its first byte


class HeaderDecoder(Decoder):
    """Refuses a header block that changes the size of its table again and again: each change costs the sender a byte,
    and is no header that counts."""

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        """Return the headers of a block. Raises HPACKDecodingError."""
        position = update_count = 0
        while position < len(data) and data[position] & SIZE_UPDATE_MASK == SIZE_UPDATE:
            update_count += 1
            if update_count > MAX_SIZE_UPDATES:
                raise HPACKDecodingError("A header block has too many updates of the table's size.")
            position += decode_integer(data[position : position + 16], SIZE_BITS)[1]
        return super().decode(data, raw)
