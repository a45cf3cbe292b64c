"""Limits the client connections of a process, over all its ports, to the number that file descriptors allow.

Above the limit, an idle connection is closed in favour of a new one. If none is idle, requests on the new connection
get an error. This module knows connections, not requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
from math import inf
from time import monotonic
from typing import Protocol

log = logging.getLogger("parley.server")

SPARE_DESCRIPTORS = (
    64  # minimum of reserved descriptors: half for engines, other instances and files, half to refuse clients with
)
WARNING_INTERVAL = 60.0  # seconds between two warnings


class LimitedConnection(Protocol):
    """A client connection. ``awaits_request``: it is idle, between two requests."""

    transport: asyncio.Transport

    @property
    def awaits_request(self) -> bool:
        """Whether the connection is idle between two requests."""


class ConnectionLimit:
    """Serves ``served_limit`` connections. Further ones, up to ``refused_limit``, get an error; the rest is aborted."""

    def __init__(self, served_limit: int, refused_limit: int):
        self.served_limit, self.refused_limit = served_limit, refused_limit
        self._connections: set[LimitedConnection] = set()
        self._warned_at = -inf

    @classmethod
    def from_descriptor_limit(cls, descriptors_each: int) -> ConnectionLimit:
        """Raise the descriptor limit and derive how many connections fit, at ``descriptors_each`` per connection."""
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit != hard_limit:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
                soft_limit = hard_limit
        if soft_limit == resource.RLIM_INFINITY:
            return cls(sys.maxsize, sys.maxsize)
        reserved = max(SPARE_DESCRIPTORS, soft_limit // 8)
        served_limit = max(1, (soft_limit - reserved) // descriptors_each)
        return cls(served_limit, served_limit + reserved // 2)

    def add_connection(self, connection: LimitedConnection) -> bool:
        """Register a connection. Return True if it is served.

        If not, its request has to be refused. Above ``refused_limit`` the connection is aborted here.
        """
        self._connections.add(connection)
        if len(self._connections) <= self.served_limit:
            return True
        if len(self._connections) > self.refused_limit:
            connection.transport.abort()
            return False
        idle_connection = next(
            (each for each in self._connections if each is not connection and each.awaits_request), None
        )
        if idle_connection is not None:
            idle_connection.transport.close()
            return True
        if (now := monotonic()) >= self._warned_at + WARNING_INTERVAL:
            self._warned_at = now
            log.warning("Requests are refused: there are more than %d connections (ulimit -n).", self.served_limit)
        return False

    def remove_connection(self, connection: LimitedConnection) -> None:
        """Unregister a connection that was lost."""
        self._connections.discard(connection)
