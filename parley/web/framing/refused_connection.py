"""The rest of a connection whose last response came before the client had sent everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_DROPPED_BYTES = 4 << 20


class RefusedConnection(asyncio.Protocol):
    """Drops data of the client until the client stops, its time is over, or it has sent too much.

    Closing with unread data would make the system send a reset, and many clients that are still sending never read the
    response then (RFC 9112, 9.6). ``on_close`` is called when the connection is lost.
    """

    def __init__(self, transport: asyncio.Transport, seconds: float, on_close: Callable[[RefusedConnection], None]):
        self._transport = transport
        self._dropped_bytes = 0
        self._on_close = on_close
        self._timer = asyncio.get_running_loop().call_later(seconds, transport.abort)
        transport.set_protocol(self)
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Drop data."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > MAX_DROPPED_BYTES:
            self._transport.abort()

    def give_way(self) -> None:
        """Close, because another connection takes its place."""
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._timer.cancel()
        self._on_close(self)
