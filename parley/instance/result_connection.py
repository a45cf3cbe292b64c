"""One connection for results: sending, heartbeats, and its replacement by a newer connection.

Handles frames as bytes; the coordinator it serves is known only by a small protocol.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from parley.disagg.wire import result_frames

HEARTBEAT_SILENCE = 5.0  # seconds without data until a heartbeat is sent
SILENCE_CHECK_PERIOD = 1.0  # seconds between two checks for silence


class ResultSink(Protocol):
    """A connection to write to."""

    def write_part(self, data: bytes) -> bool:
        """Send data, and return whether more can be sent at once."""

    async def write_stream(self, data: bytes) -> None:
        """Send data, and wait until more can be sent."""

    def abort_connection(self) -> None:
        """Break the connection."""


class ConnectionClient(Protocol):
    """The coordinator that the connection serves."""

    def flush_frames(self) -> None:
        """Send queued frames, as the connection accepts more."""

    def drop_old_frames(self) -> None:
        """Drop old frames; called from time to time."""

    def detach_connection(self, connection: ResultConnection) -> None:
        """Forget the connection, which has ended."""


class ResultConnection:
    """One connection of a coordinator, for as long as it is the current one. ``serve_connection`` serves it,
    ``end_connection`` ends it.
    """

    def __init__(self, client: ConnectionClient, sink: ResultSink):
        self.can_send = False  # more can be sent at once
        self.has_ended = False
        self._client, self._sink = client, sink
        self._last_data = b""
        self._last_sent = time.monotonic()  # when data was last sent
        self._wake_event = asyncio.Event()

    def send_frames(self, data: bytes) -> None:
        """Send data. Allowed only while ``can_send``."""
        self._last_sent = time.monotonic()
        self.can_send = self._sink.write_part(data)
        if not self.can_send:
            self._wake_event.set()

    async def serve_connection(self, first: bytes) -> None:
        """Send ``first``, then heartbeats and everything passed to ``send_frames``, until the end."""
        try:
            await self._send_waiting(first)
            while not self.has_ended:
                try:
                    async with asyncio.timeout(SILENCE_CHECK_PERIOD):
                        await self._wake_event.wait()
                except TimeoutError:
                    self._client.drop_old_frames()
                    if time.monotonic() - self._last_sent > HEARTBEAT_SILENCE:
                        self.send_frames(result_frames.HEARTBEAT_FRAME)
                    continue
                self._wake_event.clear()
                if not self.can_send and not self.has_ended:
                    await self._send_waiting(b"")
            await self._sink.write_stream(self._last_data)
        finally:
            self.has_ended = True
            self._client.detach_connection(self)

    def end_connection(self, last_data: bytes = b"") -> None:
        """End the connection after sending ``last_data``, but no other waiting data."""
        is_reading = self.can_send
        self.has_ended, self.can_send, self._last_data = True, False, last_data
        self._wake_event.set()
        if not is_reading:  # the peer does not read, so waiting could take forever
            self._sink.abort_connection()

    async def _send_waiting(self, data: bytes) -> None:
        await self._sink.write_stream(data)
        if not self.has_ended:
            self.can_send = True
            self._client.flush_frames()
