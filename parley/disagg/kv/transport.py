"""Contract of a transport, which moves the bytes of pages from the sender's arena into the receiver's.

A link (``link``) carries messages; a transport carries only pages. The receiver chooses the first of the sender's
offers that it can use. From then on both sides get the same lists of pages in the same order: the sender calls
``send_pages`` for each and the receiver ``fetch_pages``. One of the two may do nothing (if the receiver reads the
sender's memory, or the sender writes the receiver's).

Both methods block and are called in the link's own thread: there the kernel copies without the interpreter lock, while
the event loop continues. asyncio's transports would copy in the event loop's thread, through one more buffer. A page
only counts as received when the sender confirms, after the fetch, that it still held the page (``sender``). So a
transport need not know when pages are freed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

BATCH_BYTES = 16 << 20  # approximate bytes of pages in one send or fetch; at least one page
MIN_LEASE_BYTES = 64 << 10  # bytes that must move within a lease


class LinkError(Exception):
    """A link cannot be opened. The message is one sentence."""


class LinkLost(LinkError):
    """The link, or the other side, was lost during a handover."""


class OfferUnusable(Exception):
    """This side cannot use the offer. The message says why."""


class KVTransport(ABC):
    """Carries the pages of one link. ``KVPeer`` lists the transports that two instances may choose from."""

    name: str

    @abstractmethod
    def make_offer(self) -> bytes:
        """Return the data that a receiver needs to use the transport. Sender side. Raises OSError if this machine does
        not support it."""

    @abstractmethod
    def use_offer(self, offer: bytes) -> None:
        """Check and use the sender's offer. Receiver side. Raises OfferUnusable. The offer comes from another machine:
        do not trust it."""

    @abstractmethod
    def send_pages(self, pages: Sequence[int]) -> None:
        """Send pages of the own arena. Sender side. Blocks. Raises LinkLost, OSError."""

    @abstractmethod
    def fetch_pages(self, sender_pages: Sequence[int], own_pages: Sequence[int]) -> None:
        """Fill ``own_pages`` of the own arena with the sender's ``sender_pages``. Receiver side. Blocks. Raises
        LinkLost, OSError."""

    @abstractmethod
    def close_transport(self) -> None:
        """Close it, from any thread. A send or fetch in progress in another thread ends soon."""


class ProgressMonitor:
    """Detects another side that transfers bytes, but too slowly: it would hold memory for ever."""

    def __init__(self, lease: float):
        self._lease = lease
        self._moved_bytes = 0
        self._since = time.monotonic()

    def count_moved(self, count: int) -> None:
        """Count moved bytes. Raises LinkLost if there were fewer than MIN_LEASE_BYTES in a lease."""
        self._moved_bytes += count
        now = time.monotonic()
        if self._moved_bytes >= MIN_LEASE_BYTES:
            self._moved_bytes, self._since = 0, now
        elif now - self._since > self._lease:
            raise LinkLost("The other side sends or reads pages too slowly.")
