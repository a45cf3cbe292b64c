"""One connection for results: sending, heartbeats, and its replacement by a newer connection.

Handles frames as bytes; the coordinator it serves is known only by a small protocol.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from parley.disagg.wire import result_frames

SILENCE = 5.0  # seconds without data after which a heartbeat is sent
CHECK = 1.0  # seconds between two checks for silence


class Sink(Protocol):
    """A connection to write to."""

    def part(self, data: bytes) -> bool:
        """Send data, and return whether more can be sent at once."""

    async def write(self, data: bytes) -> None:
        """Send data, and wait until more can be sent."""

    def abort(self) -> None:
        """Break the connection."""


class Client(Protocol):
    """The coordinator that the connection serves."""

    def flush(self) -> None:
        """Send queued frames, as the connection accepts more."""

    def forget(self) -> None:
        """Drop old frames; called from time to time."""

    def detach(self, line: Line) -> None:
        """Forget the connection, which has ended."""


class Line:
    """One connection of a coordinator, for as long as it is the current one. ``run`` serves it, ``end`` ends it."""

    def __init__(self, client: Client, sink: Sink):
        self.flowing = False  # more can be sent at once
        self.ended = False
        self._client, self._sink = client, sink
        self._farewell = b""
        self._time = time.monotonic()  # when data was last sent
        self._stir = asyncio.Event()

    def send(self, data: bytes) -> None:
        """Send data. Allowed only while ``flowing``."""
        self._time = time.monotonic()
        self.flowing = self._sink.part(data)
        if not self.flowing:
            self._stir.set()

    async def run(self, first: bytes) -> None:
        """Send ``first``, then heartbeats and everything passed to ``send``, until the end."""
        try:
            await self._write(first)
            while not self.ended:
                try:
                    async with asyncio.timeout(CHECK):
                        await self._stir.wait()
                except TimeoutError:
                    self._client.forget()
                    if time.monotonic() - self._time > SILENCE:
                        self.send(result_frames.HEARTBEAT)
                    continue
                self._stir.clear()
                if not self.flowing and not self.ended:
                    await self._write(b"")
            await self._sink.write(self._farewell)
        finally:
            self.ended = True
            self._client.detach(self)

    def end(self, farewell: bytes = b"") -> None:
        """End the connection; only ``farewell`` is still sent."""
        reads = self.flowing
        self.ended, self.flowing, self._farewell = True, False, farewell
        self._stir.set()
        if not reads:  # the peer does not read, so waiting could take forever
            self._sink.abort()

    async def _write(self, data: bytes) -> None:
        await self._sink.write(data)
        if not self.ended:
            self.flowing = True
            self._client.flush()
