"""How many connections of clients there is room for: as many as descriptors allow, at all ports of a process together.

Beyond that one on which nothing happens is closed for one that comes; where there is none, who comes is told so. Knows
no requests.
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

SPARE = 64  # descriptors, at least: half for engines, other instances and files, half for clients that are refused
SILENCE = 60.0  # seconds between two warnings


class Guest(Protocol):
    """A connection. ``spare``: it waits for another request."""

    transport: asyncio.Transport

    @property
    def spare(self) -> bool: ...


class Room:
    """``served`` connections are answered; those beyond, up to ``full``, are told that there is no room."""

    def __init__(self, served: int, full: int):
        self.served, self.full = served, full
        self._guests: set[Guest] = set()
        self._warned = -inf

    @classmethod
    def greatest(cls, each: int) -> Room:
        """What there is if ``each`` takes so many descriptors, of which there are to be as many as may be."""
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
        """Is it served? If not it is to be told so, or is closed where there is not even room for that."""
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
        self._guests.discard(guest)
