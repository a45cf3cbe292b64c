"""Accepts the connections of listening sockets that several processes share, so that each process gets its part.

The first process that wakes would take a whole burst, and keep it as long as the clients keep their connections. So a
process accepts one connection at a time, and waits a moment if it has more than another one that serves. It waits only
a moment, because the other process may be busy or stopped.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Callable
from ssl import SSLContext

from parley.web.connection_limit import ConnectionLimit
from parley.web.http_protocol import LimitedHttpProtocol
from parley.web.listener import ConnectionListener

COUNT = struct.Struct("=i")
NOT_SERVING = -1
YIELD_SECONDS, MAX_YIELDS = 0.001, 5  # how long, and how often, another process may go first


class ConnectionCounts:
    """The number of connections of each process, in a file that all of them map. ``own``: the place of this process's
    number; None: of the process that starts the others, which has none."""

    def __init__(self, file: int, processes: int, own: int | None = None):
        self._memory = mmap.mmap(file, COUNT.size * processes)
        self._processes, self._own = processes, own

    def mark_ended(self, place: int) -> None:
        """Note that a process does not serve."""
        COUNT.pack_into(self._memory, place * COUNT.size, NOT_SERVING)

    def set_own(self, connections: int) -> None:
        """Set this process's number of connections."""
        assert self._own is not None
        COUNT.pack_into(self._memory, self._own * COUNT.size, connections)

    def add_own(self) -> None:
        """Count a connection that this process has accepted."""
        assert self._own is not None
        self.set_own(self._read_place(self._own) + 1)

    @property
    def is_ahead(self) -> bool:
        """Whether this process has more connections than another one that serves."""
        assert self._own is not None
        serving = [count for count in map(self._read_place, range(self._processes)) if count != NOT_SERVING]
        return self._read_place(self._own) > min(serving, default=0)

    def _read_place(self, place: int) -> int:
        count: int = COUNT.unpack_from(self._memory, place * COUNT.size)[0]
        return count


class SharedListener(ConnectionListener):
    """Accepts the connections of one listening socket, each for a protocol of ``create_protocol``; encrypted ones with
    ``context``, others without."""

    def __init__(
        self,
        sock: socket.socket,
        context: SSLContext | None,
        create_protocol: Callable[[], LimitedHttpProtocol],
        connection_limit: ConnectionLimit,
        counts: ConnectionCounts,
    ):
        self._counts = counts
        self._pauses = 0  # since the last connection
        super().__init__(sock, context, create_protocol, connection_limit)

    def _next_pause(self) -> float:
        """Return how many seconds other processes, which have fewer connections, may accept first."""
        if self._pauses == MAX_YIELDS or not self._counts.is_ahead:
            self._pauses = 0
            return 0.0
        self._pauses += 1
        return YIELD_SECONDS

    def _count_connection(self) -> None:
        """Note that a connection was accepted."""
        self._counts.add_own()
