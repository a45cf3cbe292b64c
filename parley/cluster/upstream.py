"""HTTP to one instance: connections that are kept, requests written in one piece, answers taken as they come.

Knows no API and no cluster: an answer goes to a ``Sink`` part by part, or is gathered by ``ask``.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

CONNECT = 5.0  # seconds for a connection to be made
FRESH = 20.0  # seconds that an idle connection is used again; servers keep them longer
IDLE = 2048  # connections that are kept: as many are in use where so many requests come at once
LARGEST = 256 << 20  # bytes of an answer that is gathered

Headers = Sequence[tuple[bytes, bytes]]


class Unreachable(Exception):
    """No connection could be made. ``refused``: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class Broken(Exception):
    """The connection ended, or what came was no HTTP, before the answer was complete. ``begun``: a part had come;
    ``unsent``: a part of the request had not gone out; ``left``: nobody here waited any longer."""

    def __init__(self, message: str, *, begun: bool = False, unsent: bool = False, left: bool = False):
        super().__init__(message)
        self.begun, self.unsent, self.left = begun, unsent, left


class Sink(Protocol):
    """Who takes an answer: ``head`` and ``data`` as they come, then ``end`` once, with what went wrong if it did."""

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self, error: Broken | None) -> None: ...


class Response(NamedTuple):
    """A whole answer; names of headers are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection; at most one request is under way on it."""

    def __init__(self, upstream: Upstream):
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.since = 0.0  # when it became idle
        self._upstream = upstream
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._bodiless = self._endless = self._begun = False
        self._paused = False
        self._unsent = False  # what was written waits for the other side to read

    def send(self, parts: Sequence[bytes], sink: Sink, *, bodiless: bool = False) -> None:
        """Write a request whose answer goes to ``sink``. ``bodiless``: that has a head only."""
        self._sink, self._bodiless, self._begun = sink, bodiless, False
        self._upstream.busy.add(self)
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def abort(self) -> None:
        """Close it at once; its sink is told nothing more."""
        self._sink = None
        self.transport.abort()

    def fail(self, message: str, *, left: bool = True) -> None:
        """Close it at once: its answer does not come any more, or (``left``) is not waited for."""
        sink, self._sink = self._sink, None
        self.transport.abort()
        if sink is not None:
            sink.end(Broken(message, begun=self._begun, left=left))

    def pause(self, on: bool) -> None:
        """Read no further for now, or again."""
        if on != self._paused and not self.transport.is_closing():
            self._paused = on
            (self.transport.pause_reading if on else self.transport.resume_reading)()

    # -- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._upstream.heard = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail("What it answered is no HTTP.", left=False)

    def eof_received(self) -> None:
        pass

    def pause_writing(self) -> None:
        self._unsent = True

    def resume_writing(self) -> None:
        self._unsent = False

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream.forget(self)
        self._parser = None  # it refers to this object
        sink, self._sink = self._sink, None
        if sink is not None:
            whole = self._begun and self._endless and error is None
            ended = Broken("The connection ended.", begun=self._begun, unsent=self._unsent)
            sink.end(None if whole else ended)

    # -- the parser's

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # another one follows
            return
        if self._sink is None:
            self.transport.abort()
            return
        names = {name for name, _ in self._headers}
        self._begun = True
        self._endless = not (names & {b"content-length", b"transfer-encoding"} or status in (204, 304))
        self._sink.head(status, self._headers)
        if self._bodiless:  # the parser cannot know, and waits for a body
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.end(None)
            self.transport.close()

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.data(data)

    def on_message_complete(self) -> None:
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
    """A sink that gathers an answer."""

    def __init__(self, connection: Connection, limit: int = LARGEST):
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._connection, self._limit = connection, limit
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, headers

    def data(self, data: bytes) -> None:
        self._parts.append(data)
        self._limit -= len(data)
        if self._limit < 0:
            self._connection.abort()
            self.end(Broken("The answer is too large.", begun=True))

    def give_up(self, message: str) -> None:
        """It is not wanted any more: whoever waits for it gets a Broken."""
        if not self.future.done():
            self._connection.fail(message)

    def end(self, error: Broken | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(Response(self._status, self._headers, b"".join(self._parts)))


class Upstream:
    """The connections to the instance at ``url``. ``context``: for https. ``heard``: when anything came last."""

    def __init__(self, url: str, context: ssl.SSLContext | None = None):
        split = urlsplit(url)
        self.host, tls = split.hostname or "", split.scheme == "https"
        self.port = split.port or (443 if tls else 80)
        self._context = context or ssl.create_default_context() if tls else None
        self._tail = b"host: %b\r\n" % split.netloc.encode()
        self.busy: set[Connection] = set()
        self.heard = 0.0
        self._idle: dict[Connection, None] = {}  # in the order of their use
        self._closed = False

    async def connect(self) -> Connection:
        """A connection of its own. Raises Unreachable."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT):
                _, made = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self._context
                )
        except TimeoutError:
            raise Unreachable("No connection could be made in time.") from None
        except ConnectionRefusedError:
            raise Unreachable("Nobody listens there.", refused=True) from None
        except (OSError, UnicodeError) as error:  # a name may be none that can be asked for
            raise Unreachable(f"No connection could be made: {type(error).__name__}.") from None
        return made

    def idle(self) -> Connection | None:
        """A connection that was used before and is still good, as far as one can know."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if not connection.transport.is_closing():
                if time.monotonic() - connection.since < FRESH:
                    return connection
                connection.transport.close()
        return None

    def request(self, method: bytes, target: bytes, headers: Headers, body: Sequence[bytes] = ()) -> list[bytes]:
        """The parts of a request as they are written. ``headers`` have neither a host nor a length."""
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
        """A whole answer. ``again``: send it once more if a kept connection ends instead of bringing one; mostly it had
        been closed meanwhile. ``told`` is of the sink, by which it can be given up. Raises Unreachable, Broken."""
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
        """It can be used again."""
        self.busy.discard(connection)
        if self._closed or len(self._idle) >= IDLE:
            connection.transport.close()
            return
        connection.since = time.monotonic()
        self._idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self.busy.discard(connection)
        self._idle.pop(connection, None)

    def fail(self, message: str) -> None:
        """Nothing that was asked is answered any more, and no connection is good."""
        for connection in tuple(self.busy):
            connection.fail(message)
        for connection in tuple(self._idle):
            connection.transport.abort()

    def close(self) -> None:
        """Close what is idle, and what will be."""
        self._closed = True
        while self._idle:
            self._idle.popitem()[0].transport.close()
