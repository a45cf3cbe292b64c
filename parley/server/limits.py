"""HTTP framing with limits: a head may be neither endless nor endlessly slow, and unread answers may not pile up.

Extends uvicorn's protocol, which has no such limits. What is wrong with a request that could be parsed is left to the
application, so that it is answered in its API's own form; what cannot be parsed is answered here and the connection
closed. The bodies' limits are in ``respond``.
"""

from __future__ import annotations

import asyncio
import zlib
from asyncio.events import TimerHandle
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from parley.errors import HeadersTooLarge, Malformed, ParleyError, TooLarge, UnknownCoding
from parley.server.cycle import Cycle
from parley.server.options import ServerOptions

LINGER = 2.0  # seconds for a client to stop sending a body that was refused

REFUSED = "parley.refused"  # scope: an error that the head itself earned


class Parser:
    """httptools' parser for a server that upgrades to nothing.

    httptools takes a request that offers an upgrade for the last one in HTTP and drops its body; Java's own client
    offers HTTP/2 with every first request. A server may ignore the offer (RFC 9110, 7.8), so such a request is read
    again without it.
    """

    def __init__(self, protocol: Protocol):
        self._protocol = protocol
        self._parser = httptools.HttpRequestParser(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def offered(self) -> bool:
        """Is the request at hand one that will be read again?"""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while data:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self.offered:
                    raise
                data = self._protocol.unoffered() + data[offer.args[0] :]
                self._parser = httptools.HttpRequestParser(self._protocol)


class Protocol(HttpToolsProtocol):
    """One connection. ``bound`` makes the class for a server's options."""

    options = ServerOptions()

    @classmethod
    def bound(cls, options: ServerOptions) -> type[Protocol]:
        return type("Protocol", (cls,), {"options": options})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser: Parser = Parser(self)  # type: ignore[assignment]
        self._in_head = True
        self._in_message = self._began = False
        self._head_bytes = 0
        self._timer: TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()  # to be told when the connection is lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.options.header_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        for departed in tuple(self._watchers):
            departed()

    def data_received(self, data: bytes) -> None:
        before, self._began = self._in_head, False
        super().data_received(data)
        # Of the data in which a head begins, other requests may be the larger part: it does not count.
        if before and self._in_head and not self._began and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.options.header_limit:
                self._close(431, "The request's headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = self._began = True
        self._head_bytes = 0
        if self._timer is None:
            self._arm(self.options.header_timeout, self._too_slow)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.offered:
            return
        self._disarm()
        refused = self._judge()
        if refused is not None:
            self.scope[REFUSED] = refused  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        if self.parser.offered:
            return
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message:  # the client is still sending; closing at once could cost it the answer
            self._arm(LINGER, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # nobody reads: an orderly close would wait for ever
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # a second status line inside an answer would be worse than none
        else:
            self._close(400, msg)

    def unoffered(self) -> bytes:
        """The head of the current request without the offer of another protocol."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(head) + b"\r\n\r\n"

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        Cycle.adopt(cycle, self._watchers)
        super()._start_asgi_task(cycle, app)

    def _judge(self) -> ParleyError | None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.options.header_limit:
            return HeadersTooLarge(f"The request's headers have {size} bytes; {self.options.header_limit} are allowed.")
        if len(self.headers) > self.options.header_count:
            return HeadersTooLarge(
                f"The request has {len(self.headers)} headers; {self.options.header_count} are allowed."
            )
        return None

    def _too_slow(self) -> None:
        self._close(408, "The request's headers did not come in time.")

    def _close(self, status: int, message: str) -> None:
        if not self.transport.is_closing():
            body = message.encode()
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
            self.transport.close()

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def inflate(body: bytes, coding: bytes, limit: int) -> bytes:
    """A body without its content coding, at most ``limit`` bytes. Raises TooLarge, Malformed, UnknownCoding."""
    coding = coding.strip().lower()
    if coding in (b"", b"identity"):
        return body
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise UnknownCoding("The body's Content-Encoding is not supported; send it as it is, or with gzip or deflate.")
    stream = zlib.decompressobj(wbits=47)  # finds out by itself whether it is gzip or zlib
    try:
        plain = stream.decompress(body, limit + 1)
    except zlib.error:
        raise Malformed("The body could not be decompressed.") from None
    if len(plain) > limit:
        raise TooLarge(f"The decompressed body is larger than the limit of {limit} bytes.")
    if not stream.eof or stream.unused_data:
        raise Malformed("The body could not be decompressed: it is cut off, or something follows it.")
    return plain


def deflate(body: bytes, coding: bytes) -> bytes:
    """A body in a content coding, ``gzip`` or ``deflate``."""
    stream = zlib.compressobj(level=1, wbits=31 if coding == b"gzip" else 15)
    return stream.compress(body) + stream.flush()
