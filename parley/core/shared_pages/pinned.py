"""Pages that are pinned for other instances: leases (pages they read) and reservations (pages they fill).

Divides the pool between pinned pages and local sequences. Pages that are being read or filled cannot be taken back, and
this engine does not decide when a transfer ends. So everything that is admitted must fit next to them: a sequence with
all of its tokens (otherwise it would preempt others in vain), a reservation next to the longest running sequence. Then
the first sequence in order makes progress, or waits only for a transfer to end.

Decides when a sequence or reservation may start; knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parley.core.adapter_cache import Shelf
from parley.core.pages.block_pool import BlockPool, pages
from parley.core.scheduler import Scheduler
from parley.core.sequence import Sequence
from parley.core.shared_pages.leases import Leases
from parley.core.shared_pages.reservations import Answer, Landings


class Holds:
    """Leases and reservations of one pool.

    ``root_name``: root name of all prompt hashes; None where no prefix is cached. ``on_pages_leased(request_id,
    pages)`` is called with pages added to the lease of a request. ``has_changes``: pages were pinned or freed since the
    last emitted statistics. ``scheduler`` must be set before any call, if the model has pages.
    """

    scheduler: Scheduler

    def __init__(
        self, pool: BlockPool, shelf: Shelf, names: str | None, vocab_size: int, tell: Callable[[str, list[int]], None]
    ):
        self.changed = False
        self._pool = pool
        self._leases = Leases(pool, tell, self._move)
        self._landings = Landings(pool, shelf, names, vocab_size, self._room)
        self.lease, self.begin = self._leases.open, self._leases.begin
        self.grow, self.start = self._leases.grow, self._leases.start
        self.revoke, self.urge = self._landings.revoke, self._leases.urge

    @property
    def pinned(self) -> int:
        """Number of pages that other instances read."""
        return self._leases.pinned

    @property
    def reserved(self) -> int:
        """Number of pages that other instances fill; a page shared by several requests counts once for each."""
        return self._landings.reserved

    def tables(self) -> Iterator[list[int]]:
        """Yield the page tables of all leases and reservations, for conservation checks."""
        yield from self._leases.tables()
        yield from self._landings.tables()

    def reserve(self, key: str, token_ids: list[int], salt: str, adapter: str, digest: str, answer: Answer) -> None:
        """Reserve pages for a prompt that another instance computes; see ``engine.messages.Reserve``."""
        self._landings.reserve(key, token_ids, salt, adapter, digest, answer)
        self.changed = True

    def land(self, key: str, count: int) -> None:
        """Mark the first ``count`` pages of a reservation as received."""
        self._landings.land(key, count)
        self.changed = True

    def cut(self, key: str, count: int) -> None:
        """Give up all but the first ``count`` pages of a reservation."""
        self._landings.cut(key, count)
        self.changed = True

    def free(self, key: str) -> None:
        """Free a reservation."""
        self._landings.free(key)
        self.changed = True

    def release(self, id: str) -> None:
        """End the lease of a request."""
        self._leases.release(id)
        self.changed = True

    def fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether all tokens of a waiting sequence fit next to the pinned pages. ``cached_blocks``: pages that it would
        find in the prefix cache; they may be pinned themselves."""
        taken = self._leases.claimed(sequence) + self._landings.moving
        return self._leases.need(sequence, found) <= self._pool.size - taken

    def _room(self) -> int:
        """Return how many pages may be reserved now."""
        taken = self._leases.claimed() + self._landings.moving
        longest = max((pages(len(sequence) + 1) for sequence in self.scheduler.running), default=0)
        return min(self.scheduler.spare(), self._pool.size - taken - longest)

    def _move(self, sequence: Sequence, priority: float) -> None:
        self.scheduler.move(sequence, priority)
