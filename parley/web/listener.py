"""Accepts connections. The handshakes of encrypted ones count as connections, with the time limit of request heads.

asyncio's own servers create a protocol only after the handshake, so clients that stay silent would not be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from ssl import SSLContext

from parley.web.connection_limit import ConnectionLimit
from parley.web.http_protocol import LimitedHttpProtocol

log = logging.getLogger("parley.server")

ACCEPT_RETRY_SECONDS = 0.2  # after a connection could not be accepted: there may be too many open files
MAX_ACCEPTS = 128  # connections that are accepted in one iteration of the loop, if there is room for them


class ConnectionListener:
    """Accepts the connections of one listening socket, each for a protocol of ``create_protocol``.

    uvicorn closes it like asyncio's servers.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: SSLContext | None,
        create_protocol: Callable[[], LimitedHttpProtocol],
        connection_limit: ConnectionLimit,
    ):
        self._sock, self._context, self._create_protocol = sock, context, create_protocol
        self._connection_limit = connection_limit
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause_timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept_connections)

    def close(self) -> None:
        """Close the socket, and end connections whose handshake is not complete."""
        if self._sock.fileno() < 0:
            return
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._context is not None:
            for task in self._opening:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept_connections(self) -> None:
        """Accept the clients that wait.

        A loop's own server may accept one in each iteration only, and an iteration lasts as long as the work for all
        clients that are connected already.

        Above the limit, each new connection closes another one. So only one is accepted in an iteration, and a client
        has time to send its request.
        """
        room = self._connection_limit.free_count - len(self._opening)
        for _ in range(max(1, min(room, MAX_ACCEPTS))):
            if (pause := self._next_pause()) > 0:
                self._pause_accepting(pause)
                return
            try:
                sock, _address = self._sock.accept()
            except BlockingIOError:  # there is none, or another process has it
                return
            except OSError as error:
                log.warning("A connection could not be accepted: %s", error)
                self._pause_accepting(ACCEPT_RETRY_SECONDS)
                return
            sock.setblocking(False)
            self._count_connection()
            task = self._loop.create_task(self._open_connection(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _pause_accepting(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause_timer = self._loop.call_later(seconds, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause_timer = None
        self._loop.add_reader(self._sock, self._accept_connections)
        self._accept_connections()

    def _next_pause(self) -> float:
        """Return how many seconds other processes that share the socket may accept first; here are none."""
        return 0.0

    def _count_connection(self) -> None:
        """Note that a connection was accepted."""

    async def _open_connection(self, sock: socket.socket) -> None:
        """Run the handshake, if connections are encrypted; from then on the protocol has the connection."""
        loop, protocol, task = self._loop, self._create_protocol(), asyncio.current_task()
        if self._context is None:
            with contextlib.suppress(OSError):  # the client has left
                await loop.connect_accepted_socket(lambda: protocol, sock)
            return
        assert task is not None
        protocol.begin_handshake(task.cancel)
        try:
            with contextlib.suppress(OSError):  # the handshake was malformed or late, or the client has left
                await loop.connect_accepted_socket(
                    lambda: protocol,
                    sock,
                    ssl=self._context,
                    ssl_handshake_timeout=protocol.options.header_timeout,
                )
        finally:
            protocol.end_handshake()
