"""A timer whose action is replaced or cleared far more often than it runs."""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable


class ReusableTimer:
    """A timer with one action at a time.

    Most actions are replaced or cleared before they are due. So the loop's timer is not cancelled each time; if it
    fires too early, it is started again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._action: Callable[[], None] | None = None
        self._due_at = self._fires_at = 0.0
        self._timer: TimerHandle | None = None

    def schedule_action(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in this number of seconds, in place of any earlier action."""
        self._action, self._due_at = action, self._loop.time() + seconds
        if self._timer is None or self._due_at < self._fires_at:
            self._start_timer()

    def clear_action(self) -> None:
        """Drop the action; the timer keeps running."""
        self._action = None

    def stop_timer(self) -> None:
        """Drop the action and cancel the timer."""
        self._action = None
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._fires_at = self._loop.call_at(self._due_at, self._on_timer_due), self._due_at

    def _on_timer_due(self) -> None:
        self._timer = None
        if self._action is None:
            return
        if self._due_at > self._fires_at:
            self._start_timer()
            return
        action, self._action = self._action, None
        action()
