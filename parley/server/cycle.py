"""One request and its answer on a connection: what uvicorn's own cycle does, with one write per message.

The head of an answer leaves with the first part of its body. Beyond ASGI, which has no words for it, the application
finds a cycle in its scope: to learn that the client has left, that it does not read, that its body is there already.
Knows no limits (``limits``) and no API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

CYCLE = "parley.cycle"  # scope: the request's cycle


class Cycle(RequestResponseCycle):
    """Made of one of uvicorn's by ``adopt``, for that names its class itself."""

    _head: bytes
    _watchers: set[Callable[[], None]]

    @classmethod
    def adopt(cls, cycle: RequestResponseCycle, watchers: set[Callable[[], None]]) -> None:
        """``watchers`` are the connection's: who is to be called when it is lost."""
        cycle.__class__ = cls
        assert isinstance(cycle, cls)
        cycle._head, cycle._watchers = b"", watchers
        cycle.scope[CYCLE] = cycle  # type: ignore[literal-required]

    @property
    def whole(self) -> bool:
        """Has all of the request's body arrived?"""
        return not self.more_body

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

    def part(self, data: bytes) -> None:
        """More of a body that has begun and is not ``blocked``: ``send`` without its ceremony."""
        if not self.disconnected and self.scope["method"] != "HEAD":
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked_encoding else data)

    async def send(self, message: Any) -> None:
        """ASGI's ``send``."""
        if self.blocked:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if not self.response_started:
            self.response_started, self.waiting_for_100_continue = True, False
            self._head = self._begin(message["status"], self.default_headers + list(message["headers"]))
            return
        data, last = message.get("body", b""), not message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            data = b""
        elif self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
        if last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The head. Raises RuntimeError when a header would begin a line of its own."""
        names = dict(headers)
        self.chunked_encoding = b"content-length" not in names and status not in (204, 304)
        if self.chunked_encoding and self.scope["method"] != "HEAD":
            headers.append((b"transfer-encoding", b"chunked"))
        if names.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"
        if head.count(b"\n") != len(headers) + 2 or head.count(b"\r") != len(headers) + 2:
            raise RuntimeError("A header has a line break.")
        return head
