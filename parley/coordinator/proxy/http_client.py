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

CONNECT = 5.0  # seconds to open a connection
FRESH = 20.0  # seconds that an idle connection stays reusable; servers keep them open longer
IDLE = 2048  # idle connections that are kept, enough for as many concurrent requests
LARGEST = 256 << 20  # bytes of a collected answer

Headers = Sequence[tuple[bytes, bytes]]


class Unreachable(Exception):
    """No connection could be opened. ``refused``: nothing listens there."""

    def __init__(self, message: str, *, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class Broken(Exception):
    """The connection ended, or sent data that is not HTTP, before the answer was complete.

    ``answer_begun``: a part of the answer had arrived; ``unsent``: a part of the request had not been sent;
    ``abandoned``: the answer was dropped on this side.
    """

    def __init__(self, message: str, *, begun: bool = False, unsent: bool = False, left: bool = False):
        super().__init__(message)
        self.begun, self.unsent, self.left = begun, unsent, left


class Sink(Protocol):
    """Receives an answer: ``receive_head`` and ``receive_data``, then ``receive_end`` once, with the error if there was
    one.
    """

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Handle status and headers; names are in lower case."""

    def data(self, data: bytes) -> None:
        """Handle a part of the body."""

    def end(self, error: Broken | None) -> None:
        """Handle the end of the answer."""


class Response(NamedTuple):
    """A complete answer; header names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self, upstream: Upstream):
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.since = 0.0  # time when it became idle
        self._upstream = upstream
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._bodiless = self._endless = self._begun = False
        self._paused = False
        self._unsent = False  # written data waits until the other side reads

    def send(self, parts: Sequence[bytes], sink: Sink, *, bodiless: bool = False) -> None:
        """Write a request whose answer goes to ``sink``. ``bodiless``: the answer has a head only."""
        self._sink, self._bodiless, self._begun = sink, bodiless, False
        self._upstream.busy.add(self)
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def abort(self) -> None:
        """Close the connection at once, without notifying the sink."""
        self._sink = None
        self.transport.abort()

    def fail(self, message: str, *, left: bool = True) -> None:
        """Close the connection at once and fail its request; ``abandoned``: the answer is no longer wanted."""
        sink, self._sink = self._sink, None
        self.transport.abort()
        if sink is not None:
            sink.end(Broken(message, begun=self._begun, left=left))

    def pause(self, on: bool) -> None:
        """Pause or resume reading."""
        if on != self._paused and not self.transport.is_closing():
            self._paused = on
            (self.transport.pause_reading if on else self.transport.resume_reading)()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Feed the parser; fail the request if the data is not HTTP."""
        self._upstream.heard = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail("The answer is not valid HTTP.", left=False)

    def eof_received(self) -> None:
        """Let the transport close."""

    def pause_writing(self) -> None:
        """Note that written data waits to be sent."""
        self._unsent = True

    def resume_writing(self) -> None:
        """Note that all written data was sent."""
        self._unsent = False

    def connection_lost(self, error: Exception | None) -> None:
        """End the pending answer: complete if it extends to the end of the connection, else broken."""
        self._upstream.forget(self)
        self._parser = None  # break the reference cycle
        sink, self._sink = self._sink, None
        if sink is not None:
            whole = self._begun and self._endless and error is None
            ended = Broken("The connection ended.", begun=self._begun, unsent=self._unsent)
            sink.end(None if whole else ended)

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
        self._begun = True
        self._endless = not (names & {b"content-length", b"transfer-encoding"} or status in (204, 304))
        self._sink.head(status, self._headers)
        if self._bodiless:  # the parser does not know this, and waits for a body
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.end(None)
            self.transport.close()

    def on_body(self, data: bytes) -> None:
        """Hand a part of the body to the sink."""
        if self._sink is not None:
            self._sink.data(data)

    def on_message_complete(self) -> None:
        """End the answer, and keep the connection if it can be reused."""
        if self._parser.get_status_code() < 200:
            return
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if self._parser.should_keep_alive() and not self.transport.get_write_buffer_size():
            self._upstream.keep(self)
        else:
            self.transport.close()
        sink.end(None)


class Whole:
    """A sink that collects an answer of at most ``limit`` bytes of body in ``future``."""

    def __init__(self, connection: Connection, limit: int = LARGEST):
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._connection, self._limit = connection, limit
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Store status and headers."""
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        """Store a part of the body; fail above the limit."""
        self._parts.append(data)
        self._limit -= len(data)
        if self._limit < 0:
            self._connection.abort()
            self.end(Broken("The answer is too large.", begun=True))

    def give_up(self, message: str) -> None:
        """Drop the answer: the caller that waits for it gets ConnectionBroken."""
        if not self.future.done():
            self._connection.fail(message)

    def end(self, error: Broken | None) -> None:
        """Resolve the future with the answer or the error."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(Response(self._status, self._headers, b"".join(self._parts)))


class Upstream:
    """The HTTP client for the instance at ``url``.

    ``context``: TLS for https. ``last_heard``: when data last arrived.
    """

    def __init__(self, url: str, context: ssl.SSLContext | None = None):
        split = urlsplit(url)
        self.host, tls = split.hostname or "", split.scheme == "https"
        self.port = split.port or (443 if tls else 80)
        self._context = context or ssl.create_default_context() if tls else None
        self._tail = b"host: %b\r\n" % split.netloc.encode()
        self.busy: set[Connection] = set()
        self.heard = 0.0
        self._idle: dict[Connection, None] = {}  # in order of last use
        self._closed = False

    async def connect(self) -> Connection:
        """Open a new connection. Raises InstanceUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT):
                _, made = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self._context
                )
        except TimeoutError:
            raise Unreachable("The connection timed out.") from None
        except ConnectionRefusedError:
            raise Unreachable("Nothing listens there.", refused=True) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded for DNS
            raise Unreachable(f"No connection could be made: {type(error).__name__}.") from None
        return made

    def idle(self) -> Connection | None:
        """Return an idle connection that is still usable as far as known; None if there is none."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if not connection.transport.is_closing():
                if time.monotonic() - connection.since < FRESH:
                    return connection
                connection.transport.close()
        return None

    def request(self, method: bytes, target: bytes, headers: Headers, body: Sequence[bytes] = ()) -> list[bytes]:
        """Return the parts of a request to write. ``headers`` contain neither host nor content-length."""
        size = sum(map(len, body))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        if size or method not in (b"GET", b"HEAD"):
            lines += b"content-length: %d\r\n" % size
        head = b"%b %b HTTP/1.1\r\n%b%b\r\n" % (method, target, self._tail, lines)
        return [head + body[0]] if len(body) == 1 and size < 65536 else [head, *body]

    async def ask(
        self,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: Sequence[bytes] = (),
        *,
        again: bool = True,
        told: Callable[[Whole], None] = lambda whole: None,
    ) -> Response:
        """Send a request and return the collected answer.

        ``resend``: send it again once per reused connection that ends without an answer, mostly because the server had
        closed it. ``on_sent`` is called with the sink, which can drop the answer. Raises InstanceUnreachable,
        ConnectionBroken.
        """
        parts = self.request(method, target, headers, body)
        while True:
            kept = self.idle()
            connection = kept or await self.connect()
            whole = Whole(connection)
            connection.send(parts, whole, bodiless=method == b"HEAD")
            told(whole)
            try:
                return await whole.future
            except Broken as broken:
                if kept is None or broken.begun or not again:
                    raise
            except asyncio.CancelledError:
                connection.abort()
                raise

    def keep(self, connection: Connection) -> None:
        """Return a connection to the pool."""
        self.busy.discard(connection)
        if self._closed or len(self._idle) >= IDLE:
            connection.transport.close()
            return
        connection.since = time.monotonic()
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self.busy.discard(connection)
        self._idle.pop(connection, None)

    def fail(self, message: str) -> None:
        """Fail all pending requests and close all connections."""
        for connection in tuple(self.busy):
            connection.fail(message)
        for connection in tuple(self._idle):
            connection.transport.abort()

    def close(self) -> None:
        """Close idle connections now, and busy ones when their request ends."""
        self._closed = True
        while self._idle:
            self._idle.popitem()[0].transport.close()
