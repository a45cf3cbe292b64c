"""Pages that are pinned for other instances: leases (pages that they read) and reservations (pages that they fill).

This module divides the pool between pinned pages and local sequences. Pages that are being read or filled cannot be
taken back, and this engine does not decide when a transfer ends. So each admission must fit into the other pages:
a sequence with all of its tokens (otherwise it would preempt others in vain), a reservation together with the longest
running sequence. Then the first sequence in order makes progress, or only waits for a transfer to end.

It decides when a sequence or reservation may start, and knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parley.core.adapter_cache import AdapterCache
from parley.core.pages.page_pool import PagePool, count_pages
from parley.core.scheduler import Scheduler
from parley.core.sequence import Sequence
from parley.core.shared_pages.leases import PageLeases
from parley.core.shared_pages.reservations import PageReservations, ReserveCallback
from parley.types import KVPrefix


class PinnedPages:
    """Leases and reservations of one pool.

    * ``root_name``: root name of all prompt hashes; None where no prefix is cached.
    * ``long_rope_after``: as in ``ModelRunner``.
    * ``on_pages_leased(request_id, pages)`` is called with pages added to the lease of a request.
    * ``states``: as in ``PageLeases``.
    * ``has_changes``: pages were pinned or freed since the last emitted statistics.
    * ``attach_scheduler`` must be called before anything else, if the model has pages.
    """

    _scheduler: Scheduler

    def __init__(
        self,
        pool: PagePool,
        adapter_cache: AdapterCache,
        root_name: str | None,
        vocab_size: int,
        long_rope_after: float,
        on_pages_leased: Callable[[str, list[int]], None],
        states: PagePool | None = None,
    ):
        self.has_changes = False
        self._pool = pool
        self._leases = PageLeases(pool, on_pages_leased, self._set_priority, states)
        self._reservations = PageReservations(
            pool, adapter_cache, root_name, vocab_size, long_rope_after, self._reservable_pages, states
        )

    def attach_scheduler(self, scheduler: Scheduler) -> None:
        """Set the scheduler that shares the pool; it is made later, because it calls ``fits_in_pool``."""
        self._scheduler = scheduler

    @property
    def pinned_count(self) -> int:
        """Number of pages that other instances read."""
        return self._leases.pinned_count

    @property
    def reserved_count(self) -> int:
        """Number of pages that other instances fill; a page shared by several requests counts once for each."""
        return self._reservations.reserved_count

    def held_tables(self) -> Iterator[list[int]]:
        """Yield the page tables of all leases and reservations, for conservation checks."""
        yield from self._leases.lease_tables()
        yield from self._reservations.reservation_tables()

    def held_states(self) -> Iterator[list[int]]:
        """Yield the slots with states of all leases and reservations, for conservation checks."""
        yield from self._leases.held_states()
        yield from self._reservations.held_states()

    def reserve_pages(self, key: str, prefix: KVPrefix, answer: ReserveCallback) -> None:
        """Reserve pages for a prefix that another instance computes; see ``engine.messages.ReservePages``."""
        self._reservations.reserve_pages(key, prefix, answer)
        self.has_changes = True

    def mark_received(self, key: str, count: int) -> None:
        """Mark the first ``count`` pages of a reservation as received."""
        self._reservations.mark_received(key, count)
        self.has_changes = True

    def truncate_reservation(self, key: str, count: int) -> None:
        """Free all but the first ``count`` pages of a reservation."""
        self._reservations.truncate_reservation(key, count)
        self.has_changes = True

    def free_reservation(self, key: str) -> None:
        """Free a reservation."""
        self._reservations.free_reservation(key)
        self.has_changes = True

    def revoke_reservation(self) -> bool:
        """Drop the received pages of the newest reservation that has any. False if no reservation has any."""
        return self._reservations.revoke_reservation()

    def open_lease(self, request_id: str, choices: list[Sequence], hashes: list[bytes], group_name: str) -> None:
        """Open a lease for pages with these hashes, unless the request has one; see ``PageLeases.open_lease``."""
        self._leases.open_lease(request_id, choices, hashes, group_name)

    def mark_admitted(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted; the group of its lease starts."""
        self._leases.mark_admitted(sequence)

    def raise_priorities(self) -> None:
        """Give urgent priority to all choices of groups that started in the last step. Call it before ``schedule``."""
        self._leases.raise_priorities()

    def extend_lease(self, sequence: Sequence, computed: int) -> None:
        """Add the pages of a sequence's first ``computed`` tokens to its lease."""
        self._leases.extend_lease(sequence, computed)

    def mark_first_result(self, sequence: Sequence) -> None:
        """Record that a sequence has produced a result, or ended: it loses its urgent priority."""
        self._leases.mark_first_result(sequence)

    def release_lease(self, request_id: str) -> None:
        """End the lease of a request."""
        self._leases.release_lease(request_id)
        self.has_changes = True

    def fits_in_pool(self, sequence: Sequence, cached_pages: list[int]) -> bool:
        """Whether the pages that are not pinned suffice for all tokens of a waiting sequence. ``cached_pages``: those
        that it would share from the prefix cache; some of them may be pinned."""
        unavailable = self._leases.claimed_pages(sequence) + self._reservations.pending_count
        return self._leases.pages_to_admit(sequence, cached_pages) <= self._pool.page_count - unavailable

    def _reservable_pages(self) -> int:
        """Return how many pages may be reserved now."""
        unavailable = self._leases.claimed_pages() + self._reservations.pending_count
        longest = max((count_pages(len(sequence) + 1) for sequence in self._scheduler.running), default=0)
        return min(self._scheduler.spare_pages(), self._pool.page_count - unavailable - longest)

    def _set_priority(self, sequence: Sequence, priority: float) -> None:
        self._scheduler.set_priority(sequence, priority)
