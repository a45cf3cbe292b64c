"""The heartbeat of an engine process: its loop calls ``beat`` while it waits and between the parts of a long step.

The thread that computes also sends the beats, so a loop that is stuck sends none. Code at any depth may call ``beat``
without being passed anything; it does nothing in threads that have not called ``send_beats``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from time import monotonic

BEAT_SECONDS = 1.0  # between two beats, at least


class _Heart:
    def __init__(self, send_beat: Callable[[], None]):
        self.send_beat, self.next_beat_at = send_beat, 0.0


_HEART: ContextVar[_Heart | None] = ContextVar("heart", default=None)


def send_beats(send_beat: Callable[[], None]) -> None:
    """Make ``beat`` call ``send_beat`` in this thread from now on, at most once per BEAT_SECONDS."""
    _HEART.set(_Heart(send_beat))


def beat() -> None:
    """Send a sign of life, unless the last one was just now."""
    heart = _HEART.get()
    if heart is not None and (now := monotonic()) >= heart.next_beat_at:
        heart.next_beat_at = now + BEAT_SECONDS
        heart.send_beat()
