"""Limits on client connections, within the file descriptors that the process may have.

Above a limit, a new connection takes the place of one that waits for nothing but its client: the one that has been idle
the longest, or one that has not sent a request yet. If there is none, requests on the new connection get an error. This
module knows connections, not requests.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from parley.web.loop_turns import LoopTurns
from parley.web.memory_trim import MemoryTrim

log = logging.getLogger("parley.server")

FEW_CONNECTIONS = 32  # a limit of open files that allows fewer is worth a warning
# Minimum of reserved descriptors: half for engines, other instances and files, half to refuse clients with.
SPARE_DESCRIPTORS = 64
MAX_GRPC_CONNECTIONS = (1 << 31) - 2  # gRPC aborts the process at a higher limit
ADMIN_CONNECTIONS = 16  # connections of each port of a management plane
OPENING_SECONDS = 0.25  # a client has this long to send its first request before another may take its place
WARNING_INTERVAL = 60.0  # seconds between two warnings
TRIM_COUNT = 512  # after so many connections have ended, their memory is returned to the system
TRIM_DELAY = 5.0  # seconds until then, and at least between two times


class LimitedConnection(Protocol):
    """A client connection."""

    def give_way(self) -> None:
        """Close, because another connection takes its place."""


class ConnectionLimit:
    """Serves ``served_limit`` connections. Further ones, up to ``refused_limit``, get an error.

    Without a request in progress, a connection is *idle* between two requests, and *opening* otherwise, also before
    a handshake is complete. ``turns``: in which connections parse much of what their clients send.
    """

    def __init__(self, served_limit: int = sys.maxsize, refused_limit: int = sys.maxsize):
        self.served_limit, self.refused_limit = served_limit, refused_limit
        self._connections: set[LimitedConnection] = set()
        self._idle: dict[LimitedConnection, None] = {}  # the one that has been idle the longest comes first
        self._opening: dict[LimitedConnection, float] = {}  # the oldest comes first; with the time of its start
        self._warned_at = -inf
        self._ended_count = 0  # connections that ended since memory was last returned
        self._memory_trim = MemoryTrim(TRIM_DELAY)
        self.turns = LoopTurns()

    @property
    def free_count(self) -> int:
        """The number of further connections that would be served; negative if there are too many."""
        return self.served_limit - len(self._connections)

    def add_connection(self, connection: LimitedConnection) -> bool:
        """Register an opening connection. Return True if it is served; if not, its request has to be refused."""
        self._connections.add(connection)
        now = monotonic()
        self._make_room(now)
        self._opening[connection] = now
        if len(self._connections) > self.refused_limit:
            self._close_first(self._opening)
        if len(self._connections) <= self.served_limit:
            return True
        if now >= self._warned_at + WARNING_INTERVAL:
            self._warned_at = now
            log.warning("Requests are refused: there are more than %d connections (ulimit -n).", self.served_limit)
        return False

    def replace_connection(self, connection: LimitedConnection, successor: LimitedConnection) -> None:
        """Replace the object of an opening connection, whose protocol is known now."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._connections.add(successor)
        if (opened_at := self._opening.pop(connection, None)) is not None:
            self._opening[successor] = opened_at

    def remove_connection(self, connection: LimitedConnection) -> None:
        """Unregister a connection that was lost."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._ended_count += 1
            if self._ended_count >= TRIM_COUNT:
                self._ended_count = 0
                self._memory_trim.schedule_trim()
        self._idle.pop(connection, None)
        self._opening.pop(connection, None)

    def mark_opening(self, connection: LimitedConnection) -> None:
        """Note that a request has begun to arrive."""
        if self._idle.pop(connection, self) is not self:
            self._opening[connection] = monotonic()

    def mark_busy(self, connection: LimitedConnection) -> None:
        """Note that a request is in progress."""
        self._idle.pop(connection, None)
        self._opening.pop(connection, None)

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Note that all requests have been answered."""
        if connection in self._connections:
            self._opening.pop(connection, None)
            self._idle[connection] = None

    def _make_room(self, now: float) -> None:
        """Close connections that wait for their clients, until there are not too many."""
        while len(self._connections) > self.served_limit:
            if self._idle:
                self._close_first(self._idle)
            elif self._opening and next(iter(self._opening.values())) <= now - OPENING_SECONDS:
                self._close_first(self._opening)
            else:
                return

    def _close_first(self, waiting: dict[LimitedConnection, None] | dict[LimitedConnection, float]) -> None:
        """Close the first of these connections."""
        connection = next(iter(waiting))
        self.remove_connection(connection)
        connection.give_way()


class ConnectionShares(NamedTuple):
    """How the file descriptors of a process are divided. ``grpc``: the connections of each gRPC port."""

    clients: ConnectionLimit
    grpc: int


def divide_descriptors(
    descriptors_each: int, *, set_aside: int = 0, grpc_ports: int = 0, max_connections: int | None = None
) -> ConnectionShares:
    """Raise the descriptor limit and divide it, at ``descriptors_each`` per connection.

    Clients over HTTP and over gRPC get one half each. ``set_aside``: descriptors for connections that are limited
    otherwise. ``max_connections``: the largest number of client connections, if the descriptors allow more.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != hard_limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
            soft_limit = hard_limit
    available = sys.maxsize if soft_limit == resource.RLIM_INFINITY else soft_limit
    reserved = max(SPARE_DESCRIPTORS, available // 8)
    room = (available - reserved - set_aside) // descriptors_each // (2 if grpc_ports else 1)
    client_count = max(1, min(room, max_connections or room))
    if max_connections is None and client_count < FEW_CONNECTIONS:
        log.warning(
            "The limit of %d open files has room for %d connection%s of clients only; raise it (ulimit -n 4096).",
            available, client_count, "s" * (client_count > 1),
        )  # fmt: skip
    grpc_limit = min(client_count // max(1, grpc_ports), MAX_GRPC_CONNECTIONS)
    return ConnectionShares(ConnectionLimit(client_count, client_count + reserved // 2), max(1, grpc_limit))


def admin_limit() -> ConnectionLimit:
    """Return the connection limit of a management port. Its connections do not count among those of clients."""
    return ConnectionLimit(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS)
