"""Content codings of HTTP bodies: decompresses requests and compresses responses with gzip or deflate."""

from __future__ import annotations

import zlib

from parley.errors import MalformedBody, TooLarge, UnknownCoding

MAX_RATIO = 100  # bytes per compressed byte; texts and arrays of tokens reach 20
FREE_SIZE = 1 << 20  # bytes; bodies up to this size may have any ratio


def decompress_body(body: bytes, coding: bytes, limit: int) -> bytes:
    """Decompress a body to at most ``limit`` bytes, and MAX_RATIO times its size. Raises TooLarge, MalformedBody,
    UnknownCoding.

    ``coding``: the value of Content-Encoding; for b"" and b"identity" the body is returned unchanged.
    """
    coding = coding.strip().lower()
    if coding in (b"", b"identity"):
        return body
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise UnknownCoding("The body's Content-Encoding is not supported; send it as it is, or with gzip or deflate.")
    by_ratio = max(FREE_SIZE, MAX_RATIO * len(body))
    stream = zlib.decompressobj(wbits=47)  # detects gzip and zlib
    try:
        decompressed = stream.decompress(body, min(limit, by_ratio) + 1)
    except zlib.error:
        raise MalformedBody("The body could not be decompressed.") from None
    if len(decompressed) > limit:
        raise TooLarge(f"The decompressed body is larger than the limit of {limit} bytes.")
    if len(decompressed) > by_ratio:
        raise TooLarge(f"The body grows to more than {MAX_RATIO} times its size when it is decompressed.")
    if not stream.eof or stream.unused_data:
        raise MalformedBody("The body could not be decompressed: it is cut off, or something follows it.")
    return decompressed


def compress_body(body: bytes, coding: bytes) -> bytes:
    """Compress a body with a content coding, ``gzip`` or ``deflate``."""
    stream = zlib.compressobj(level=1, wbits=31 if coding == b"gzip" else 15)
    return stream.compress(body) + stream.flush()
