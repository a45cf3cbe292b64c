"""One request and its answer on a connection, as the application finds it in its scope.

Beyond ASGI, which has no words for it, a cycle says that the client has left, that it does not read, that its body is
there already, and takes parts of an answer without a coroutine for each. An answer leaves in one write per part, its
head with the first of them; if it is to be ``APART``, with a chunk for each event. Knows no limits (``limits``), no
parser and no API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

CYCLE = "parley.cycle"  # scope: the request's cycle
APART = "parley.apart"  # scope: each event of a stream is to be a chunk of its own
EVENT = re.compile(rb".+?(?:\n\n|\Z)", re.DOTALL)


class Outlet(Protocol):
    """Where an exchange writes: a connection's cycle, or what stands for one. As the methods of ``Cycle`` say."""

    @property
    def response_started(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    @property
    def blocked(self) -> bool: ...

    def abort(self) -> None: ...

    def watch(self, departed: Callable[[], None]) -> bool: ...

    def unwatch(self, departed: Callable[[], None]) -> None: ...

    async def send(self, message: Message) -> None: ...

    def part(self, data: bytes, *, last: bool = False) -> bool: ...


class Cycle:
    """``watchers`` are the connection's: who is to be called when it is lost. ``headers`` begin every answer's.

    ``keep_alive``: the connection goes on after the answer. ``expected``: the client sends its body once it is told to.
    ``complete`` is called when all of the answer was written.
    """

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        watchers: set[Callable[[], None]],
        headers: list[tuple[bytes, bytes]],
        keep_alive: bool,
        expected: bool,
        complete: Callable[[], None],
    ):
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_started = self.response_complete = False
        self.whole = False  # all of the request's body has arrived
        self._watchers = watchers
        self._headers = headers
        self._expected = expected
        self._complete = complete
        self._body = b""
        self._news = False  # something has happened that was not received
        self._waiter: asyncio.Future[None] | None = None
        self._head = b""
        self._silent = scope["method"] == "HEAD"
        self._chunked = self._apart = False

    async def run(self, app: ASGIApp) -> None:
        """Have the application answer."""
        self.scope[CYCLE] = self
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            del self.scope[CYCLE]  # which refers to the scope: nothing is to wait for the garbage collector
            if not self.response_complete and not self.disconnected:
                self.transport.close()

    @property
    def blocked(self) -> bool:
        """Must the next write wait, because the client has not read the last ones?"""
        return self.flow.write_paused and not self.disconnected

    def abort(self) -> None:
        """Close the connection at once, whatever is still unsent."""
        self.transport.abort()

    def watch(self, departed: Callable[[], None]) -> bool:
        """Have ``departed`` called when the connection is lost. False if it already is."""
        self._watchers.add(departed)
        self.flow.resume_reading()  # its end would not be noticed otherwise
        return not self.disconnected and not self.transport.is_closing()

    def unwatch(self, departed: Callable[[], None]) -> None:
        self._watchers.discard(departed)

    # -- the request

    def arrived(self, data: bytes) -> int:
        """More of the body has come: how much of it waits to be read."""
        self._body += data
        self._wake()
        return len(self._body)

    def end(self) -> None:
        """The body has come to its end."""
        self.whole = True
        self._wake()

    def lost(self) -> None:
        """The connection is."""
        self.disconnected = not self.response_complete
        self._wake()

    async def receive(self) -> Message:
        """ASGI's ``receive``."""
        if self._expected and not self.transport.is_closing():
            self._expected = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        data, self._body = self._body, b""
        return {"type": "http.request", "body": data, "more_body": not self.whole}

    def _wake(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the answer

    async def send(self, message: Message) -> None:
        """ASGI's ``send``."""
        if self.blocked:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if self.response_started:
            self.part(message.get("body", b""), last=not message.get("more_body", False))
        else:
            self.begin(message["status"], message["headers"])

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The head of the answer, which leaves with its first part. Raises RuntimeError for one with a line break."""
        if self.disconnected or self.response_complete:
            return
        self.response_started, self._expected = True, False
        self._head = self._begin(status, [*self._headers, *headers])

    def part(self, data: bytes, *, last: bool = False) -> bool:
        """More of a body that has begun and is not ``blocked``: ``send`` without its ceremony. May another follow in
        this way?"""
        if self.disconnected or self.response_complete:
            return True
        if self._silent:
            data = b""
        elif self._chunked:
            if self._apart:
                data = b"".join([b"%x\r\n%b\r\n" % (len(event), event) for event in EVENT.findall(data)])
            elif data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
        if last:
            self.response_complete = True
            if not self.keep_alive:
                self.transport.close()
            self._complete()
        return not self.flow.write_paused

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The head. Raises RuntimeError when a header would begin a line of its own."""
        names = dict(headers)
        sized = b"content-length" in names or status in (204, 304)
        self._chunked = not sized and self.scope["http_version"] != "1.0"  # whose answers end with the connection
        self._apart = APART in self.scope
        if self._chunked and not self._silent:
            headers.append((b"transfer-encoding", b"chunked"))
        if names.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"
        if head.count(b"\n") != len(headers) + 2 or head.count(b"\r") != len(headers) + 2:
            raise RuntimeError("A header has a line break.")
        return head
