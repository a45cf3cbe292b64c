"""One request and its response on a stream of an HTTP/2 connection, as the application finds it in the ASGI scope.

The application sees an ``HttpCycle``, as with HTTP/1.1. Its connection is the stream: closing it resets the
stream, and a stream that its client does not read blocks nothing but its own response.
"""

from __future__ import annotations

import asyncio
import re
from asyncio.events import TimerHandle
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from parley.web.framing.http2_head import CONNECTION_FIELDS, HeaderFields
from parley.web.http_cycle import CHUNK_PER_EVENT, HttpCycle, split_written_events

LOW_WATER_LIMIT = HIGH_WATER_LIMIT // 4  # unsent bytes of a response; with fewer, its application continues
MIN_READ_BYTES = HIGH_WATER_LIMIT  # bytes of a response that a client has to take in each ``write_timeout``
CANCEL, INTERNAL_ERROR = 8, 2  # error codes of RST_STREAM
LINE_BREAK = re.compile(rb"[\r\n\0]")


class StreamOwner(Protocol):
    """The connection of a stream."""

    write_paused: bool  # True: the client's system takes no more data

    def get_extra_info(self, name: str) -> Any:
        """Return a property of the transport."""

    def send_headers(self, stream: Http2Stream, headers: HeaderFields, *, last: bool) -> None:
        """Send headers of a response, ``last`` if it has no body."""

    def send_stream(self, stream: Http2Stream) -> None:
        """Send the queued data of a stream, now or as soon as the client takes it."""

    def acknowledge_data(self, stream: Http2Stream, size: int) -> None:
        """Let the client send ``size`` bytes more."""

    def reset_stream(self, stream: Http2Stream, code: int) -> None:
        """End a stream at once."""

    def close_when_idle(self) -> None:
        """Accept no more streams, and close the connection after the last one."""


class Http2Stream:
    """The two directions of a stream, with the methods that an ``HttpCycle`` uses of a transport and its flow control.

    ``parts``: of the response's body, not sent yet; each becomes one or more frames. ``sent_bytes`` of its body.
    ``is_finished``: ``parts`` ends the response. ``is_open``: it has neither been reset nor sent to its end.
    """

    def __init__(self, number: int, owner: StreamOwner, write_timeout: float):
        self.number = number
        self.is_open = True
        self.is_finished = False
        self.parts: deque[bytes] = deque()
        self.part_offset = 0  # bytes of the first part that were sent
        self.sent_bytes = 0
        self.cycle: Http2Cycle | None = None
        self.watchers: set[Callable[[], None]] = set()
        self._owner = owner
        self._queued_bytes = 0
        self._write_timeout = write_timeout
        self._over_high_water = False
        self._may_write = asyncio.Event()
        self._read_deadline: TimerHandle | None = None
        self.update_write_pause()

    # -- as a transport and its flow control

    @property
    def write_paused(self) -> bool:
        """Whether the application has to wait before it writes more."""
        return not self._may_write.is_set()

    async def drain(self) -> None:
        """Wait until the application may write."""
        await self._may_write.wait()

    def resume_reading(self) -> None:
        """Do nothing: the connection is read all the time, and the window says how much may come."""

    def is_closing(self) -> bool:
        """Whether the stream has ended."""
        return not self.is_open

    def get_extra_info(self, name: str) -> Any:
        """Return a property of the connection's transport."""
        return self._owner.get_extra_info(name)

    def write(self, data: bytes) -> None:
        """Queue a part of the body."""
        if self.is_open:
            self.parts.append(data)
            self._queued_bytes += len(data)
            self._owner.send_stream(self)

    def close(self) -> None:
        """Reset the stream: the response is not complete."""
        self._owner.reset_stream(self, INTERNAL_ERROR)

    def abort(self) -> None:
        """Reset the stream, and drop its unsent data."""
        self._owner.reset_stream(self, INTERNAL_ERROR)

    # -- for the cycle

    def send_headers(self, headers: HeaderFields, *, last: bool = False) -> None:
        """Send headers of the response."""
        self._owner.send_headers(self, headers, last=last)

    def finish(self, data: bytes) -> None:
        """Queue the last part of the body, unless the headers were the last."""
        if self.is_open:
            self.is_finished = True
            self.write(data)

    def acknowledge(self, size: int) -> None:
        """Tell the client that it may send ``size`` bytes more: the application has read as many of the request's
        body.
        """
        self._owner.acknowledge_data(self, size)

    def close_connection_when_idle(self) -> None:
        """Accept no more requests on this connection."""
        self._owner.close_when_idle()

    # -- for the connection

    def next_chunk(self, size: int) -> tuple[bytes, bool]:
        """Remove up to ``size`` bytes from the first part. Return them, and whether the response ends with them."""
        part, offset = self.parts[0], self.part_offset
        chunk = part[offset : offset + size] if offset or size < len(part) else part
        self.part_offset += len(chunk)
        if self.part_offset == len(part):
            self.parts.popleft()
            self.part_offset = 0
        self._queued_bytes -= len(chunk)
        self.sent_bytes += len(chunk)
        return chunk, self.is_finished and not self.parts

    def update_write_pause(self) -> None:
        """Pause or resume the application, after something was queued or sent, or the connection was blocked."""
        self._over_high_water = self._queued_bytes > (LOW_WATER_LIMIT if self._over_high_water else HIGH_WATER_LIMIT)
        if self.is_open and (self._over_high_water or self._owner.write_paused):
            self._may_write.clear()
        else:
            self._may_write.set()
        if not self.parts:
            self._cancel_read_deadline()

    def end(self) -> int:
        """Drop unsent data: the stream has ended. Return the number of body bytes that the application has not read.

        If the response is not complete, the application's task learns that its client has gone.
        """
        self.is_open = False
        self.parts.clear()
        self._queued_bytes = 0
        self.update_write_pause()
        cycle, self.cycle = self.cycle, None  # breaks a reference cycle, so that memory is freed at once
        if cycle is None:
            return 0
        cycle.mark_disconnected()
        if cycle.disconnected:
            for on_disconnect in tuple(self.watchers):
                on_disconnect()
        return cycle.drop_unread_body()

    def watch_progress(self) -> None:
        """From now on, reset the stream if the client takes too little of the response: some of it is not sent yet."""
        if self._read_deadline is None and self.parts:
            self._start_read_deadline()

    def _start_read_deadline(self) -> None:
        enough_bytes = self.sent_bytes + MIN_READ_BYTES

        def check_progress() -> None:
            self._read_deadline = None
            if self.sent_bytes >= enough_bytes:
                self._start_read_deadline()
            else:
                self._owner.reset_stream(self, CANCEL)

        self._read_deadline = asyncio.get_running_loop().call_later(self._write_timeout, check_progress)

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None


class Http2Cycle(HttpCycle):
    """The request of a stream and its response."""

    def __init__(
        self,
        scope: Scope,
        stream: Http2Stream,
        default_headers: list[tuple[bytes, bytes]],
        expects_continue: bool,
        on_complete: Callable[[], None],
    ):
        super().__init__(scope, stream, stream, stream.watchers, default_headers, True, expects_continue, on_complete)
        self._stream = stream
        self._headers: HeaderFields | None = None  # of the response, until they are sent

    def drop_unread_body(self) -> int:
        """Drop the unread part of the body, and return its size in bytes."""
        size, self._unread_body = len(self._unread_body), b""
        return size

    async def receive_message(self) -> Message:
        """Implement ASGI's ``receive``."""
        message = await super().receive_message()
        if size := len(message.get("body", b"")):
            self._stream.acknowledge(size)
        return message

    def send_continue(self) -> None:
        """Send an interim response, unless the response has begun."""
        if not self.response_started and self._stream.is_open:
            self._stream.send_headers([(b":status", b"100")])

    def begin_response(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Set status and headers, which are sent with the first part. Raises RuntimeError for a line break in them."""
        if self.disconnected or self.response_complete:
            return
        fields: HeaderFields = [(b":status", b"%d" % status)]
        for name, value in (*self._default_headers, *headers):
            name = name.lower()
            if LINE_BREAK.search(value) or LINE_BREAK.search(name):
                raise RuntimeError("A header has a line break.")
            if name not in CONNECTION_FIELDS:
                fields.append((name, value))
            elif name == b"connection" and value.lower() == b"close":
                self._stream.close_connection_when_idle()
        self.response_started, self._expects_continue = True, False
        self._headers = fields
        self._has_no_body = self._is_head_request or status in (204, 304)
        self._chunk_per_event = CHUNK_PER_EVENT in self.scope

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Write a part of a response that has begun and is not ``write_blocked``, without a coroutine.

        Return True if another part may be written in the same way.
        """
        if self.disconnected or self.response_complete:
            return True
        stream, self.response_complete = self._stream, last
        if self._has_no_body:
            data = b""
        if self._headers is not None:
            headers, self._headers = self._headers, None
            stream.send_headers(headers, last=last and not data)
        if data and self._chunk_per_event:
            *events, data = split_written_events(data)
            for event in events:
                stream.write(event)
        if last:
            stream.finish(data)
            self._on_complete()
        elif data:
            stream.write(data)
        return not stream.write_paused
