"""HTTP framing with limits: a head may be neither endless nor endlessly slow, and unread answers may not pile up.

Extends uvicorn's protocol, which has no such limits. What is wrong with a request that could be parsed is left to the
application, so that it is answered in its API's own form; what cannot be parsed is answered here and the connection
closed. The bodies' limits are in ``respond``.
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

LINGER = 2.0  # seconds for a client to stop sending a body that was refused

REFUSED = "parley.refused"  # scope: an error that the head itself earned
NUMBER = "parley.number"  # scope: which request of its connection it is, from 1 on


class Deadline:
    """One thing that happens unless something else does before. Mostly something does: so the loop's timer is left as
    it is, and when it rings too early it is set again."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._action: Callable[[], None] | None = None
        self._due = self._rings = 0.0
        self._timer: TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        """``action`` is to happen in so many seconds, and nothing that was set before."""
        self._action, self._due = action, self._loop.time() + seconds
        if self._timer is None or self._due < self._rings:
            self._start()

    def clear(self) -> None:
        self._action = None

    def end(self) -> None:
        """It is not needed any more."""
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
    """One connection. ``bound`` makes the class for a server's options."""

    options = HttpOptions()

    @classmethod
    def bound(cls, options: HttpOptions) -> type[Protocol]:
        return type("Protocol", (cls,), {"options": options})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser: Any = httptools.HttpRequestParser(self)  # strict: uvicorn's takes requests behind a last one
        self.cycle: Cycle | None = None  # type: ignore[assignment]
        self._answering: Cycle | None = None  # the request whose turn it is, or was last
        self._in_head = True
        self._in_message = self._began = False
        self._head_bytes = 0
        self._number = 0  # of requests
        self._crowded = False  # one too many: its request is refused
        self._deadline = Deadline(self.loop)
        self._watchers: set[Callable[[], None]] = set()  # to be told when the connection is lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.options.connections is not None and len(self.connections) > self.options.connections:
            transport.abort()
        elif self.options.room is not None:
            self._crowded = not self.options.room.enter(self)
        self._deadline.set(self.options.header_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
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
        before, self._began = self._in_head, False
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            pass  # CONNECT: it is answered, and nothing behind it is read
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if not self._in_head:
            return
        if self._began:
            self._deadline.set(self.options.header_timeout, self._too_slow)
        elif before and not self.transport.is_closing():
            # Of the data in which a head begins, other requests may be the larger part: it does not count.
            self._head_bytes += len(data)
            if self._head_bytes > self.options.header_limit:
                self._close(431, "The request's headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._in_message = self._began = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
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
        else:  # one at a time; until then no more is read than was already
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.arrived(body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._offered or self.cycle is None:
            return
        self.cycle.end()
        if self.cycle.response_complete:  # then that was what it lingered for
            self._deadline.set(self.options.keep_alive, self._idle)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.pipeline:
            pass  # what the client may still be sending is the next request
        elif self._in_message and self._in_head:  # as it is here
            self._deadline.set(self.options.header_timeout, self._too_slow)
        elif self._in_message:  # closing at once could cost it the answer
            self._deadline.set(LINGER, self.transport.abort)
        else:
            self._deadline.set(self.options.keep_alive, self._idle)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._answer(self.pipeline.pop()[0])  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        self._close(400, msg)

    @property
    def _offered(self) -> bool:
        """Does the request at hand offer to go on in another protocol?

        httptools takes such a request for the last one in HTTP and drops its body; Java's own client offers HTTP/2 with
        every first request. A server may ignore the offer (RFC 9110, 7.8), so it is read again without it.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _feed(self, data: bytes) -> None:
        """Parse. Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while data:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._offered:
                    raise
                data = self._unoffered() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _unoffered(self) -> bytes:
        """The head of the current request without the offer."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(head) + b"\r\n\r\n"

    def _answer(self, cycle: Cycle) -> None:
        self._answering = cycle
        task = self.loop.create_task(cycle.run(self.app))  # type: ignore[arg-type]
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _idle(self) -> None:
        if self.transport.get_write_buffer_size():  # nobody reads: an orderly close would wait for ever
            self.transport.abort()
        self.transport.close()

    @property
    def spare(self) -> bool:
        """Does it wait for another request?"""
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
            return  # perhaps it was not read meanwhile: its time begins when that has ended
        self._close(408, "The request's headers did not come in time.")

    def _close(self, status: int, message: str) -> None:
        under_way = self._answering
        if under_way is not None and under_way.response_started and not under_way.response_complete:
            self.transport.abort()  # a second status line inside an answer would be worse than none
        elif not self.transport.is_closing():
            body = message.encode()
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
            self.transport.close()
