"""One HTTP request and its response on a connection, as the application finds it in the ASGI scope.

An ``HttpCycle`` offers more than ASGI: it notifies watchers when the client disconnects, shows whether the client reads
and whether the request body is complete, and accepts parts of a response without a coroutine per part. Each part of a
response is one write, and the headers go out with the first part; with ``CHUNK_PER_EVENT`` in the scope each event of a
stream is a chunk of its own. This module has no limits (those are in ``http_protocol``), no parser and no API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

CYCLE_KEY = "parley.cycle"  # scope key: the request's HttpCycle
CHUNK_PER_EVENT = "parley.chunk_per_event"  # scope key: send each event of a stream as a chunk of its own
EVENT_PATTERN = re.compile(rb".+?(?:\n\n|\Z)", re.DOTALL)
RECORD_PATTERN = re.compile(rb"[^\0\n]*[\0\n]|[^\0\n]+")


class ResponseWriter(Protocol):
    """The destination of an exchange: a connection's ``HttpCycle``, or a substitute with the same methods."""

    @property
    def response_started(self) -> bool:
        """Whether the receiver has the beginning of the response."""

    @property
    def body_complete(self) -> bool:
        """Whether the request's body has arrived completely."""

    @property
    def write_blocked(self) -> bool:
        """Whether the next write has to wait because the client has not read the previous ones."""

    def abort_connection(self) -> None:
        """Drop the response and disconnect the client."""

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Call ``on_disconnect`` when the client disconnects. Return False if it already has."""

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Undo ``watch_disconnect``."""

    async def send_message(self, message: Message) -> None:
        """Send an ASGI message; waits while the client does not read."""

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Write a part without waiting. Return True if another part may be written in the same way."""


class CycleTransport(Protocol):
    """The carrier of a request and its response: a connection, or a stream of one."""

    def write(self, data: bytes) -> None:
        """Send data, now or later."""

    def close(self) -> None:
        """Close the connection after sending all written bytes."""

    def abort(self) -> None:
        """Close the connection at once."""

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""

    def get_extra_info(self, name: str) -> Any:
        """Return a property of the connection, as asyncio's transports do."""


class CycleFlow(Protocol):
    """The flow control of a transport."""

    @property
    def write_paused(self) -> bool:
        """Whether the next write has to wait."""

    async def drain(self) -> None:
        """Wait until something may be written."""

    def resume_reading(self) -> None:
        """Read on, if reading was paused."""


class HttpCycle:
    """One request and its response, and the connection they belong to.

    * ``watchers``: called when the connection is lost.
    * ``default_headers``: put first in every response.
    * ``keep_alive``: keep the connection open after the response. Otherwise it is closed then, or by ``on_complete`` if
      the rest of the request's body is still on its way.
    * ``expects_continue``: the client waits for "100 Continue" before it sends its body.
    * ``on_complete``: called once the whole response has been written.
    """

    __slots__ = ("_chunk_per_event", "_chunked", "_default_headers", "_expects_continue", "_has_news",
                 "_is_head_request", "_on_complete", "_response_head", "_unread_body", "_waiter", "_watchers",
                 "body_complete", "disconnected", "flow", "keep_alive", "response_complete", "response_started",
                 "scope", "transport")  # fmt: skip

    def __init__(
        self,
        scope: Scope,
        transport: CycleTransport,
        flow: CycleFlow,
        watchers: set[Callable[[], None]],
        default_headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        expects_continue: bool,
        on_complete: Callable[[], None],
    ):
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_started = self.response_complete = False
        self.body_complete = False  # True: the request's body has arrived completely
        self._watchers = watchers
        self._default_headers = default_headers
        self._expects_continue = expects_continue
        self._on_complete = on_complete
        self._unread_body = b""
        self._has_news = False  # True: something has happened since the last call of `receive_message`
        self._waiter: asyncio.Future[None] | None = None
        self._response_head = b""
        self._is_head_request = scope["method"] == "HEAD"
        self._chunked = self._chunk_per_event = False

    async def run_app(self, app: ASGIApp) -> None:
        """Run the application for this request. Closes the connection if it did not complete a response."""
        self.scope[CYCLE_KEY] = self
        try:
            await app(self.scope, self.receive_message, self.send_message)
        finally:
            del self.scope[CYCLE_KEY]  # breaks the reference cycle, so that nothing waits for the garbage collector
            if not self.response_complete and not self.disconnected:
                self.transport.close()

    @property
    def write_blocked(self) -> bool:
        """Whether the next write has to wait because the client has not read the previous ones."""
        return self.flow.write_paused and not self.disconnected

    def abort_connection(self) -> None:
        """Close the connection at once and drop unsent data. Do nothing if this request has lost the connection
        already.
        """
        if not self.disconnected:
            self.transport.abort()

    def watch_disconnect(self, on_disconnect: Callable[[], None]) -> bool:
        """Call ``on_disconnect`` when the connection is lost. Return False if it already is."""
        self._watchers.add(on_disconnect)
        self.flow.resume_reading()  # a disconnect is only noticed while reading
        return not self.disconnected and not self.transport.is_closing()

    def unwatch_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        """Undo ``watch_disconnect``."""
        self._watchers.discard(on_disconnect)

    # -- the request

    def feed_body(self, data: bytes) -> int:
        """Append data to the request body. Return the number of bytes that the application has not read yet."""
        self._unread_body += data
        self._wake_receiver()
        return len(self._unread_body)

    def end_body(self) -> None:
        """Mark the request body as complete."""
        self.body_complete = True
        self._wake_receiver()

    def mark_disconnected(self) -> None:
        """Handle the loss of the connection."""
        self.disconnected = not self.response_complete
        self._wake_receiver()

    async def receive_message(self) -> Message:
        """Implement ASGI's ``receive``."""
        if self._expects_continue and not self.transport.is_closing():
            self._expects_continue = False
            self.send_continue()
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._has_news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._has_news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        data, self._unread_body = self._unread_body, b""
        return {"type": "http.request", "body": data, "more_body": not self.body_complete}

    def _wake_receiver(self) -> None:
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send_continue(self) -> None:
        """Send an interim response, unless the response has begun."""
        if not self.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- the answer

    async def send_message(self, message: Message) -> None:
        """Implement ASGI's ``send``."""
        if self.write_blocked:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if self.response_started:
            self.write_part(message.get("body", b""), last=not message.get("more_body", False))
        else:
            self.begin_response(message["status"], message["headers"])

    def begin_response(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Set status and headers, which are sent with the first part. Raises RuntimeError for a line break in them."""
        if self.disconnected or self.response_complete:
            return
        self.response_started, self._expects_continue = True, False
        self._response_head = self._encode_head(status, [*self._default_headers, *headers])

    def write_part(self, data: bytes, *, last: bool = False) -> bool:
        """Write a part of a response that has begun and is not ``write_blocked``, without a coroutine.

        Return True if another part may be written in the same way.
        """
        if self.disconnected or self.response_complete:
            return True
        if self._is_head_request:
            data = b""
        elif self._chunked:
            if self._chunk_per_event:
                data = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in split_written_events(data)])
            elif data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._response_head:
            data, self._response_head = self._response_head + data, b""
        if data:
            self.transport.write(data)
        if last:
            self.response_complete = True
            if not self.keep_alive and self.body_complete:
                self.transport.close()
            self._on_complete()
        return not self.flow.write_paused

    def _encode_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the encoded head. Raises RuntimeError if a header contains a line break."""
        names = dict(headers)
        has_length = b"content-length" in names or status in (204, 304)
        # HTTP/1.0: the body ends with the connection.
        self._chunked = not has_length and self.scope["http_version"] != "1.0"
        self._chunk_per_event = CHUNK_PER_EVENT in self.scope
        if self._chunked and not self._is_head_request:
            headers.append((b"transfer-encoding", b"chunked"))
        if names.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"
        if head.count(b"\n") != len(headers) + 2 or head.count(b"\r") != len(headers) + 2:
            raise RuntimeError("A header has a line break.")
        return head


def split_written_events(data: bytes) -> list[bytes]:
    """Cut a part of a stream into its events, which end with an empty line, or into its records.

    A record is a JSON object on one line, followed by a NUL or a line break.
    """
    if data[:1] == b"{":
        return RECORD_PATTERN.findall(data)
    if 0 <= data.find(b"\n\n") < len(data) - 2:
        return EVENT_PATTERN.findall(data)
    return [data] if data else []  # nearly always
