"""JSON bodies whose decoded form takes many times the memory of their text, and the same compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache

BOMB_SIZE = 31 << 20  # bytes; just below the default limit of a body

BOMB_UNITS = {
    "arrays": b"[],",
    "objects": b"{},",
    "pairs": b"[[],{}],",
    "integers": b"1,",
    "decimals": b"1.5,",
    "strings": b'"ab",',
    "escapes": rb'"\n\u00e9\\",',
}
BOMB_KINDS = [*BOMB_UNITS, "members", "nesting", "one string"]


def write_bomb(kind: str, size: int = BOMB_SIZE, member: str = "ignored") -> bytes:
    """Return a body with ``size`` bytes of this kind in one member, besides the members of an ordinary request."""
    head = (
        b'{"model":"tiny","prompt":"a","messages":[{"role":"user","content":"a"}],"inputs":"a","max_tokens":1,"%b":'
        % member.encode()
    )
    if kind in BOMB_UNITS:
        unit = BOMB_UNITS[kind]
        value = b"[" + unit * (size // len(unit)) + b"0]"
    elif kind == "members":
        value = b"{" + b",".join(b'"%x":0' % number for number in range(size // 10)) + b"}"
    elif kind == "nesting":
        value = b"[" * (size // 2) + b"]" * (size // 2)
    else:
        value = b'"' + b"[],{}:" * (size // 6) + b'"'
    return head + value + b"}"


def compress_bomb(body: bytes, coding: str = "gzip") -> bytes:
    """Compress a body as well as gzip or deflate can."""
    stream = zlib.compressobj(level=9, wbits=31 if coding == "gzip" else 15)
    return stream.compress(body) + stream.flush()


def compressed_bombs(body: bytes) -> Iterator[tuple[str, bytes, str]]:
    """Yield the name, the body and the Content-Encoding of each way to hide a body in a small one."""
    packed = compress_bomb(body)
    yield "gzip", packed, "gzip"
    yield "deflate", compress_bomb(body, "deflate"), "deflate"
    yield "nested", compress_bomb(packed), "gzip"
    yield "nested, announced", compress_bomb(packed), "gzip, gzip"
    yield "two members", compress_bomb(body[:20_000]) + compress_bomb(body[20_000:]), "gzip"
    yield "empty members", compress_bomb(b"") * 500_000, "gzip"
    yield "members without an end", packed[:-8] + packed, "gzip"
    yield "brotli", packed, "br"
    yield "zstd", packed, "zstd"


@cache
def _compressed_bomb(kind: str) -> bytes:
    return compress_bomb(write_bomb(kind))


def every_bomb() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield the name, the body and the headers of each bomb, as it is and compressed."""
    for kind in BOMB_KINDS:
        yield kind, write_bomb(kind), {}
        yield f"compressed {kind}", _compressed_bomb(kind), {"content-encoding": "gzip"}
