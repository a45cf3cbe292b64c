"""HTTP framing with limits on the size and duration of request heads and on the size of unread responses.

Extends uvicorn's protocol, which has no such limits. Errors in a request that could be parsed are left to the
application, which answers in the format of the request's API. A request that cannot be parsed is answered here, and the
connection is closed. The limits of bodies are in ``exchange``.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parley.errors import HeadersTooLarge, Overloaded, ParleyError
from parley.web.connection import Cycle
from parley.web.options import HttpOptions

LINGER = 2.0  # seconds that a client has to stop sending a body that was refused

REFUSED = "parley.refused"  # scope key: an error found in the request head
NUMBER = "parley.number"  # scope key: number of the request on its connection, from 1


class Deadline:
    """A timer with one action at a time.

    Most actions are replaced or cleared before they are due. So the loop's timer is not cancelled each time; if it
    fires too early, it is started again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._action: Callable[[], None] | None = None
        self._due = self._rings = 0.0
        self._timer: TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in this number of seconds, in place of any earlier action."""
        self._action, self._due = action, self._loop.time() + seconds
        if self._timer is None or self._due < self._rings:
            self._start()

    def clear(self) -> None:
        """Drop the action; the timer keeps running."""
        self._action = None

    def end(self) -> None:
        """Drop the action and cancel the timer."""
        self._action = None
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._rings = self._loop.call_at(self._due, self._ring), self._due

    def _ring(self) -> None:
        self._timer = None
        if self._action is None:
            return
        if self._due > self._rings:
            self._start()
            return
        action, self._action = self._action, None
        action()


class Protocol(HttpToolsProtocol):
    """One connection. ``bind_options`` creates the subclass for a port's options."""

    options = HttpOptions()

    @classmethod
    def bound(cls, options: HttpOptions) -> type[Protocol]:
        """Return a subclass with these options: uvicorn creates the protocol and cannot pass them."""
        return type("LimitedHttpProtocol", (cls,), {"options": options})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser: Any = httptools.HttpRequestParser(self)  # strict, unlike uvicorn's: no request follows a last one
        self.cycle: Cycle | None = None  # type: ignore[assignment]
        self._answering: Cycle | None = None  # the request being answered, or the last one that was
        self._in_head = True
        self._in_message = self._began = False
        self._head_bytes = 0
        self._number = 0  # of requests so far
        self._crowded = False  # True: above the connection limit, so its request is refused
        self._deadline = Deadline(self.loop)
        self._watchers: set[Callable[[], None]] = set()  # called when the connection is lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request head, and apply the connection limits."""
        super().connection_made(transport)
        if self.options.connections is not None and len(self.connections) > self.options.connections:
            transport.abort()
        elif self.options.room is not None:
            self._crowded = not self.options.room.enter(self)
        self._deadline.set(self.options.header_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer and notify the cycles and all watchers."""
        self._deadline.end()
        self.connections.discard(self)
        if self.options.room is not None:
            self.options.room.leave(self)
        for cycle in (self._answering, self.cycle):
            if cycle is not None:
                cycle.lost()
        self.flow.resume_writing()
        self.parser = None  # it refers to this object
        for departed in tuple(self._watchers):
            departed()

    def data_received(self, data: bytes) -> None:
        """Parse data and check the size and duration of the request head."""
        before, self._began = self._in_head, False
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            pass  # CONNECT: it is answered, and nothing after it is read
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if not self._in_head:
            return
        if self._began:
            self._deadline.set(self.options.header_timeout, self._too_slow)
        elif before and not self.transport.is_closing():
            # Data in which a head begins may consist mostly of earlier requests, so it is not counted.
            self._head_bytes += len(data)
            if self._head_bytes > self.options.header_limit:
                self._close(431, "The request's headers are too large.")

    def on_message_begin(self) -> None:
        """Start a request head."""
        super().on_message_begin()
        self._in_head = self._in_message = self._began = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """Make the request's cycle, and start or queue it."""
        self._in_head = False
        if self._offered:
            return
        self._deadline.clear()
        scope, parser, url = self.scope, self.parser, httptools.parse_url(self.url)
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version = parser.get_http_version()
        scope["raw_path"] = url.path
        scope["path"] = unquote(url.path.decode("ascii"))
        scope["query_string"] = url.query or b""
        self._number += 1
        scope[NUMBER] = self._number  # type: ignore[literal-required]
        refused = self._judge()
        if refused is not None:
            scope[REFUSED] = refused  # type: ignore[literal-required]
        before = self.cycle
        self.cycle = Cycle(
            scope,  # type: ignore[arg-type]
            self.transport,
            self.flow,
            self._watchers,
            self.server_state.default_headers,
            keep_alive=version != "1.0" and parser.should_keep_alive() and not self._crowded,
            expected=self.expect_100_continue,
            complete=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._answer(self.cycle)
        else:  # one request at a time; until then, read no further
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        """Pass data to the cycle; stop reading if too much of it is unread."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.arrived(body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Mark the request body as complete."""
        self._in_message = False
        if self._offered or self.cycle is None:
            return
        self.cycle.end()
        if self.cycle.response_complete:  # the connection was only lingering for the body
            self._deadline.set(self.options.keep_alive, self._idle)

    def on_response_complete(self) -> None:
        """Restart the timer, and start the next queued request."""
        self.server_state.total_requests += 1
        if self.pipeline:
            pass  # the client may still be sending the next request
        elif self._in_message and self._in_head:  # the next request, here too
            self._deadline.set(self.options.header_timeout, self._too_slow)
        elif self._in_message:  # the client is still sending its body: closing at once could lose the response
            self._deadline.set(LINGER, self.transport.abort)
        else:
            self._deadline.set(self.options.keep_alive, self._idle)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._answer(self.pipeline.pop()[0])  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, and close the connection."""
        self._close(400, msg)

    @property
    def _offered(self) -> bool:
        """Whether the current request offers an upgrade to another protocol, except CONNECT.

        httptools treats such a request as the last one in HTTP and drops its body. Java's own client offers HTTP/2
        with every first request. A server may ignore the offer (RFC 9110, 7.8), so the request is parsed again
        without it.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _feed(self, data: bytes) -> None:
        """Parse data. Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while data:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._offered:
                    raise
                data = self._unoffered() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _unoffered(self) -> bytes:
        """Return the head of the current request without its upgrade header."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(head) + b"\r\n\r\n"

    def _answer(self, cycle: Cycle) -> None:
        self._answering = cycle
        task = self.loop.create_task(cycle.run(self.app))  # type: ignore[arg-type]
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _idle(self) -> None:
        if self.transport.get_write_buffer_size():  # the client does not read: an orderly close would never complete
            self.transport.abort()
        self.transport.close()

    @property
    def spare(self) -> bool:
        """Whether the connection is idle between two requests."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and not self._in_message and not self.transport.is_closing()

    def _judge(self) -> ParleyError | None:
        if self._crowded:
            return Overloaded("The server has as many connections as it can serve. Try again later.", retry_after=1.0)
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > self.options.header_limit:
            return HeadersTooLarge(f"The request's headers have {size} bytes; {self.options.header_limit} are allowed.")
        if len(self.headers) > self.options.header_count:
            return HeadersTooLarge(
                f"The request has {len(self.headers)} headers; {self.options.header_count} are allowed."
            )
        return None

    def _too_slow(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            return  # reading may have been paused meanwhile; the time starts when this response is complete
        self._close(408, "The request's headers did not come in time.")

    def _close(self, status: int, message: str) -> None:
        under_way = self._answering
        if under_way is not None and under_way.response_started and not under_way.response_complete:
            self.transport.abort()  # a second status line inside a response would be worse than none
        elif not self.transport.is_closing():
            body = message.encode()
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
            self.transport.close()
