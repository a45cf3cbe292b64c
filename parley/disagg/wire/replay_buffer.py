"""Frames that were recently sent to a coordinator, kept so that they can be sent again after a broken connection.

All frames are numbered from 0. Knows neither connections nor requests.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

KEEP = 30.0  # seconds that sent frames are kept
KEPT = 32 << 20  # bytes that are kept: more than a connection's buffers hold, hence more than a break can lose


class Sent(NamedTuple):
    """Frames that were sent together: number of the first, the frames, their size in bytes, and the time."""

    first: int
    frames: list[bytes]
    size: int
    time: float


class History:
    """The replay buffer of one coordinator."""

    def __init__(self) -> None:
        self._number = 0  # of the next frame
        self._sent: deque[Sent] = deque()
        self._size = 0

    def add(self, made: list[bytes], size: int) -> None:
        """Record frames that are being sent, ``size`` bytes together."""
        self._sent.append(Sent(self._number, made, size, time.monotonic()))
        self._size += size
        self._number += len(made)
        self.forget()

    def forget(self) -> None:
        """Drop frames beyond the limits of age and size."""
        old = time.monotonic() - KEEP
        while self._sent and (self._size > KEPT or self._sent[0].time < old):
            self._size -= self._sent.popleft().size

    def since(self, number: int) -> bytes | None:
        """Return everything sent from frame ``number`` on, or None if that is dropped or not sent yet."""
        begin = self._sent[0].first if self._sent else self._number
        if not begin <= number <= self._number:
            return None
        parts: list[bytes] = []
        for sent in self._sent:
            parts += sent.frames[max(0, number - sent.first) :]
        return b"".join(parts)
