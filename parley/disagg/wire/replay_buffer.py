"""Frames that were sent to a coordinator, kept for a while: what a broken connection lost is sent again.

They are counted, all of them, from 0. Knows no connection and no request.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

KEEP = 30.0  # seconds that sent frames are kept
KEPT = 32 << 20  # bytes of them: more than the buffers of a connection hold, and so more than a break can lose


class Sent(NamedTuple):
    """Frames that were sent together: the number of the first, they, their bytes, when."""

    first: int
    frames: list[bytes]
    size: int
    time: float


class History:
    def __init__(self) -> None:
        self._number = 0  # of the next frame to be sent
        self._sent: deque[Sent] = deque()
        self._size = 0

    def add(self, made: list[bytes], size: int) -> None:
        """These frames, of so many bytes together, are being sent."""
        self._sent.append(Sent(self._number, made, size, time.monotonic()))
        self._size += size
        self._number += len(made)
        self.forget()

    def forget(self) -> None:
        """Keep no more than is to be kept."""
        old = time.monotonic() - KEEP
        while self._sent and (self._size > KEPT or self._sent[0].time < old):
            self._size -= self._sent.popleft().size

    def since(self, number: int) -> bytes | None:
        """What was sent from this frame on, None if that is not known any more (or not yet)."""
        begin = self._sent[0].first if self._sent else self._number
        if not begin <= number <= self._number:
            return None
        parts: list[bytes] = []
        for sent in self._sent:
            parts += sent.frames[max(0, number - sent.first) :]
        return b"".join(parts)
