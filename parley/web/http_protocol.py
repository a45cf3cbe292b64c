"""HTTP framing with limits on the size and duration of request heads and on the size of unread responses.

Extends uvicorn's protocol, which has no such limits. Errors in a request that could be parsed are left to the
application, which answers in the format of the request's API. A request that cannot be parsed is answered here, and the
connection is closed. The limits of bodies are in ``request_body``.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from parley.errors import BadRequest, ParleyError
from parley.web.framing import HAS_HTTP2
from parley.web.framing.refused_connection import RefusedConnection
from parley.web.framing.request_head import (
    HEAD_ERROR_KEY,
    INVALID_HOST,
    REQUEST_NUMBER_KEY,
    WRONG_TARGET,
    find_oversized_head,
    is_target_of_host,
    is_valid_host,
    too_many_connections,
)
from parley.web.framing.reusable_timer import ReusableTimer
from parley.web.http_cycle import HttpCycle
from parley.web.http_options import HttpOptions
from parley.web.logs import log_refused_connection
from parley.web.websocket.handshake import UPGRADE_KEY, offers_websocket

if TYPE_CHECKING:
    from parley.web.framing.http2_protocol import Http2Protocol
    from parley.web.websocket.protocol import WebSocketProtocol

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of an HTTP/2 client
PARSED_SIZE = 8 << 10  # bytes that are parsed at once: a parsed request takes a hundred times the memory of its bytes
LINGER_SECONDS = 2.0  # seconds that a client has to stop sending a request that was refused
# Seconds until the first check for a reset; each wait is twice as long as the one before, up to the second number.
RESET_CHECK_SECONDS = (0.01, 1.0)


class _HttpFlow(FlowControl):
    """The flow control of a connection. ``holds_data``: received data waits to be parsed, so no more is read."""

    holds_data = False

    def resume_reading(self) -> None:
        """Read on, if reading was paused and all received data has been parsed."""
        if self.read_paused and not self.holds_data:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. ``bind_options`` creates the subclass for a port's options."""

    options = HttpOptions()

    @classmethod
    def bind_options(cls, options: HttpOptions) -> type[LimitedHttpProtocol]:
        """Return a subclass with these options: uvicorn creates the protocol and cannot pass them."""
        return type("LimitedHttpProtocol", (cls,), {"options": options})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parser: Any = httptools.HttpRequestParser(self)  # strict, unlike uvicorn's: no request follows a last one
        self.cycle: HttpCycle | None = None  # type: ignore[assignment]
        self._current_cycle: HttpCycle | None = None  # the request being answered, or the last one that was
        self._in_head = True
        self._in_message = self._head_began = False
        self._offers_websocket = False  # True: the request whose head is parsed again without its upgrade offers one
        self._head_bytes = 0
        self._body_grew = False  # True: the data that is being parsed is partly of a body
        self._unread_bytes = 0  # received after the last part of a body: trailers, or the extension of a chunk
        self._request_count = 0  # of requests so far
        self._input_ended = False  # True: the client will send nothing more
        self._may_be_http2 = True  # until enough of the first request has come to tell
        self._opening_bytes = b""  # the bytes until then
        self._unparsed_data = b""  # what was received behind a request that waits for the ones before it
        self._over_limit = False  # True: above the connection limit, so its request is refused
        self._cancel_handshake: Callable[[], object] | None = None  # set while a TLS handshake runs
        self._timer = ReusableTimer(self.loop)
        self._watchers: set[Callable[[], None]] = set()  # called when the connection is lost

    def begin_handshake(self, cancel_handshake: Callable[[], object]) -> None:
        """Apply the connection limits before the connection is made, while its TLS handshake runs."""
        self._cancel_handshake = cancel_handshake
        self._over_limit = not self.options.connection_limit.add_connection(self)

    def end_handshake(self) -> None:
        """Note the end of the handshake. If it failed, no connection is made."""
        self._cancel_handshake = None
        if self.transport is None:
            self.options.connection_limit.remove_connection(self)

    def give_way(self) -> None:
        """Close, because another connection takes its place."""
        if self.transport is None:
            assert self._cancel_handshake is not None
            self._cancel_handshake()
            return
        if self.transport.get_write_buffer_size():  # the client does not read: a close would wait for it
            self.transport.abort()
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request head, and apply the connection limits."""
        super().connection_made(transport)
        self.flow = self._http_flow = _HttpFlow(transport)
        if self._cancel_handshake is None:
            self._over_limit = not self.options.connection_limit.add_connection(self)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._switch_to_http2()
            return
        self._timer.schedule_action(self.options.header_timeout, self._on_head_timeout)

    def _switch_to_http2(self) -> Http2Protocol:
        """Hand the connection over to the protocol of HTTP/2."""
        from parley.web.framing.http2_protocol import Http2Protocol  # imports h2, which other servers need not load

        http2 = Http2Protocol(self, self._over_limit)
        self._timer.stop_timer()
        self.connections.discard(self)
        self.parser = None  # it refers to this object
        self.options.connection_limit.replace_connection(self, http2)
        self.transport.set_protocol(http2)
        http2.connection_made(self.transport)
        return http2

    def _switch_to_websocket(self, head: bytes) -> WebSocketProtocol:
        """Make the connection a WebSocket, in answer to the current request. ``head``: of the answer.

        Raises BadRequest if the request has a body, another one follows, or the client sends nothing more: it does not
        wait for the answer.
        """
        from parley.web.websocket.protocol import WebSocketProtocol  # imports wsproto, which most servers need not load

        cycle = self._current_cycle
        assert cycle is not None
        if self._input_ended:
            raise BadRequest("The client has ended its side of the connection, so it can send no messages.")
        has_followers = self._in_message or self.pipeline or self._unparsed_data
        if has_followers or cycle.scope["method"] != "GET" or cycle.scope["http_version"] != "1.1":
            raise BadRequest("A request for a WebSocket must be a GET of HTTP/1.1, without a body, and the last one.")
        websocket = WebSocketProtocol(self, self.transport, write_paused=self.flow.write_paused)
        self._timer.stop_timer()
        self.connections.discard(self)
        self.parser = None  # it refers to this object
        self.flow.resume_reading()
        self.options.connection_limit.replace_connection(self, websocket)
        self.server_state.total_requests += 1
        cycle.response_started = cycle.response_complete = True
        websocket.begin(head)
        return websocket

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer and notify the cycles and all watchers."""
        self._timer.stop_timer()
        self.connections.discard(self)
        self.options.connection_limit.remove_connection(self)
        for cycle in (self._current_cycle, self.cycle):
            if cycle is not None:
                cycle.mark_disconnected()
        self.flow.resume_writing()
        self.parser = None  # it refers to this object
        for on_disconnect in tuple(self._watchers):
            on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse data and check the size and duration of the request head."""
        if self._may_be_http2:
            data = self._opening_bytes + data
            if len(data) < len(HTTP2_PREFACE) and HTTP2_PREFACE.startswith(data):
                self._opening_bytes = data
                return
            self._may_be_http2, self._opening_bytes = False, b""
            if HAS_HTTP2 and self.options.http2 and data.startswith(HTTP2_PREFACE):
                self._switch_to_http2().data_received(data)
                return
        if self.pipeline:
            self._hold_data(data)
            return
        was_in_head, self._head_began, self._body_grew = self._in_head, False, False
        try:
            self._feed_parser(data)
        except httptools.HttpParserUpgrade:
            pass  # CONNECT: it is answered, and nothing after it is read
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if not self._in_head:
            has_head = was_in_head or self._head_began  # then its bytes are no trailer's
            self._limit_trailers(0 if has_head else len(data))
            return
        if self._in_message and not self._request_count and self._lacks_version(data):
            self.send_400_response("The request line has no HTTP version.")
            return
        if self._head_began:
            self.options.connection_limit.mark_opening(self)
            self._timer.schedule_action(self.options.header_timeout, self._on_head_timeout)
        elif was_in_head and not self.transport.is_closing():
            # Where a head begins, the data may be mostly of earlier requests, so it is not counted.
            self._head_bytes += len(data)
            if self._head_bytes > self.options.header_limit:
                self._refuse_connection(431, "The request's headers are too large.")

    def _hold_data(self, data: bytes) -> None:
        """Keep data until no request waits for the one before it: requests are parsed only as they are answered."""
        self._unparsed_data += data
        self.flow.pause_reading()
        self._http_flow.holds_data = True

    def _parse_held_data(self) -> None:
        """Parse what was held, up to the next request that has to wait, and read on if that was all."""
        data, self._unparsed_data = self._unparsed_data, b""
        self._http_flow.holds_data = False
        if data:
            self.data_received(data)
        if not self.pipeline:
            self.flow.resume_reading()

    def _limit_trailers(self, size: int) -> None:
        """Count ``size`` bytes that were received outside of heads. The parser keeps a trailer until its end."""
        self._unread_bytes = self._unread_bytes + size if self._in_message and not self._body_grew else 0
        if self._unread_bytes > self.options.header_limit and not self.transport.is_closing():
            if self.cycle is not None and self.cycle.response_complete:
                self.transport.abort()
            else:
                self._refuse_connection(431, "The request's trailers are too large.")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if a client may still wait for answers; close it otherwise.

        A client that has gone and one that has only stopped sending look alike. So an interim response is sent, which
        HTTP/1.1 clients skip: the system of a client that has gone answers with a reset. Without TLS only. Nothing can
        be sent in the middle of a response, and a silent stream must not keep its work: so the client counts as gone.
        """
        current = self._current_cycle
        if current is None or current.response_started or self._in_message or self.transport.is_closing():
            return False
        if current.scope["http_version"] != "1.1" or self.transport.get_extra_info("sslcontext") is not None:
            return False
        self._input_ended = True
        current.send_continue()
        self._await_reset(RESET_CHECK_SECONDS[0])
        return True

    def _await_reset(self, seconds: float) -> None:
        """Notice that the client has gone: nothing else does, since reading has ended."""

        def check_reset() -> None:
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), 0)
            if poll.poll(0):
                self.transport.abort()
            else:
                self._await_reset(min(2 * seconds, RESET_CHECK_SECONDS[1]))

        self._timer.schedule_action(seconds, check_reset)

    def on_message_begin(self) -> None:
        """Start a request head."""
        super().on_message_begin()
        self._in_head = self._in_message = self._head_began = True
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped: merged with the headers (RFC 9110, 6.5.1), they could pass for those of
        a proxy, which replaces only headers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Make the request's cycle, and start or queue it."""
        self._in_head = False
        if self._upgrade_offered:
            return
        self._timer.clear_action()
        self.options.connection_limit.mark_busy(self)
        scope, parser, url = self.scope, self.parser, httptools.parse_url(self.url)
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version = parser.get_http_version()
        scope["raw_path"] = url.path
        scope["path"] = unquote(url.path.decode("ascii"))
        scope["query_string"] = url.query or b""
        self._request_count += 1
        scope[REQUEST_NUMBER_KEY] = self._request_count  # type: ignore[literal-required]
        head_error = self._check_head()
        if head_error is not None:
            scope[HEAD_ERROR_KEY] = head_error  # type: ignore[literal-required]
        previous_cycle = self.cycle
        if self._offers_websocket:
            self._offers_websocket = False
            scope[UPGRADE_KEY] = self._switch_to_websocket  # type: ignore[literal-required]
        self.cycle = HttpCycle(
            scope,  # type: ignore[arg-type]
            self.transport,
            self.flow,
            self._watchers,
            self.server_state.default_headers,
            keep_alive=version != "1.0" and parser.should_keep_alive() and head_error is None,
            expects_continue=self.expect_100_continue,
            on_complete=self.on_response_complete,
        )
        if previous_cycle is None or previous_cycle.response_complete:
            self._start_cycle(self.cycle)
        else:  # one request at a time; until then, read no further
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        """Pass data to the cycle; stop reading if too much of it is unread."""
        self._body_grew = True
        if (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.cycle.feed_body(body) > HIGH_WATER_LIMIT
        ):
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Mark the request body as complete."""
        self._in_message = False
        if self._upgrade_offered or self.cycle is None:
            return
        self.cycle.end_body()
        if self.cycle.response_complete:  # the connection was only lingering for the body
            if self.cycle.keep_alive:
                self._timer.schedule_action(self.options.keep_alive, self._close_idle)
            else:
                self.transport.close()

    def on_response_complete(self) -> None:
        """Restart the timer, and start the next queued request."""
        self.server_state.total_requests += 1
        if not self.pipeline:
            self.options.connection_limit.mark_idle(self)
        if self._input_ended:
            if not self.pipeline:
                self.transport.close()
        elif self.pipeline:
            pass  # the client may still be sending the next request
        elif self._in_message and self._in_head:  # the next request, here too
            self._timer.schedule_action(self.options.header_timeout, self._on_head_timeout)
        elif self._in_message:  # the client is still sending its body: closing at once could lose the response
            if self.cycle is not None and not self.cycle.keep_alive and self.transport.can_write_eof():
                self.transport.write_eof()  # RFC 9112, 9.6
            self._timer.schedule_action(LINGER_SECONDS, self.transport.abort)
        else:
            self._timer.schedule_action(self.options.keep_alive, self._close_idle)
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_cycle(self.pipeline.pop()[0])  # type: ignore[arg-type]
        if not self.pipeline:
            self._parse_held_data()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, and close the connection."""
        self._refuse_connection(400, msg)

    @property
    def _upgrade_offered(self) -> bool:
        """Whether the current request offers an upgrade to another protocol, except CONNECT.

        httptools treats such a request as the last one in HTTP and drops its body. Java's own client offers HTTP/2
        with every first request. A server may ignore the offer (RFC 9110, 7.8), so the request is parsed again
        without it. The application may still accept an offer of a WebSocket.
        """
        result: bool = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        return result

    def _feed_parser(self, data: bytes) -> None:
        """Parse data up to a request that waits. Raises httptools.HttpParserError, HttpParserUpgrade for CONNECT."""
        for start in range(0, len(data), PARSED_SIZE):
            if self.pipeline:
                self._hold_data(data[start:])
                return
            self._feed_piece(data[start : start + PARSED_SIZE])

    def _feed_piece(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrade_offered:
                    raise
                self._offers_websocket = any(
                    name == b"upgrade" and offers_websocket(value) for name, value in self.headers
                )
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        """Return the head of the current request without its upgrade header."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(head) + b"\r\n\r\n"

    def _start_cycle(self, cycle: HttpCycle) -> None:
        self._current_cycle = cycle
        task = self.loop.create_task(cycle.run_app(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _close_idle(self) -> None:
        if self.transport.get_write_buffer_size():  # the client does not read: an orderly close would never complete
            self.transport.abort()
        self.transport.close()

    def _check_head(self) -> ParleyError | None:
        if self._over_limit:
            return too_many_connections()
        return find_oversized_head(self.url, self.headers, self.options) or self._check_framing()

    def _check_framing(self) -> ParleyError | None:
        """Refuse a head that other servers might understand otherwise (RFC 9112, 3.2 and 6.1)."""
        version, values = self.scope["http_version"], dict(self.headers)
        if version not in ("1.0", "1.1"):
            return BadRequest(f"The request has the HTTP version {version}; 1.0 and 1.1 are allowed.")
        has_repeats = len(values) < len(self.headers)
        host, coding = values.get(b"host"), values.get(b"transfer-encoding")
        if (host is None and version == "1.1") or (has_repeats and self._count_headers(b"host") > 1):
            return BadRequest(f"The request has {self._count_headers(b'host')} Host headers; it must have one.")
        if host is not None and not is_valid_host(host):
            return BadRequest(INVALID_HOST)
        if self.url[:1] not in (b"/", b"*") and not is_target_of_host(self.url, host):
            return BadRequest(WRONG_TARGET)
        if coding is not None and (
            version == "1.0" or self._count_headers(b"transfer-encoding") > 1 or coding.strip().lower() != b"chunked"
        ):
            return BadRequest("The request has a Transfer-Encoding other than chunked, or with HTTP/1.0.")
        return None

    def _count_headers(self, name: bytes) -> int:
        return sum(header_name == name for header_name, _ in self.headers)

    def _lacks_version(self, data: bytes) -> bool:
        """Whether the line of the first request has ended without an HTTP version, as in HTTP/0.9."""
        return self.parser.get_http_version() == "0.0" and b"\n" in data.lstrip(b"\r\n")

    def _on_head_timeout(self) -> None:
        if self._current_cycle is not None and not self._current_cycle.response_complete:
            return  # reading may have been paused meanwhile; the time starts when this response is complete
        self._refuse_connection(408, "The request's headers did not come in time.")

    def _refuse_connection(self, status: int, message: str) -> None:
        current_cycle = self._current_cycle
        if current_cycle is not None and current_cycle.response_started and not current_cycle.response_complete:
            self.transport.abort()  # a second status line inside a response would be worse than none
        elif not self.transport.is_closing():
            if self.options.access_log:
                log_refused_connection(str((self.client or ("",))[0]), status, message)
            body = message.encode()
            self.transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
            limit = self.options.connection_limit
            refused = RefusedConnection(self.transport, LINGER_SECONDS, limit.remove_connection)
            limit.replace_connection(self, refused)
            limit.mark_idle(refused)
            self.connection_lost(None)
