"""Answers of a stream as bytes: each follows a header with its kind and length, as in gRPC. Pure."""

from __future__ import annotations

import struct

import msgspec

MESSAGE, FAILURE = 0, 0x80
HEAD = struct.Struct(">BI")


class Failure(msgspec.Struct):
    """An error that ends the answers: HTTP status and sentence."""

    status: int
    error: str


def frame(message: bytes) -> bytes:
    """Return a message as one frame."""
    return HEAD.pack(MESSAGE, len(message)) + message


def failure(status: int, error: str) -> bytes:
    """Return an error as one frame."""
    data = msgspec.json.encode(Failure(status, error))
    return HEAD.pack(FAILURE, len(data)) + data


class Reader:
    """Splits bytes, which may be cut anywhere, into frames."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[bytes | Failure]:
        """Return the messages, or the error, that these bytes complete. Raises msgspec.MsgspecError."""
        data, found, at = self._data + data, list[bytes | Failure](), 0
        while len(data) - at >= HEAD.size:
            kind, size = HEAD.unpack_from(data, at)
            end = at + HEAD.size + size
            if end > len(data):
                break
            part = data[at + HEAD.size : end]
            found.append(part if kind == MESSAGE else msgspec.json.decode(part, type=Failure))
            at = end
        self._data = data[at:]
        return found
