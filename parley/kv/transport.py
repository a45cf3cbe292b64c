"""How the bytes of pages get from the giver's arena into the taker's: what a transport has to be able to do.

A link (``link``) carries what the two sides say; a transport carries pages and nothing else. The taker chooses the
first of the giver's offers that it can reach. From then on both sides get the same lists of pages in the same order:
the giver calls ``send`` for each and the taker ``fetch``, and one of the two may be without effect (where the taker
reads the giver's memory, or the giver writes the taker's).

``send`` and ``fetch`` block, and are called in the link's own thread: the kernel copies there, with the interpreter's
lock let go, while the event loop serves others. An event loop's own transports would copy in its thread, and would put
every byte through one more buffer. A page only counts when the giver says, after ``fetch``, that it still held it
(``giver``), so a transport need not know when memory is let go of.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

BATCH = 16 << 20  # bytes of pages of one send and fetch, about; one page at least
FLOOR = 64 << 10  # bytes that have to move within a lease


class LinkError(Exception):
    """A link cannot be had. The message is one sentence."""


class Lost(LinkError):
    """The link, or the other side, was lost during a hand-over."""


class Unreachable(Exception):
    """An offer that this side cannot use. The message says why."""


class Transport(ABC):
    """One link's way for pages. A new one is listed in ``peer``."""

    name: str

    @abstractmethod
    def offer(self) -> bytes:
        """The giver's: what a taker has to know."""

    @abstractmethod
    def reach(self, offer: bytes) -> None:
        """The taker's: can it be used? Raises Unreachable. The offer comes from another machine: trust nothing."""

    @abstractmethod
    def send(self, pages: Sequence[int]) -> None:
        """The giver's: bring pages of its arena on their way. Blocks. Raises Lost, OSError."""

    @abstractmethod
    def fetch(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """The taker's: fill as many pages ``ours`` of its arena. Blocks. Raises Lost, OSError."""

    @abstractmethod
    def close(self) -> None:
        """From any thread, also while another is in ``send`` or ``fetch``, which then ends soon."""


class Pace:
    """Notices a side that moves bytes, but so few that it would hold memory for ever. Raises Lost."""

    def __init__(self, lease: float):
        self._lease = lease
        self._moved = 0
        self._since = time.monotonic()

    def moved(self, count: int) -> None:
        self._moved += count
        now = time.monotonic()
        if self._moved >= FLOOR:
            self._moved, self._since = 0, now
        elif now - self._since > self._lease:
            raise Lost("The other side takes or gives pages too slowly.")
