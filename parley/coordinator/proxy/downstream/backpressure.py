"""The backpressure buffer: sends a stream at the client's pace, and pauses the sender while the client does not read.

Knows one client and no instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from parley.coordinator.proxy.downstream.client import DownstreamClient

PauseSender = Callable[[bool], Coroutine[Any, Any, None]]  # True pauses a sender, False resumes it

PAUSE_ABOVE = 32 << 10  # buffered bytes above which the sender is paused
DROP_ABOVE = 1 << 20  # buffered bytes above which the client is dropped, because the sender has not paused


class BackpressureBuffer:
    """The body of an answer that has begun. It may come from several senders, one after the other."""

    __slots__ = ("_buffered_bytes", "_buffered_parts", "_client", "_cycle", "_drain_task", "_is_complete",
                 "_pause_sender", "_pause_task", "_paused_sender", "_watcher")  # fmt: skip

    def __init__(self, client: DownstreamClient):
        self._client, self._cycle, self._watcher = client, client.http_cycle, client.watcher
        self._buffered_parts: list[bytes] | None = None  # None: everything was sent
        self._buffered_bytes = 0
        self._is_complete = False  # the buffer contains the end of the answer
        self._drain_task: asyncio.Task[None] | None = None
        self._pause_sender: PauseSender | None = None  # pauses the current sender
        self._paused_sender: PauseSender | None = None  # the one that has been paused
        self._pause_task: asyncio.Task[None] | None = None

    def change_sender(self, pause_sender: PauseSender | None) -> None:
        """Expect further parts from another sender. ``pause_sender``: None if it cannot be paused."""
        self._pause_sender = pause_sender

    def send_part(self, data: bytes) -> None:
        """Send a part now, or once the client has read the parts before it."""
        if self._watcher is not None:
            data = self._watcher.watch_stream(data)
            if not data:
                return
        if self._buffered_parts is not None:
            self._buffered_parts.append(data)
            self._buffered_bytes += len(data)
            if self._buffered_bytes > DROP_ABOVE:  # the sender was asked to pause and did not, or cannot
                self._client.abort_connection()
            elif (
                self._buffered_bytes > PAUSE_ABOVE
                and self._pause_sender is not None
                and self._paused_sender is not self._pause_sender
            ):
                self._paused_sender = self._pause_sender
                self._pause_task = asyncio.get_running_loop().create_task(self._paused_sender(True))
        elif not self._cycle.write_part(data):
            self._buffered_parts = []
            self._drain_task = asyncio.get_running_loop().create_task(self._drain_buffer())

    def send_last_part(self, data: bytes) -> None:
        """Send the last part."""
        if self._watcher is not None:
            data = self._watcher.watch_stream(data)
        if self._buffered_parts is not None:
            self._buffered_parts.append(data)
            self._is_complete = True
        else:
            self._client.finish_answer(data)

    async def wait_until_read(self) -> None:
        """Wait until a slow client has read the rest of a complete answer; stop sending an incomplete one."""
        if self._drain_task is None:
            return
        if not self._is_complete:
            self._drain_task.cancel()
        await asyncio.gather(self._drain_task, return_exceptions=True)

    async def _drain_buffer(self) -> None:
        """Send the buffer as the client reads it, then resume the sender."""
        assert self._buffered_parts is not None
        while True:
            data, is_complete = b"".join(self._buffered_parts), self._is_complete
            self._buffered_parts.clear()
            self._buffered_bytes = 0
            await self._client.write_stream(data, "", last=is_complete)
            if is_complete:
                return
            if self._buffered_parts or self._is_complete or self._cycle.write_blocked:
                continue
            paused_sender, self._paused_sender = self._paused_sender, None
            if paused_sender is None:
                break
            if self._pause_task is not None:
                await self._pause_task
            if paused_sender is self._pause_sender:  # the sender has not changed
                await paused_sender(False)
        self._buffered_parts = self._drain_task = None
