"""The HTTP client for one instance: reuses connections, writes each request in one piece, streams the answers.

Knows no API and no cluster. An answer goes to an ``AnswerSink`` part by part, or ``request_answer`` collects it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT = 5.0  # seconds to open a connection
IDLE_SECONDS = 20.0  # seconds that an idle connection stays reusable; servers keep them open longer
MAX_IDLE = 2048  # idle connections that are kept, enough for as many concurrent requests
MAX_COLLECTED_BYTES = 256 << 20  # bytes of a collected answer
MAX_HEAD_BYTES = 1 << 20  # bytes of an answer that belong to no body: its head and trailers

HeaderPairs = Sequence[tuple[bytes, bytes]]


class InstanceUnreachable(Exception):
    """No connection could be opened. ``refused``: nothing listens there."""

    def __init__(self, message: str, *, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class ConnectionBroken(Exception):
    """The connection ended, or sent data that is not HTTP, before the answer was complete.

    ``answer_begun``: a part of the answer had arrived; ``unsent``: a part of the request had not been sent;
    ``abandoned``: the answer was dropped on this side.
    """

    def __init__(self, message: str, *, answer_begun: bool = False, unsent: bool = False, abandoned: bool = False):
        super().__init__(message)
        self.answer_begun, self.unsent, self.abandoned = answer_begun, unsent, abandoned


class AnswerSink(Protocol):
    """Receives an answer: ``receive_head`` and ``receive_data``, then ``receive_end`` once, with the error if there was
    one.
    """

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Handle status and headers; names are in lower case."""

    def receive_data(self, data: bytes) -> None:
        """Handle a part of the body."""

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """Handle the end of the answer."""


class InstanceAnswer(NamedTuple):
    """A complete answer; header names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class HttpClientConnection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, http_client: InstanceHttpClient):
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.idle_since = 0.0  # time when it became idle
        self._http_client = http_client
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sink: AnswerSink | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._bodiless = self._until_close = self._answer_begun = False
        self._paused = False
        self._unsent = False  # written data waits until the other side reads
        self._head_size = 0  # bytes since the last part of a body

    def send_request(self, parts: Sequence[bytes], sink: AnswerSink, *, bodiless: bool = False) -> None:
        """Write a request whose answer goes to ``sink``. ``bodiless``: the answer has a head only."""
        self._sink, self._bodiless, self._answer_begun = sink, bodiless, False
        self._http_client.busy_connections.add(self)
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def abort_silently(self, sink: AnswerSink) -> None:
        """Close the connection at once, without notifying the sink of the current answer.

        The sink of an earlier answer has no say any more: another request on the connection would wait for ever.
        """
        if sink is self._sink:
            self._sink = None
            self.transport.abort()

    def fail_connection(self, message: str, *, abandoned: bool = True) -> None:
        """Close the connection at once and fail its request; ``abandoned``: the answer is no longer wanted."""
        sink, self._sink = self._sink, None
        self.transport.abort()
        if sink is not None:
            sink.receive_end(ConnectionBroken(message, answer_begun=self._answer_begun, abandoned=abandoned))

    def set_reading_paused(self, sink: AnswerSink, paused: bool) -> None:
        """Pause or resume reading, as the sink of the current answer asks.

        The sink of an earlier answer has no say any more: the connection may serve another request by now.
        """
        if sink is self._sink:
            self._set_paused(paused)

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused and not self.transport.is_closing():
            self._paused = paused
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Feed the parser; fail the request if the data is not HTTP."""
        self._http_client.last_heard = time.monotonic()
        self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail_connection("The answer is not valid HTTP.", abandoned=False)
            return
        if self._head_size > MAX_HEAD_BYTES:
            self.fail_connection("The head of the answer is too large.", abandoned=False)

    def eof_received(self) -> None:
        """Return None, so that the transport closes."""

    def pause_writing(self) -> None:
        """Note that written data waits to be sent."""
        self._unsent = True

    def resume_writing(self) -> None:
        """Note that all written data was sent."""
        self._unsent = False

    def connection_lost(self, error: Exception | None) -> None:
        """End the pending answer: complete if it extends to the end of the connection, else broken."""
        self._http_client.forget_connection(self)
        self._parser = None  # break the reference cycle
        sink, self._sink = self._sink, None
        if sink is not None:
            is_complete = self._answer_begun and self._until_close and error is None
            broken = ConnectionBroken("The connection ended.", answer_begun=self._answer_begun, unsent=self._unsent)
            sink.receive_end(None if is_complete else broken)

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        """Start a new header list."""
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Hand the head to the sink."""
        status = self._parser.get_status_code()
        if status < 200:  # informational: the final response follows
            return
        if self._sink is None:
            self.transport.abort()
            return
        names = {name for name, _ in self._headers}
        self._answer_begun = True
        self._until_close = not (names & {b"content-length", b"transfer-encoding"} or status in (204, 304))
        self._sink.receive_head(status, self._headers)
        if self._bodiless:  # the parser does not know this, and waits for a body
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.receive_end(None)
            self.transport.close()

    def on_body(self, data: bytes) -> None:
        """Hand a part of the body to the sink."""
        self._head_size = 0
        if self._sink is not None:
            self._sink.receive_data(data)

    def on_message_complete(self) -> None:
        """End the answer, and keep the connection if it can be reused."""
        if self._parser.get_status_code() < 200:
            return
        self._head_size = 0
        sink, self._sink = self._sink, None
        if sink is None:
            return
        self._set_paused(False)  # the end may arrive together with the data that made the sink pause
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            self._http_client.return_connection(self)
        else:
            self.transport.close()
        sink.receive_end(None)


class CollectedAnswer:
    """A sink that collects an answer of at most ``limit`` bytes of body in ``future``."""

    def __init__(self, connection: HttpClientConnection, limit: int = MAX_COLLECTED_BYTES):
        self.future: asyncio.Future[InstanceAnswer] = asyncio.get_running_loop().create_future()
        self._connection, self._limit = connection, limit
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Store status and headers."""
        self._status, self._headers = status, headers

    def receive_data(self, data: bytes) -> None:
        """Store a part of the body; fail above the limit."""
        self._parts.append(data)
        self._limit -= len(data)
        if self._limit < 0:
            self._connection.abort_silently(self)
            self.receive_end(ConnectionBroken("The answer is too large.", answer_begun=True))

    def drop_answer(self, message: str) -> None:
        """Drop the answer: the caller that waits for it gets ConnectionBroken."""
        if not self.future.done():
            self._connection.fail_connection(message)

    def receive_end(self, error: ConnectionBroken | None) -> None:
        """Resolve the future with the answer or the error."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(InstanceAnswer(self._status, self._headers, b"".join(self._parts)))


class InstanceHttpClient:
    """The HTTP client for the instance at ``url``.

    ``context``: TLS for https. ``last_heard``: when data last arrived.
    """

    def __init__(self, url: str, context: ssl.SSLContext | None = None):
        split = urlsplit(url)
        self.host, tls = split.hostname or "", split.scheme == "https"
        self.port = split.port or (443 if tls else 80)
        self._context = context or ssl.create_default_context() if tls else None
        self._host_line = b"host: %b\r\n" % split.netloc.encode()
        self.busy_connections: set[HttpClientConnection] = set()
        self.last_heard = 0.0
        self._idle_connections: dict[HttpClientConnection, None] = {}  # in order of last use
        self._closed = False

    async def open_connection(self) -> HttpClientConnection:
        """Open a new connection. Raises InstanceUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(
                    lambda: HttpClientConnection(self), self.host, self.port, ssl=self._context
                )
        except TimeoutError:
            raise InstanceUnreachable("The connection timed out.") from None
        except ConnectionRefusedError:
            raise InstanceUnreachable("Nothing listens there.", refused=True) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded for DNS
            raise InstanceUnreachable(f"No connection could be made: {type(error).__name__}.") from None
        return connection

    def take_idle(self) -> HttpClientConnection | None:
        """Return an idle connection that is still usable as far as known; None if there is none."""
        while self._idle_connections:
            connection, _ = self._idle_connections.popitem()
            if not connection.transport.is_closing():
                if time.monotonic() - connection.idle_since < IDLE_SECONDS:
                    return connection
                connection.transport.close()
        return None

    def format_request(
        self, method: bytes, target: bytes, headers: HeaderPairs, body: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the parts of a request to write. ``headers`` contain neither host nor content-length."""
        size = sum(map(len, body))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if size or method not in (b"GET", b"HEAD"):
            lines += b"content-length: %d\r\n" % size
        head = b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, self._host_line, lines)
        return [head + body[0]] if len(body) == 1 and size < 65536 else [head, *body]

    async def request_answer(
        self,
        method: bytes,
        target: bytes,
        headers: HeaderPairs = (),
        body: Sequence[bytes] = (),
        *,
        resend: bool = True,
        limit: int = MAX_COLLECTED_BYTES,
        on_sent: Callable[[CollectedAnswer], None] = lambda whole: None,
    ) -> InstanceAnswer:
        """Send a request and return the collected answer.

        ``resend``: send it again once per reused connection that ends without an answer, mostly because the server had
        closed it. ``limit``: bytes that the answer's body may have. ``on_sent`` is called with the sink, which can drop
        the answer. Raises InstanceUnreachable, ConnectionBroken.
        """
        parts = self.format_request(method, target, headers, body)
        while True:
            idle_connection = self.take_idle()
            connection = idle_connection or await self.open_connection()
            pending_answer = CollectedAnswer(connection, limit)
            connection.send_request(parts, pending_answer, bodiless=method == b"HEAD")
            on_sent(pending_answer)
            try:
                return await pending_answer.future
            except ConnectionBroken as broken:
                if idle_connection is None or broken.answer_begun or not resend:
                    raise
            except asyncio.CancelledError:
                connection.abort_silently(pending_answer)
                raise

    def return_connection(self, connection: HttpClientConnection) -> None:
        """Return a connection to the pool."""
        self.busy_connections.discard(connection)
        if self._closed or len(self._idle_connections) >= MAX_IDLE:
            connection.transport.close()
            return
        connection.idle_since = time.monotonic()
        self._idle_connections[connection] = None

    def forget_connection(self, connection: HttpClientConnection) -> None:
        """Remove a connection that has ended."""
        self.busy_connections.discard(connection)
        self._idle_connections.pop(connection, None)

    def fail_all(self, message: str) -> None:
        """Fail all pending requests and close all connections."""
        for connection in tuple(self.busy_connections):
            connection.fail_connection(message)
        for connection in tuple(self._idle_connections):
            connection.transport.abort()

    def close_idle(self) -> None:
        """Close idle connections now, and busy ones when their request ends."""
        self._closed = True
        while self._idle_connections:
            self._idle_connections.popitem()[0].transport.close()
