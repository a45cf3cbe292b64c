"""One connection for results, as long as it lasts: what is sent over it, heartbeats, and how it gives way to another.

Knows frames as bytes, and of whose they are only what has to be told of the connection.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from parley.disagg.wire import result_frames

SILENCE = 5.0  # seconds after which a heartbeat is sent
CHECK = 1.0  # seconds between two looks at the silence


class Sink(Protocol):
    """A connection. ``part`` sends and says whether it takes more at once; ``write`` waits until it does."""

    def part(self, data: bytes) -> bool: ...

    async def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


class Client(Protocol):
    """Whose connection it is."""

    def flush(self) -> None:
        """More can be sent."""

    def forget(self) -> None:
        """Time has passed."""

    def detach(self, line: Line) -> None:
        """It has ended."""


class Line:
    """One connection of a client, as long as it is that. ``run`` serves it, ``end`` ends it."""

    def __init__(self, client: Client, sink: Sink):
        self.flowing = False  # more can be sent at once
        self.ended = False
        self._client, self._sink = client, sink
        self._farewell = b""
        self._time = time.monotonic()  # when something was sent last
        self._stir = asyncio.Event()

    def send(self, data: bytes) -> None:
        """Send while it is flowing."""
        self._time = time.monotonic()
        self.flowing = self._sink.part(data)
        if not self.flowing:
            self._stir.set()

    async def run(self, first: bytes) -> None:
        """Send ``first`` and what there is from then on, until its end."""
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
        """Nothing but this is to be sent any more."""
        reads = self.flowing
        self.ended, self.flowing, self._farewell = True, False, farewell
        self._stir.set()
        if not reads:  # then it would have to be waited for
            self._sink.abort()

    async def _write(self, data: bytes) -> None:
        await self._sink.write(data)
        if not self.ended:
            self.flowing = True
            self._client.flush()
