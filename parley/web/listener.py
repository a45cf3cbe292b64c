"""Accepts connections. The handshakes of encrypted ones count as connections, with the time limit of request heads.

asyncio's own servers create a protocol only after the handshake, so clients that stay silent would not be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from ssl import SSLContext
from typing import Any

from parley.web.http_protocol import LimitedHttpProtocol

log = logging.getLogger("parley.server")

ACCEPT_RETRY_SECONDS = 0.2  # after a connection could not be accepted: there may be too many open files


class ConnectionListener:
    """Accepts the connections of one listening socket, each for a protocol of ``create_protocol``.

    uvicorn closes it like asyncio's servers.
    """

    def __init__(
        self, sock: socket.socket, context: SSLContext | None, create_protocol: Callable[[], LimitedHttpProtocol]
    ):
        self._sock, self._context, self._create_protocol = sock, context, create_protocol
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._start_task(self._accept_connections())

    def close(self) -> None:
        """Accept no more connections, and end those whose handshake is not complete."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_connections(self) -> None:
        while True:
            try:
                sock = await self._accept_connection()
            except OSError as error:
                log.warning("A connection could not be accepted: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            self._start_task(self._open_connection(sock))

    async def _accept_connection(self) -> socket.socket:
        """Return the next connection. Raises OSError."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        return connection

    async def _open_connection(self, sock: socket.socket) -> None:
        """Run the handshake, if connections are encrypted; from then on the protocol has the connection."""
        loop, protocol, task = asyncio.get_running_loop(), self._create_protocol(), asyncio.current_task()
        if self._context is None:
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
