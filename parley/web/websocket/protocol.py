"""One WebSocket: its frames, pings and closing, within the limits of the port.

The wsproto library reads and writes frames. Messages are texts; parts of them are kept until they are read, and the
client's system has to wait once there are many. A frame costs its sender next to nothing, so each connection has an
allowance of frames that refills with time; long parts of messages do not count, since their bytes are limited. Frames
within the allowance are parsed a few at a time, in turns with other connections. The connection counts as busy while
requests run on it, and as idle otherwise: then it makes room for others, and ends when the server stops.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp
from starlette.types import Message as AsgiMessage
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage

from parley.web.framing.frame_guard import FRAME_BURST, FRAMES_PER_SECOND, SMALL_DATA, Allowance
from parley.web.framing.reusable_timer import ReusableTimer
from parley.web.http_options import HttpOptions

LINGER_SECONDS = 2.0  # that a client has to answer a close
# Proxies cut silent connections. A client that runs a tool meanwhile may leave pings unanswered, and is not dropped.
PING_SECONDS = 30.0
UNACKNOWLEDGED_MILLISECONDS = 90_000  # after which a client whose system does not acknowledge data has gone
NORMAL, GOING_AWAY, PROTOCOL_ERROR, BAD_DATA, POLICY = 1000, 1001, 1002, 1003, 1008  # close codes: RFC 6455, 7.4.1
TOO_BIG, INTERNAL_ERROR, TRY_AGAIN = 1009, 1011, 1013
FRAMES_PER_TURN = 8  # frames that are handled before other connections have their turn
PART_BYTES = 128  # of memory that a part of a message takes besides its text
SHUTTING_DOWN = "The server is shutting down."


@dataclass(slots=True)
class MessagePart:
    """A part of a message. Frames that come before it is read are appended to it: an object for each would take far
    more memory than their bytes. ``is_last``: the message ends with it."""

    data: bytearray
    is_last: bool


class UpgradedConnection(Protocol):
    """An HTTP connection that becomes a WebSocket."""

    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    server_state: ServerState

    @property
    def options(self) -> HttpOptions:
        """The options of the port, as they are now."""


class WebSocketProtocol(asyncio.Protocol):
    """One connection, with the methods that an ``HttpCycle`` uses of a transport and its flow control. ``app``: answers
    requests on it."""

    def __init__(self, opened: UpgradedConnection, transport: asyncio.Transport, *, write_paused: bool):
        self.transport = transport
        self.app = opened.app
        self.write_paused = write_paused
        self._opened = opened
        self._server_state = opened.server_state
        self._frames = Connection(ConnectionType.SERVER)
        self._events: Iterator[Event] = iter(())  # of received frames, which are parsed as it advances
        self._awaits_turn = False  # True: received frames wait for other connections, so no more is read
        self._parts: deque[MessagePart] = deque()  # of messages that are not read
        self._unread_bytes = 0
        self._allowance = Allowance(FRAME_BURST, FRAMES_PER_SECOND)
        self._is_flooded = False  # True: more frames have come than allowed, and nothing more is read
        self._has_news = asyncio.Event()
        self._may_write = asyncio.Event()
        self._ping_timer, self._end_timer = ReusableTimer(opened.loop), ReusableTimer(opened.loop)
        self._is_closing = False  # True: no message is read or written any more
        self._is_busy = self._is_leaving = False
        if not write_paused:
            self._may_write.set()

    @property
    def options(self) -> HttpOptions:
        """The options of the port, as they are now."""
        return self._opened.options

    def begin(self, head: bytes) -> None:
        """Accept the handshake with this head, and read frames from now on."""
        self._server_state.connections.add(self)  # type: ignore[arg-type]
        self.transport.set_protocol(self)
        self.transport.write(head)
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
        self._schedule_ping()
        self.options.connection_limit.mark_idle(self)

    # -- the connection

    def connection_lost(self, exc: Exception | None) -> None:
        """End everything that waits for the client."""
        self._end_messages()
        self._ping_timer.stop_timer()
        self._end_timer.stop_timer()
        self._server_state.connections.discard(self)
        self.options.connection_limit.remove_connection(self)

    def eof_received(self) -> bool:
        """Return False: a client that sends nothing more has gone."""
        self._end_messages()
        self._end_timer.schedule_action(LINGER_SECONDS, self.transport.abort)
        return False

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client, and read no more until all have had their turn."""
        if self._is_flooded or self._frames.state not in (ConnectionState.OPEN, ConnectionState.LOCAL_CLOSING):
            return
        self._frames.receive_data(data)
        if self._awaits_turn:
            return
        self._events = self._frames.events()
        if self.options.connection_limit.turns.request_turn(self):
            self._awaits_turn = True
            self._update_reading()

    def take_turn(self) -> bool:
        """Handle some of the received frames. Return whether more may be left."""
        try:
            has_more = self._handle_some_frames()
        except Exception:  # a fault of the server: nothing would read this connection again
            self.transport.abort()
            raise
        if not has_more and self._awaits_turn:
            self._awaits_turn = False
            self._update_reading()
        return has_more

    def pause_writing(self) -> None:
        """Read no more while the client takes nothing: answers to its pings would fill the memory."""
        self.write_paused = True
        self._may_write.clear()
        self.transport.pause_reading()
        self._end_timer.schedule_action(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue: the transport has room again."""
        self.write_paused = False
        self._may_write.set()
        self._end_timer.clear_action()
        self._update_reading()
        if self._is_closing:
            self._end_timer.schedule_action(LINGER_SECONDS, self.transport.abort)

    def give_way(self) -> None:
        """Close, because another connection takes its place."""
        self.close(TRY_AGAIN, "The server has as many connections as it can serve.")
        if self.transport.get_write_buffer_size():  # the client does not read: a close would wait for it
            self.transport.abort()
        self.transport.close()

    def announce_shutdown(self) -> None:
        """Close as soon as no request runs."""
        self._is_leaving = True
        if not self._is_busy:
            self.close(GOING_AWAY, SHUTTING_DOWN)

    def shutdown(self) -> None:
        """Close as soon as no request runs. uvicorn calls it."""
        self.announce_shutdown()

    # -- for those who use it

    @property
    def is_leaving(self) -> bool:
        """Whether the server stops, so that no request may begin any more."""
        return self._is_leaving

    def mark_busy(self) -> None:
        """Note that a request runs."""
        self._is_busy = True
        self.options.connection_limit.mark_busy(self)

    def mark_idle(self) -> None:
        """Note that no request runs any more."""
        self._is_busy = False
        self.options.connection_limit.mark_idle(self)
        if self._is_leaving:
            self.close(GOING_AWAY, SHUTTING_DOWN)

    async def wait_for_message(self) -> bool:
        """Wait until a message has begun to arrive. Return False once the connection ends."""
        while not self._parts and not self._is_closing:
            self._has_news.clear()
            await self._has_news.wait()
        return not self._is_closing

    async def receive_part(self) -> AsgiMessage:
        """Return the next part of a message in the form of a request's body in ASGI; a disconnect at the end."""
        if not await self.wait_for_message():
            return {"type": "http.disconnect"}
        part = self._parts.popleft()
        self._unread_bytes -= PART_BYTES + len(part.data)
        self._update_reading()
        return {"type": "http.request", "body": bytes(part.data), "more_body": not part.is_last}

    def send_text(self, data: bytes) -> None:
        """Send a message, which is UTF-8. Nothing is sent on a connection that is closing."""
        if not self._is_closing:
            self.transport.write(self._frames.send(TextMessage(data=data.decode())))
            self._schedule_ping()

    def close(self, code: int = INTERNAL_ERROR, reason: str = "") -> None:
        """Close: the client has some seconds to do so as well. May be called twice. An answer that is cut short closes
        it without a code."""
        if self._is_closing:
            return
        self._end_messages()
        self.transport.write(self._frames.send(CloseConnection(code=code, reason=reason)))
        self._end_timer.schedule_action(LINGER_SECONDS, self.transport.abort)

    # -- as a transport and its flow control

    async def drain(self) -> None:
        """Wait until something may be written."""
        await self._may_write.wait()

    def resume_reading(self) -> None:
        """Do nothing: the connection is read all the time."""

    def write(self, data: bytes) -> None:
        """Raise AssertionError: answers are messages."""
        raise AssertionError("answers are messages")

    def is_closing(self) -> bool:
        """Whether the connection is closed or will be."""
        return self._is_closing

    def get_extra_info(self, name: str) -> Any:
        """Return a property of the transport."""
        return self.transport.get_extra_info(name)

    def abort(self) -> None:
        """Drop the connection, unless it is being closed in order."""
        if not self._is_closing:
            self.transport.abort()

    # -- frames

    def _handle_some_frames(self) -> bool:
        """Handle the frames of one turn. Return whether more may be left."""
        for _ in range(FRAMES_PER_TURN):
            if self.transport.is_closing() or (event := next(self._events, None)) is None:
                return False
            if _is_cheap(event) and not self._allowance.spend():
                self._is_flooded = True
                self.close(POLICY, "Too many frames came.")
                self.transport.pause_reading()
                return False
            self._handle_event(event)
        return True

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, CloseConnection):
            self._take_close(event)
        elif self._is_closing:
            return  # whatever the client sent before it has read the close
        elif isinstance(event, TextMessage):
            self._take_text(event.data.encode(), is_last=event.message_finished)
        elif isinstance(event, BytesMessage):
            self.close(BAD_DATA, "Messages are texts.")
        elif isinstance(event, Ping):
            self.transport.write(self._frames.send(event.response()))

    def _take_close(self, event: CloseConnection) -> None:
        """Close after the client: it has closed or answered a close, or its frames are malformed."""
        is_open = self._frames.state is ConnectionState.OPEN
        if is_open:
            self.close(event.code, event.reason or "")
        elif self._frames.state is ConnectionState.REMOTE_CLOSING:
            self.transport.write(self._frames.send(event.response()))
        self._end_messages()
        self.transport.close()
        self._end_timer.schedule_action(LINGER_SECONDS, self.transport.abort)  # it may not read what was sent before

    def _take_text(self, data: bytes, *, is_last: bool) -> None:
        if not data and not is_last:
            return
        if not self._parts or self._parts[-1].is_last:
            self._parts.append(MessagePart(bytearray(), is_last=False))
            self._unread_bytes += PART_BYTES
        part = self._parts[-1]
        part.data += data
        part.is_last = is_last
        self._unread_bytes += len(data)
        self._update_reading()
        self._has_news.set()

    def _update_reading(self) -> None:
        """Pause or resume reading, after frames or parts have come or were read, or the client reads again."""
        if self.transport.is_closing() or self.write_paused or self._is_flooded:
            return
        if self._awaits_turn or self._unread_bytes > HIGH_WATER_LIMIT:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _end_messages(self) -> None:
        """Read and write no message any more."""
        self._is_closing = True
        self._parts.clear()
        self._unread_bytes = 0
        self._has_news.set()
        self._may_write.set()
        self._update_reading()

    def _schedule_ping(self) -> None:
        self._ping_timer.schedule_action(self.options.ping_interval or PING_SECONDS, self._send_ping)

    def _send_ping(self) -> None:
        if not self._is_closing:
            if not self.write_paused:
                self.transport.write(self._frames.send(Ping()))
            self._schedule_ping()


def _is_cheap(event: Event) -> bool:
    """Whether a frame makes work that its bytes do not pay for: it ends a message, or carries little of one or none."""
    if not isinstance(event, Message) or event.message_finished:
        return True
    return event.frame_finished and len(event.data) < SMALL_DATA
