"""Images for ``parley bench``: PNG files of random pixels, as parts of messages. Needs no imaging library."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

from parley.serving.media.data_urls import media_part

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB_8_BIT = (8, 2, 0, 0, 0)  # bit depth, colour type, compression, filter, interlace (PNG specification, IHDR)


def random_png(width: int, height: int, random_: random.Random) -> bytes:
    """Return a PNG file of random pixels, which no two draws share."""
    rows = b"".join(b"\0" + random_.randbytes(3 * width) for _ in range(height))  # each begins with its filter: none
    header = struct.pack(">II5B", width, height, *RGB_8_BIT)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return PNG_SIGNATURE + b"".join(_encode_chunk(name, data) for name, data in chunks)


def _encode_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def add_random_images(text: str, count: int, side: int, random_: random.Random) -> list[dict[str, Any]]:
    """Return a message's content: ``count`` images of ``side`` pixels in width and height, then a text."""
    images = [media_part(random_png(side, side, random_)) for _ in range(count)]
    return [*images, {"type": "text", "text": text}]
