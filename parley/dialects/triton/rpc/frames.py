"""Answers of a stream as bytes: each follows a header with its kind and length, as in gRPC. Pure."""

from __future__ import annotations

import struct

import msgspec

MESSAGE_KIND, FAILURE_KIND = 0, 0x80
FRAME_HEADER = struct.Struct(">BI")


class StreamFailure(msgspec.Struct):
    """An error that ends the answers: HTTP status and sentence."""

    status: int
    error: str


def message_frame(message: bytes) -> bytes:
    """Return a message as one frame."""
    return FRAME_HEADER.pack(MESSAGE_KIND, len(message)) + message


def grpc_failure_frame(status: int, error: str) -> bytes:
    """Return an error as one frame."""
    data = msgspec.json.encode(StreamFailure(status, error))
    return FRAME_HEADER.pack(FAILURE_KIND, len(data)) + data


class FrameSplitter:
    """Splits bytes, which may be cut anywhere, into frames."""

    def __init__(self) -> None:
        self._data = b""

    def split_frames(self, data: bytes) -> list[bytes | StreamFailure]:
        """Return the messages, or the error, that these bytes complete. Raises msgspec.MsgspecError."""
        data, frames, position = self._data + data, list[bytes | StreamFailure](), 0
        while len(data) - position >= FRAME_HEADER.size:
            kind, size = FRAME_HEADER.unpack_from(data, position)
            end = position + FRAME_HEADER.size + size
            if end > len(data):
                break
            part = data[position + FRAME_HEADER.size : end]
            frames.append(part if kind == MESSAGE_KIND else msgspec.json.decode(part, type=StreamFailure))
            position = end
        self._data = data[position:]
        return frames
