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

SPARE = 64  # minimum of reserved descriptors: half for engines, other instances and files, half to refuse clients with
SILENCE = 60.0  # seconds between two warnings


class Guest(Protocol):
    """A client connection. ``awaits_request``: it is idle, between two requests."""

    transport: asyncio.Transport

    @property
    def spare(self) -> bool:
        """Whether the connection is idle between two requests."""


class Room:
    """Serves ``served_limit`` connections. Further ones, up to ``refused_limit``, get an error; the rest is aborted."""

    def __init__(self, served: int, full: int):
        self.served, self.full = served, full
        self._guests: set[Guest] = set()
        self._warned = -inf

    @classmethod
    def greatest(cls, each: int) -> Room:
        """Raise the descriptor limit and derive how many connections fit, at ``descriptors_each`` per connection."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        if soft == resource.RLIM_INFINITY:
            return cls(sys.maxsize, sys.maxsize)
        spare = max(SPARE, soft // 8)
        served = max(1, (soft - spare) // each)
        return cls(served, served + spare // 2)

    def enter(self, guest: Guest) -> bool:
        """Register a connection. Return True if it is served.

        If not, its request has to be refused. Above ``refused_limit`` the connection is aborted here.
        """
        self._guests.add(guest)
        if len(self._guests) <= self.served:
            return True
        if len(self._guests) > self.full:
            guest.transport.abort()
            return False
        idle = next((each for each in self._guests if each is not guest and each.spare), None)
        if idle is not None:
            idle.transport.close()
            return True
        if (now := monotonic()) >= self._warned + SILENCE:
            self._warned = now
            log.warning("Requests are refused: there are more than %d connections (ulimit -n).", self.served)
        return False

    def leave(self, guest: Guest) -> None:
        """Unregister a connection that was lost."""
        self._guests.discard(guest)
