"""Reads the frames of an HTTP/2 connection before they are parsed, and ends connections that flood the server.

A frame costs its sender almost nothing, so each connection has an allowance of frames that carry no body, and another
of streams that end before their response does (CVE-2023-44487, CVE-2025-8671). Both refill with time and with data that
the server sends. The layout of frames is that of RFC 9113, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the start of every connection, before the first frame
FRAME_HEADER = 9  # bytes
MAX_FRAME_SIZE = 16384  # bytes of a frame's payload; the smallest limit that a server may set

# Types of frames, and flags
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 0, 1, 3, 4, 7, 9
END_STREAM, END_HEADERS, PADDED = 1, 4, 8

# Error codes of GOAWAY
PROTOCOL_ERROR, FRAME_SIZE_ERROR, ENHANCE_YOUR_CALM = 1, 6, 11

FRAME_BURST, FRAMES_PER_SECOND = 4096, 512
FRAMES_PER_DATA = 2  # a client may answer each frame of data with a window update for the stream and the connection
RESET_BURST, RESETS_PER_SECOND = 512, 64
FIELDS_PER_FRAME, FIELD_BYTES_PER_FRAME = 16, 4096  # headers of a request, and bytes of headers, that cost one frame
SETTING_SIZE = 6  # bytes of one setting
SMALL_DATA = 64  # bytes without padding; a smaller frame of data, unless the last of its stream, counts as an empty one


class HostileFrames(Exception):
    """A connection has to be closed. ``code``: the error code for GOAWAY."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


class Allowance:
    """A number of events that refills with time: ``burst`` at most."""

    def __init__(self, burst: int, per_second: float):
        self._burst, self._per_second = burst, per_second
        self._left: float = burst
        self._updated_at = monotonic()

    def spend(self, count: int = 1) -> bool:
        """Subtract ``count`` events. Return False if fewer were left."""
        now = monotonic()
        self.earn((now - self._updated_at) * self._per_second)
        self._updated_at = now
        self._left -= count
        return self._left >= 0

    def earn(self, count: float) -> None:
        """Add events."""
        self._left = min(self._burst, self._left + count)


class ReceivedFrame(NamedTuple):
    """A complete frame. ``data``: with its header."""

    kind: int
    data: bytes


class FrameGuard:
    """Splits a client's bytes into frames.

    ``header_block_limit``: bytes of an encoded header block, with its continuations. ``in_header_block``: one has begun
    and is not complete, so that no other frame may come.
    """

    def __init__(self, header_block_limit: int):
        self.in_header_block = False
        self._header_block_limit = header_block_limit
        self._header_block_size = 0
        self._buffer = bytearray()
        self._preface = PREFACE  # the part of it that has not come yet
        self._frames = Allowance(FRAME_BURST, FRAMES_PER_SECOND)
        self._resets = Allowance(RESET_BURST, RESETS_PER_SECOND)

    def add_data(self, data: bytes) -> None:
        """Keep received bytes for ``split_frames``."""
        self._buffer += data

    def split_frames(self) -> Iterator[ReceivedFrame]:
        """Yield the complete frames among the bytes that are kept, and drop each; the preface counts to the first one.

        Raises HostileFrames.
        """
        buffer = self._buffer
        if self._preface and not self._skip_preface():
            return
        while len(buffer) >= FRAME_HEADER:
            length, kind, flags = int.from_bytes(buffer[:3], "big"), buffer[3], buffer[4]
            if length > MAX_FRAME_SIZE:
                raise HostileFrames(FRAME_SIZE_ERROR, f"A frame has {length} bytes; {MAX_FRAME_SIZE} are allowed.")
            end = FRAME_HEADER + length
            if len(buffer) < end:
                return
            padding = 1 + buffer[FRAME_HEADER] if kind == DATA and flags & PADDED and length else 0
            self._count_frame(kind, flags, length, padding)
            frame = bytes(buffer[:end])
            del buffer[:end]
            yield ReceivedFrame(kind, frame)

    def count_fields(self, count: int, size: int) -> None:
        """Count the decoded fields of a request and their bytes, which may be far more than the received ones.

        Raises HostileFrames.
        """
        cost = count // FIELDS_PER_FRAME + size // FIELD_BYTES_PER_FRAME
        if cost and not self._frames.spend(cost):
            raise HostileFrames(ENHANCE_YOUR_CALM, "Too many headers came.")

    def count_reset(self) -> None:
        """Count a stream that the client has made the server reset or refuse. Raises HostileFrames."""
        if not self._resets.spend():
            raise HostileFrames(ENHANCE_YOUR_CALM, "Too many streams were reset.")

    def note_response(self) -> None:
        """Refill allowances: a response has been sent completely."""
        self._resets.earn(1)

    def note_sent_data(self) -> None:
        """Refill allowances: a frame of data has been sent."""
        self._frames.earn(FRAMES_PER_DATA)

    def _skip_preface(self) -> bool:
        """Remove the preface. Return whether all of it has arrived. Raises HostileFrames."""
        begun = bytes(self._buffer[: len(self._preface)])
        if not self._preface.startswith(begun):
            raise HostileFrames(PROTOCOL_ERROR, "The connection does not begin with HTTP/2's preface.")
        del self._buffer[: len(begun)]
        self._preface = self._preface[len(begun) :]
        return not self._preface

    def _count_frame(self, kind: int, flags: int, length: int, padding: int) -> None:
        """Subtract a frame from the allowance of its kind. Raises HostileFrames."""
        if kind == DATA:
            cost = 1 if length - padding < SMALL_DATA and not flags & END_STREAM else 0
        elif kind == HEADERS:
            cost = 0
            self._header_block_size = length
            self.in_header_block = not flags & END_HEADERS
        elif kind == CONTINUATION:
            cost = 1
            self._header_block_size += length
            if self._header_block_size > self._header_block_limit:
                raise HostileFrames(ENHANCE_YOUR_CALM, "The request's headers are too large.")
            self.in_header_block = not flags & END_HEADERS
        elif kind == RST_STREAM:
            cost = 0
            self.count_reset()
        else:
            cost = 1 + (length // SETTING_SIZE if kind == SETTINGS else 0)
        if cost and not self._frames.spend(cost):
            raise HostileFrames(ENHANCE_YOUR_CALM, "Too many frames without a part of a body arrived.")
