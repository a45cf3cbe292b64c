"""HTTP/2 (RFC 9113): one connection, which carries many requests at once, within the limits of HTTP/1.1.

The h2 library keeps the protocol's state; ``frame_guard`` sees every frame before it does. Each stream is given to the
application as a request of its own. GOAWAY is written and read here: h2 would end the streams that are still open.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, RemoteSettingsChanged, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

from parley.web.framing.frame_guard import (
    ENHANCE_YOUR_CALM,
    FRAME_HEADER,
    GOAWAY,
    MAX_FRAME_SIZE,
    PREFACE,
    PROTOCOL_ERROR,
    FrameGuard,
    HostileFrames,
    ReceivedFrame,
)
from parley.web.framing.header_decoder import HeaderDecoder
from parley.web.framing.http2_head import HeaderFields, Http2Head, MalformedHead, read_head
from parley.web.framing.http2_stream import Http2Cycle, Http2Stream
from parley.web.framing.request_head import HEAD_ERROR_KEY, REQUEST_NUMBER_KEY, too_many_connections
from parley.web.framing.reusable_timer import ReusableTimer
from parley.web.http_options import HttpOptions
from parley.web.logs import log_refused_connection

MAX_STREAMS = 128  # concurrent requests on a connection, as announced to clients
MAX_TASKS = 2 * MAX_STREAMS  # running tasks of requests, including those of streams that were just reset
FRAMES_PER_TURN = 8  # frames that are handled before other connections have their turn
STREAM_WINDOW = 256 << 10  # bytes of a body that a client may send before the application has read some
CONNECTION_WINDOW = 1 << 20  # the same for all bodies of a connection
MIN_HEADER_LIST = 16 << 10  # bytes
WRITE_SIZE = 64 << 10  # bytes that are handed to the transport at once
ENCODER_TABLE = 4096  # bytes of the table that compresses response headers, even if the client allows more
KNOWN_SETTINGS = frozenset(SettingCodes)
LINGER_SECONDS = 2.0  # a client has this long to close an idle connection after GOAWAY, and to stop a refused body
NO_ERROR, REFUSED_STREAM = 0, 7  # error codes
ALL_STREAMS = (1 << 31) - 1  # in GOAWAY: no stream is left out


class Http2Connection(Protocol):
    """A connection that turns out to speak HTTP/2."""

    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    server_state: ServerState
    root_path: str

    @property
    def options(self) -> HttpOptions:
        """The options of the port, as they are now."""


class Http2Protocol(asyncio.Protocol):
    """One connection. ``over_limit``: it is above the limit of connections, so its requests are refused."""

    def __init__(self, opened: Http2Connection, over_limit: bool):
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.write_paused = False
        self._opened = opened
        self._over_limit = over_limit
        self._loop = opened.loop
        self._server_state = opened.server_state
        self._timer = ReusableTimer(opened.loop)  # for request heads and idle connections
        self._write_timer = ReusableTimer(opened.loop)
        self._times_block = False  # True: the timer runs for a header block
        header_list = max(2 * self.options.header_limit, MIN_HEADER_LIST)  # a slightly larger one gets its API's error
        self._guard = FrameGuard(header_list)
        self._h2 = _make_connection(header_list)
        self._streams: dict[int, Http2Stream] = {}
        self._sendable: dict[Http2Stream, None] = {}  # streams with unsent parts
        self._starting: list[Http2Cycle] = []  # requests that have come, but have not begun
        self._running: set[asyncio.Task[None]] = set()
        self._awaits_turn = False  # True: received frames wait for other connections, so no more is read
        self._request_count = 0
        self._write_scheduled = False
        self._client_leaves = False  # True: it has sent GOAWAY
        self._is_leaving = False  # True: the connection is closed after the last stream
        self._is_closed = False  # True: received data is dropped

    @property
    def options(self) -> HttpOptions:
        """The options of the port, as they are now."""
        return self._opened.options

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the settings, and wait for the first request."""
        self.transport = transport
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        self._server = get_local_addr(transport)
        self._client = get_remote_addr(transport)
        self._scheme = "https" if is_ssl(transport) else "http"
        self._h2.initiate_connection()
        self._h2.receive_data(PREFACE)  # h2 expects a preface; the client's is removed by the guard
        self._h2.increment_flow_control_window(CONNECTION_WINDOW - self._h2.inbound_flow_control_window)
        self._write_output()
        self._timer.schedule_action(self.options.header_timeout, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams."""
        self._is_closed = True
        self._timer.stop_timer()
        self._write_timer.stop_timer()
        self._server_state.connections.discard(self)
        self.options.connection_limit.remove_connection(self)
        self._end_streams()

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client, and read no more until all have had their turn."""
        if self._is_closed:
            return
        self._guard.add_data(data)
        if not self._awaits_turn and self.options.connection_limit.turns.request_turn(self):
            self._awaits_turn = True
            self._update_reading()

    def take_turn(self) -> bool:
        """Handle some of the received frames. Return whether more may be left."""
        if self._is_closed:
            return False
        try:
            return self._handle_some_frames()
        except Exception:  # a fault of the server: nothing would read this connection again
            self.transport.abort()
            raise

    def _handle_some_frames(self) -> bool:
        """Handle the frames of one turn. Return whether more may be left."""
        count = 0
        try:
            for frame in self._guard.split_frames():
                self._handle_frame(frame)
                count += 1
                if self._is_closed or count >= FRAMES_PER_TURN:
                    break
        except HostileFrames as error:
            self._refuse_connection(error.code, error.reason)
        except ProtocolError as error:
            self._refuse_connection(int(error.error_code), "Invalid HTTP/2 frames received.")
        if self._is_closed:
            return False
        has_more = count >= FRAMES_PER_TURN
        self._start_requests(has_more=has_more)
        self._time_header_block()
        self._send_queued()
        if has_more:
            return True
        if self._awaits_turn:
            self._awaits_turn = False
            self._update_reading()
        return False

    def eof_received(self) -> bool:
        """Return False: a client that sends nothing more has gone."""
        return False

    def pause_writing(self) -> None:
        """Read no more while the client takes nothing: answers to its frames would fill the memory."""
        self.write_paused = True
        self._update_reading()
        self._update_write_pauses()
        self._write_timer.schedule_action(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue to send: the transport has room again."""
        self.write_paused = False
        if self._is_closed:
            return
        self._write_timer.clear_action()
        self._update_reading()
        self._update_write_pauses()
        self._schedule_write()

    def give_way(self) -> None:
        """Close, because another connection takes its place."""
        self._close_connection(NO_ERROR)
        if self.transport.get_write_buffer_size():  # the client does not read: a close would wait for it
            self.transport.abort()

    def announce_shutdown(self) -> None:
        """Ask the client to open no more streams. Those that it opens still are answered."""
        if not self._is_closed and not self._is_leaving:
            self._write_goaway(ALL_STREAMS, NO_ERROR)

    def shutdown(self) -> None:
        """Close after the last stream. uvicorn calls it."""
        self._refuse_streams()
        if not self._streams:
            self._close_connection(NO_ERROR)

    # -- for the streams

    def get_extra_info(self, name: str) -> Any:
        """Return a property of the transport."""
        return self.transport.get_extra_info(name)

    def send_headers(self, stream: Http2Stream, headers: HeaderFields, *, last: bool) -> None:
        """Send headers of a response, ``last`` if it has no body."""
        if not stream.is_open:
            return
        self._h2.send_headers(stream.number, headers, end_stream=last)
        if last:
            stream.is_finished = True
            self._finish_stream(stream)
        self._schedule_write()

    def send_stream(self, stream: Http2Stream) -> None:
        """Send the queued data of a stream, now or as soon as the client takes it."""
        self._sendable[stream] = None
        self._schedule_write()
        stream.update_write_pause()

    def acknowledge_data(self, stream: Http2Stream, size: int) -> None:
        """Let the client send ``size`` bytes more."""
        if not self._is_closed:
            self._h2.acknowledge_received_data(size, stream.number)
            self._schedule_write()

    def reset_stream(self, stream: Http2Stream, code: int) -> None:
        """End a stream at once."""
        if stream.is_open and not self._is_closed:
            self._h2.reset_stream(stream.number, code)
            self._drop_stream(stream)
            self._schedule_write()

    def close_when_idle(self) -> None:
        """Accept no more streams, and close the connection after the last one."""
        self._refuse_streams()

    # -- receiving

    def _update_reading(self) -> None:
        if self.write_paused or self._awaits_turn:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def _handle_frame(self, frame: ReceivedFrame) -> None:
        """Handle a frame. Raises HostileFrames, ProtocolError."""
        if frame.kind == GOAWAY:  # it says nothing about the client's own streams, also of those to come
            if not self._client_leaves and not self._streams:
                self._timer.schedule_action(LINGER_SECONDS, self._close_idle_connection)
            self._client_leaves = True
            return
        for event in self._h2.receive_data(frame.data):
            self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        """Handle an event of h2. Raises HostileFrames."""
        if isinstance(event, RequestReceived):
            self._begin_request(event)
        elif isinstance(event, DataReceived):
            self._take_data(event)
        elif isinstance(event, StreamEnded):
            stream = self._streams.get(event.stream_id or 0)
            if stream is not None and stream.cycle is not None:
                stream.cycle.end_body()
        elif isinstance(event, StreamReset):
            stream = self._streams.get(event.stream_id or 0)
            if stream is not None:
                self._drop_stream(stream)
                if not event.remote_reset:  # the client has made h2 reset it; the guard has counted the others
                    self._guard.count_reset()
        elif isinstance(event, RemoteSettingsChanged):
            for code in event.changed_settings:
                if code not in KNOWN_SETTINGS:
                    del self._h2.remote_settings[code]  # h2 would store up to 65,536 of them
            # The client may allow a table without bounds, which the server would have to keep and search.
            if self._h2.encoder.header_table_size > ENCODER_TABLE:
                self._h2.encoder.header_table_size = ENCODER_TABLE

    def _take_data(self, event: DataReceived) -> None:
        number, data, size = event.stream_id or 0, event.data or b"", event.flow_controlled_length or 0
        stream = self._streams.get(number)
        if stream is None or stream.cycle is None or stream.cycle.response_complete:
            self._h2.acknowledge_received_data(size, number)
            return
        if size > len(data):  # padding
            self._h2.acknowledge_received_data(size - len(data), number)
        if data:
            stream.cycle.feed_body(data)

    def _begin_request(self, event: RequestReceived) -> None:
        """Start a request, or refuse its stream. Raises HostileFrames."""
        number, fields = event.stream_id or 0, event.headers or ()
        self._guard.count_fields(len(fields), sum(len(name) + len(value) for name, value in fields))
        if self._is_leaving or len(self._running) + len(self._starting) >= MAX_TASKS:
            self._refuse_stream(number, REFUSED_STREAM)
            return
        try:
            head = read_head(fields)
        except MalformedHead:
            self._refuse_stream(number, PROTOCOL_ERROR)
            return
        if not self._streams:
            self._timer.clear_action()
            self.options.connection_limit.mark_busy(self)
        self._request_count += 1
        scope = self._make_scope(head)
        head_error = too_many_connections() if self._over_limit else head.find_error(self.options)
        if head_error is not None:
            scope[HEAD_ERROR_KEY] = head_error
        self._streams[number] = stream = Http2Stream(number, self, self.options.write_timeout)
        stream.cycle = cycle = Http2Cycle(
            scope,
            stream,
            self._server_state.default_headers,
            expects_continue=(b"expect", b"100-continue") in head.headers,
            on_complete=self._count_response,
        )
        self._starting.append(cycle)
        if self._over_limit:
            self._refuse_streams()

    def _start_requests(self, *, has_more: bool) -> None:
        """Run the application for the requests that have come, except those that the client has reset already.

        ``has_more``: the next frame has come, too, which may reset the last one.
        """
        starting, self._starting = self._starting, []
        if has_more and starting:
            self._starting.append(starting.pop())
        for cycle in starting:
            if not cycle.disconnected:
                task = self._loop.create_task(cycle.run_app(self._opened.app))
                for tasks in (self._running, self._server_state.tasks):
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    def _refuse_stream(self, number: int, code: int) -> None:
        """Reset a stream whose request is not handled. Raises HostileFrames."""
        self._h2.reset_stream(number, code)
        self._guard.count_reset()

    def _make_scope(self, head: Http2Head) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": self._opened.root_path,
            "state": {},
            REQUEST_NUMBER_KEY: self._request_count,
            **head.scope_members,
        }

    def _time_header_block(self) -> None:
        """Limit the time of a header block in several frames, since no other frame may come before its end."""
        if self._guard.in_header_block == self._times_block:
            return
        self._times_block = self._guard.in_header_block
        if self._times_block:
            self._timer.schedule_action(self.options.header_timeout, self._on_head_timeout)
        elif self._streams:
            self._timer.clear_action()
        else:
            self._become_idle()

    # -- sending

    def _schedule_write(self) -> None:
        """Write once for all that is sent in this iteration of the loop."""
        if not self._write_scheduled and not self._is_closed:
            self._write_scheduled = True
            self._loop.call_soon(self._send_scheduled)

    def _send_scheduled(self) -> None:
        self._write_scheduled = False
        if not self._is_closed:
            self._send_queued()

    def _send_queued(self) -> None:
        """Send the queued parts of all streams in turn, as far as the client's windows and its system take them."""
        unwritten = 0
        while self._sendable and not self.write_paused and not self._is_closed:
            sent_bytes = 0
            for stream in tuple(self._sendable):
                sent_bytes += self._send_frame(stream)
            unwritten += sent_bytes
            if not sent_bytes:
                break
            if unwritten >= WRITE_SIZE:
                self._write_output()
                unwritten = 0
        self._write_output()
        for stream in self._sendable:
            stream.watch_progress()

    def _send_frame(self, stream: Http2Stream) -> int:
        """Send one frame of a stream. Return the number of bytes that it takes; 0 if the client takes none now."""
        if not stream.is_open or not stream.parts:
            self._sendable.pop(stream, None)
            return 0
        window = self._h2.local_flow_control_window(stream.number)
        size = min(window, self._h2.max_outbound_frame_size, MAX_FRAME_SIZE)
        if size <= 0 and stream.parts[0]:
            return 0
        chunk, is_last = stream.next_chunk(size)
        self._h2.send_data(stream.number, chunk, end_stream=is_last)
        self._guard.note_sent_data()
        if is_last:
            self._finish_stream(stream)
        else:
            stream.update_write_pause()
        if not stream.parts:
            self._sendable.pop(stream, None)
        return len(chunk) + FRAME_HEADER

    def _write_output(self) -> None:
        if not self.transport.is_closing() and (data := self._h2.data_to_send()):
            self.transport.write(data)

    def _update_write_pauses(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.update_write_pause()

    # -- the end of streams

    def _count_response(self) -> None:
        self._server_state.total_requests += 1
        self._guard.note_response()

    def _finish_stream(self, stream: Http2Stream) -> None:
        """End a stream whose response was sent. A client that still sends its body is asked to stop, but not at once:
        some clients would drop the response."""
        if stream.cycle is not None and not stream.cycle.body_complete:
            self._loop.call_later(LINGER_SECONDS, self._stop_upload, stream.number)
        self._drop_stream(stream)

    def _stop_upload(self, number: int) -> None:
        """Reset the stream of a complete response, if the client is still sending its body."""
        if not self._is_closed:
            with contextlib.suppress(StreamClosedError):
                self._h2.reset_stream(number, NO_ERROR)
                self._schedule_write()

    def _drop_stream(self, stream: Http2Stream) -> None:
        self._streams.pop(stream.number, None)
        self._sendable.pop(stream, None)
        if unread := stream.end():
            self._h2.acknowledge_received_data(unread, stream.number)
        if not self._streams:
            self._become_idle()

    def _end_streams(self) -> None:
        """End all streams, because the connection has ended."""
        streams, self._streams = tuple(self._streams.values()), {}
        self._starting.clear()
        self._sendable.clear()
        for stream in streams:
            stream.end()

    # -- the end of the connection

    def _become_idle(self) -> None:
        """Wait for the next request, or close the connection: no stream is left."""
        if self._is_closed:
            return
        self.options.connection_limit.mark_idle(self)
        if self._is_leaving:
            self._close_idle_connection()
        elif not self._times_block:
            seconds = LINGER_SECONDS if self._client_leaves else self.options.keep_alive
            self._timer.schedule_action(seconds, self._close_idle_connection)

    def _refuse_streams(self) -> None:
        """Accept no more streams, and close the connection after the last one."""
        if self._is_closed or self._is_leaving:
            return
        self._is_leaving = True
        self._write_goaway(self._h2.highest_inbound_stream_id, NO_ERROR)
        if not self._streams:
            self._close_idle_connection()

    def _close_idle_connection(self) -> None:
        """Send GOAWAY on an idle connection, and close it later: a client that closes it first loses no request."""
        if not self._is_leaving:
            self._is_leaving = True
            self._write_goaway(self._h2.highest_inbound_stream_id, NO_ERROR)
        self._write_output()
        self._timer.schedule_action(LINGER_SECONDS, lambda: self._close_connection(NO_ERROR))

    def _write_goaway(self, last_stream: int, code: int) -> None:
        """Write GOAWAY; h2's own would end the streams that are open."""
        self._write_output()
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code)
        if not self.transport.is_closing():
            self.transport.write(frame.serialize())

    def _on_head_timeout(self) -> None:
        self._refuse_connection(ENHANCE_YOUR_CALM, "The request's headers did not come in time.")

    def _refuse_connection(self, code: int, reason: str) -> None:
        """Close a connection whose frames cannot be accepted."""
        if not self._is_closed and self.options.access_log:
            log_refused_connection(str((self._client or ("",))[0]), 400, reason)
        self._close_connection(code)

    def _close_connection(self, code: int) -> None:
        """Close the connection after sending all written bytes, and end its streams."""
        if self._is_closed:
            return
        self._timer.stop_timer()
        if not self._is_leaving or code != NO_ERROR:
            self._h2.clear_outbound_data_buffer()
            self._write_goaway(self._h2.highest_inbound_stream_id, code)
        self._is_closed = True
        self.transport.close()
        self._write_timer.schedule_action(self.options.write_timeout, self.transport.abort)
        self._end_streams()


def _make_connection(header_list_size: int) -> H2Connection:
    """Return the state of a new connection. ``header_list_size``: bytes of the headers of a request, decoded."""
    connection = H2Connection(
        H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_inbound_headers=False,  # by `read_head`
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
    )
    settings = {
        SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        SettingCodes.MAX_HEADER_LIST_SIZE: header_list_size,
    }
    connection.local_settings = Settings(client=False, initial_values=settings)
    connection.decoder = HeaderDecoder(header_list_size)
    connection.decoder.max_allowed_table_size = connection.local_settings.header_table_size
    return connection
