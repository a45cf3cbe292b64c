"""Frames between the main process and an API process. Each is handled on arrival, without waking a task.

An API process gets a frame for each step of an engine and for each request, so waking a task each time would be slow.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from parley.wire import FRAME_HEADER, BrokenFrame, encode_frame, frame_length


class FrameLink(asyncio.Protocol):
    """One end of the socket. ``handle_message`` gets the messages that arrive, one by one; an exception of it
    closes the link. ``ended`` is done at the end of the link, with that exception if there was one.
    ``arrivals``: how often data has arrived."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], handle_message: Callable[[Any], None]):
        self._decoder, self._handle_message = decoder, handle_message
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self.arrivals = 0

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        handle_message: Callable[[Any], None] = lambda message: None,
    ) -> FrameLink:
        """Return a link over a socket. By default messages are dropped until ``change_handler``."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(decoder, handle_message), sock=sock)
        return link

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the other end has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def change_handler(self, handle_message: Callable[[Any], None]) -> None:
        """Pass the messages that arrive from now on to another function."""
        self._handle_message = handle_message

    def send(self, message: Any) -> None:
        """Send a message without blocking."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Close the socket as soon as everything has been sent."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Handle the messages that are complete."""
        if self.ended.done():
            return
        self.arrivals += 1
        data, start = self._unread + data if self._unread else data, 0
        try:
            while len(data) - start >= FRAME_HEADER.size:
                first = start + FRAME_HEADER.size
                end = first + frame_length(data[start:first])
                if end > len(data):
                    break
                start = end
                self._handle_message(self._decoder.decode(memoryview(data)[first:end]))
        except Exception as error:
            self._end_link(error)
            return
        self._unread = data[start:]

    def connection_lost(self, error: Exception | None) -> None:
        """End the link."""
        self._end_link(BrokenFrame("the stream ended inside a frame") if self._unread else None)

    def _end_link(self, error: Exception | None) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
