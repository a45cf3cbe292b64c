"""The backpressure buffer: sends a stream at the client's pace, and pauses the sender while the client does not read.

Knows one client and no instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from parley.coordinator.proxy.client import Caller

HOLD = 32 << 10  # buffered bytes above which the sender is paused
QUEUE = 1 << 20  # buffered bytes above which the client is dropped, because the sender has not paused


class Outflow:
    """The body of an answer that has begun.

    ``pause_sender(True)`` pauses the current sender, ``pause_sender(False)`` resumes it; None if it cannot be paused.
    """

    def __init__(self, caller: Caller):
        self.hold: Callable[[bool], Coroutine[Any, Any, None]] | None = None
        self._caller, self._cycle = caller, caller.cycle
        self._queue: list[bytes] | None = None  # None: everything was sent
        self._queued = 0
        self._over = False  # the buffer contains the end of the answer
        self._draining: asyncio.Task[None] | None = None
        self._held: Callable[[bool], Coroutine[Any, Any, None]] | None = None  # of the sender paused
        self._telling: asyncio.Task[None] | None = None

    def put(self, data: bytes) -> None:
        """Send a part now, or once the client has read the parts before it."""
        if self._queue is not None:
            self._queue.append(data)
            self._queued += len(data)
            if self._queued > QUEUE:  # the sender was asked to pause and did not, or cannot
                self._caller.abort()
            elif self._queued > HOLD and self.hold is not None and self._held is not self.hold:
                self._held = self.hold
                self._telling = asyncio.get_running_loop().create_task(self._held(True))
        elif not self._cycle.part(data):
            self._queue = []
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    def finish(self, data: bytes) -> None:
        """Send the last part."""
        if self._queue is not None:
            self._queue.append(data)
            self._over = True
        else:
            self._caller.finish(data)

    async def settle(self) -> None:
        """Wait until a slow client has read the rest of a complete answer; stop sending an incomplete one."""
        if self._draining is None:
            return
        if not self._over:
            self._draining.cancel()
        await asyncio.gather(self._draining, return_exceptions=True)

    async def _drain(self) -> None:
        """Send the buffer as the client reads it, then resume the sender."""
        assert self._queue is not None
        while True:
            data, over = b"".join(self._queue), self._over
            self._queue.clear()
            self._queued = 0
            await self._caller.write(data, "", last=over)
            if over:
                return
            if self._queue or self._over or self._cycle.blocked:
                continue
            held, self._held = self._held, None
            if held is None:
                break
            if self._telling is not None:
                await self._telling
            if held is self.hold:  # the sender has not changed
                await held(False)
        self._queue = self._draining = None
