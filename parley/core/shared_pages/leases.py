"""Leases: pages of a prompt that are kept for another instance, from when they are computed until that instance has
read them, even if the sequences that computed them end earlier.

A leased page cannot be taken back, so a half-filled lease must never wait for another half-filled lease. The other
instance ends a lease only when it has heard of all choices, including those of other engine requests that belong to the
same client request. Therefore a *group* of leases starts only if the pool has room for all of them next to all held and
promised pages; from then on its choices run before all others (``URGENT_PRIORITY``) until each has produced a result.
So there is always one group that makes progress.

A lease takes the pages that are found by its hashes, whichever sequence computed them.

Knows pages and their future owners; nothing of the readers, and nothing of slots or steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from parley.core.pages.block_pool import BlockPool, pages
from parley.core.sequence import BLOCK_SIZE, Sequence

URGENT = -inf  # priority of a sequence that others wait for


@dataclass(eq=False, slots=True)
class Lease:
    """The lease of one request. ``hashes``: of the pages that it will have; ``pages``: those that it has.
    ``unstarted``: choices that have produced no result yet."""

    group: Group
    hashes: list[bytes]
    starting: list[Sequence]
    pages: list[int] = field(default_factory=list)

    def common(self, sequence: Sequence) -> int:
        """Return how many of the lease's pages a choice can share: leading pages only, and never the page of its last
        token; 0 if it computes its prompt for the scores."""
        if sequence.prompt_scores:
            return 0
        pairs = zip(self.hashes, sequence.hashes, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(same, (len(sequence) - 1) // BLOCK_SIZE)


@dataclass(eq=False, slots=True)
class Group:
    """Leases that end together. ``has_started``: a choice of one of their requests was admitted."""

    leases: list[Lease] = field(default_factory=list)
    begun: bool = False

    @property
    def starting(self) -> list[Sequence]:
        """All choices of the group that have produced no result yet."""
        return [sequence for lease in self.leases for sequence in lease.starting]

    @property
    def need(self) -> int:
        """Number of pages that suffice for all leases and any one of the choices that have not started."""
        own = (pages(len(each)) - lease.common(each) for lease in self.leases for each in lease.starting)
        return sum(len(lease.hashes) for lease in self.leases) + max(own, default=0)

    @property
    def promised(self) -> int:
        """Number of pages that may still be taken before all choices have started."""
        if not self.begun or not any(lease.starting for lease in self.leases):
            return 0
        return self.need - sum(len(lease.pages) for lease in self.leases)


class Leases:
    """Leases by request id. ``on_pages_leased(request_id, pages)`` is called with the pages that a lease has received,
    ``set_priority(sequence, priority)`` to change a sequence's priority."""

    def __init__(
        self, pool: BlockPool, tell: Callable[[str, list[int]], None], move: Callable[[Sequence, float], None]
    ) -> None:
        self._pool = pool
        self._tell = tell
        self._move = move
        self._leases: dict[str, Lease] = {}
        self._groups: dict[str, Group] = {}
        self._begun: list[Group] = []  # started in the last step
        self._held: Counter[int] = Counter()  # number of leases that hold a page

    @property
    def pinned(self) -> int:
        """Number of pages held by leases."""
        return len(self._held)

    def claimed(self, besides: Sequence | None = None) -> int:
        """Return how many pages are held, or promised to requests other than that of ``excluding``."""
        lease = self._leases.get(besides.id) if besides is not None else None
        own = lease.group if lease is not None else None
        return self.pinned + sum(group.promised for group in self._groups.values() if group is not own)

    def need(self, sequence: Sequence, found: list[int]) -> int:
        """Return how many pages a waiting sequence needs to run, besides pages that leases hold and it shares. For the
        first sequence of a group: the pages that its leases and each of its choices need, one choice at a time."""
        lease = self._leases.get(sequence.id)
        whole = pages(len(sequence))
        if lease is not None and lease.starting and not lease.group.begun:
            whole, found = lease.group.need, found[: lease.common(sequence)]
        return whole - sum(block in self._held for block in found)

    def tables(self) -> Iterator[list[int]]:
        """Return the pages of each lease, for conservation checks."""
        return (lease.pages for lease in self._leases.values())

    def open(self, id: str, choices: list[Sequence], hashes: list[bytes], name: str) -> None:
        """Open a lease for pages with these hashes, unless the id has one. ``group_name``: of its group. Its leases are
        shortened until they fit into the pool next to the pages of one of its choices."""
        if id in self._leases:
            return
        group = self._groups.setdefault(name, Group())
        lease = self._leases[id] = Lease(group, hashes, choices)
        group.leases.append(lease)
        room = self._pool.size - (self.claimed(choices[0]) if group.begun else 0)
        for each in reversed(group.leases):
            while group.need > room and len(each.hashes) > len(each.pages):
                each.hashes.pop()
        if group.begun:
            self._begun.append(group)

    def begin(self, sequence: Sequence) -> None:
        """Record that the sequence was admitted; its group starts."""
        lease = self._leases.get(sequence.id)
        if lease is not None and not lease.group.begun and sequence in lease.starting:
            lease.group.begun = True
            self._move(sequence, URGENT)
            self._begun.append(lease.group)

    def urge(self) -> None:
        """Give the other choices of groups that started with the last step urgent priority. Called before planning."""
        for group in self._begun:
            for sequence in group.starting:
                self._move(sequence, URGENT)
        self._begun.clear()

    def grow(self, sequence: Sequence, computed: int) -> None:
        """Add pages to the sequence's lease: its first ``computed`` tokens have keys and values."""
        lease = self._leases.get(sequence.id)
        if lease is None:
            return
        had = len(lease.pages)
        for digest in lease.hashes[had : computed // BLOCK_SIZE]:
            block = self._pool.find(digest)
            if block is None:  # this choice continues differently, or the page is not trusted
                break
            self._pool.share(block)
            self._held[block] += 1
            lease.pages.append(block)
        if fresh := lease.pages[had:]:
            self._tell(sequence.id, fresh)

    def start(self, sequence: Sequence) -> None:
        """Record that a sequence has produced a result, or ended: it loses its urgent priority."""
        lease = self._leases.get(sequence.id)
        if lease is not None and sequence in lease.starting:
            lease.starting.remove(sequence)
            if sequence.priority == URGENT:
                self._move(sequence, sequence.work.priority)

    def release(self, id: str) -> None:
        """End a lease. Unknown ids are ignored."""
        lease = self._leases.get(id)
        if lease is not None:
            for sequence in list(lease.starting):
                self.start(sequence)  # no lease waits for it any more
            del self._leases[id]
            lease.group.leases.remove(lease)
            self._groups = {name: group for name, group in self._groups.items() if group.leases}
            for block in lease.pages:
                self._held[block] -= 1
                if not self._held[block]:
                    del self._held[block]
            self._pool.drop(lease.pages)
