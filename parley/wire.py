"""Frames on a stream socket: a 4-byte big-endian length, then that number of bytes of MessagePack.

A stream socket is used because its end is an event: when a process dies, the other side reads end-of-file at once, and
no time-out is needed to distinguish a dead peer from a slow one.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec

FRAME_HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 30  # bytes; a larger length means a corrupt stream, not a message

_encoder = msgspec.msgpack.Encoder()


class BrokenFrame(Exception):
    """The stream does not contain frames of this protocol, or ended inside one."""


def encode_frame(message: Any) -> bytes:
    """Encode a message as one frame. Raises BrokenFrame if it is larger than MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise BrokenFrame(f"message of {len(body)} bytes exceeds the frame limit of {MAX_FRAME}")
    return FRAME_HEADER.pack(len(body)) + body


def frame_length(header: bytes, limit: int = MAX_FRAME) -> int:
    """Return the body length in a header. Raises BrokenFrame if it is above the limit."""
    (size,) = FRAME_HEADER.unpack(header)
    if size > limit:
        raise BrokenFrame(f"frame of {size} bytes exceeds the limit of {limit}")
    result: int = size
    return result


def receive_frame(sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    """Return the next message of a blocking socket, None at a clean end of file. Raises BrokenFrame, OSError."""
    header = _receive_exactly(sock, FRAME_HEADER.size)
    if not header:
        return None
    body = _receive_exactly(sock, frame_length(header))
    return decoder.decode(body)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    received = 0
    while received < size:
        count = sock.recv_into(view[received:])
        if count == 0:
            if received == 0 and size == FRAME_HEADER.size:
                return b""
            raise BrokenFrame("the stream ended inside a frame")
        received += count
    return bytes(data)


async def read_frame(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any], limit: int = MAX_FRAME
) -> Any | None:
    """Return the next message of an asyncio stream, None at a clean end of file. Raises BrokenFrame, OSError.

    ``limit``: largest message, in bytes.
    """
    try:
        header = await reader.readexactly(FRAME_HEADER.size)
    except asyncio.IncompleteReadError as end:
        if not end.partial:
            return None
        raise BrokenFrame("the stream ended inside a frame") from end
    try:
        return decoder.decode(await reader.readexactly(frame_length(header, limit)))
    except asyncio.IncompleteReadError as end:
        raise BrokenFrame("the stream ended inside a frame") from end
