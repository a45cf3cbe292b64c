"""Frames that were recently sent to a coordinator, kept so that they can be sent again after a broken connection.

All frames are numbered from 0. Knows neither connections nor requests.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

REPLAY_SECONDS = 30.0  # seconds that sent frames are kept
# bytes that are kept: more than the buffers of a connection hold, which is all that it can lose
REPLAY_BYTES = 32 << 20


class SentFrames(NamedTuple):
    """Frames that were sent together: number of the first, the frames, their size in bytes, and the time."""

    first_number: int
    frames: list[bytes]
    size: int
    sent_at: float


class ReplayBuffer:
    """The replay buffer of one coordinator."""

    def __init__(self) -> None:
        self._next_number = 0  # the number of the next frame
        self._sent_frames: deque[SentFrames] = deque()
        self._kept_bytes = 0

    def add_sent(self, frames: list[bytes], size: int) -> None:
        """Record frames that are being sent, ``size`` bytes together."""
        self._sent_frames.append(SentFrames(self._next_number, frames, size, time.monotonic()))
        self._kept_bytes += size
        self._next_number += len(frames)
        self.drop_expired()

    def drop_expired(self) -> None:
        """Drop frames beyond the limits of age and size."""
        oldest_time = time.monotonic() - REPLAY_SECONDS
        while self._sent_frames and (self._kept_bytes > REPLAY_BYTES or self._sent_frames[0].sent_at < oldest_time):
            self._kept_bytes -= self._sent_frames.popleft().size

    def frames_since(self, number: int) -> bytes | None:
        """Return everything sent from frame ``number`` on, or None if that is dropped or not sent yet."""
        first_kept = self._sent_frames[0].first_number if self._sent_frames else self._next_number
        if not first_kept <= number <= self._next_number:
            return None
        parts: list[bytes] = []
        for sent in self._sent_frames:
            parts += sent.frames[max(0, number - sent.first_number) :]
        return b"".join(parts)
