"""Pages that are held because another instance reads them: those of a prompt, from when they are computed until that
instance has them, whatever becomes of the sequences that computed them.

Nobody can take such a page away, so a lease that is half full must not wait for another one that is as well. And it is
only ended by the other side when that has heard of all choices, those of the other works of the same request included.
So a *group* of works with leases is begun if the pool has room for all of them beside what is held and what others were
promised; and from then on each of their choices goes before everybody else (``URGENT``) until something has come of it.
So there is always one that gets on.

A lease holds the pages that are found by their hashes, whoever computed them.

Knows pages and whose they are to become; nothing of who reads them, and nothing of slots or steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from parley.core.blocks import BlockPool, pages
from parley.core.sequence import BLOCK_SIZE, Sequence

URGENT = -inf  # the priority of one that others wait for


@dataclass(eq=False, slots=True)
class Lease:
    """``hashes`` of the pages that it is to have, ``pages`` those that it has. ``starting``: choices of which nothing
    has come yet."""

    group: Group
    hashes: list[bytes]
    starting: list[Sequence]
    pages: list[int] = field(default_factory=list)

    def common(self, sequence: Sequence) -> int:
        """How many of the pages are as good to a choice as its own: the first ones, and never that of its last token;
        none if it computes its prompt for the scores."""
        if sequence.prompt_scores:
            return 0
        pairs = zip(self.hashes, sequence.hashes, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return min(same, (len(sequence) - 1) // BLOCK_SIZE)


@dataclass(eq=False, slots=True)
class Group:
    """Leases that end together. ``begun``: a choice of one of their works was admitted."""

    leases: list[Lease] = field(default_factory=list)
    begun: bool = False

    @property
    def starting(self) -> list[Sequence]:
        return [sequence for lease in self.leases for sequence in lease.starting]

    @property
    def need(self) -> int:
        """How many pages are enough for all of the leases and any one of the choices that are to start."""
        own = (pages(len(each)) - lease.common(each) for lease in self.leases for each in lease.starting)
        return sum(len(lease.hashes) for lease in self.leases) + max(own, default=0)

    @property
    def promised(self) -> int:
        """How many pages may still be taken before all have started."""
        if not self.begun or not any(lease.starting for lease in self.leases):
            return 0
        return self.need - sum(len(lease.pages) for lease in self.leases)


class Leases:
    """Leases by work. ``tell(id, pages)`` is called with what a lease has got, ``move(sequence, priority)`` to give one
    another priority."""

    def __init__(
        self, pool: BlockPool, tell: Callable[[str, list[int]], None], move: Callable[[Sequence, float], None]
    ) -> None:
        self._pool = pool
        self._tell = tell
        self._move = move
        self._leases: dict[str, Lease] = {}
        self._groups: dict[str, Group] = {}
        self._begun: list[Group] = []  # in the last step
        self._held: Counter[int] = Counter()  # how many leases hold a page

    @property
    def pinned(self) -> int:
        """How many pages are held."""
        return len(self._held)

    def claimed(self, besides: Sequence | None = None) -> int:
        """How many pages are held, or promised to works other than that of this sequence."""
        lease = self._leases.get(besides.id) if besides is not None else None
        own = lease.group if lease is not None else None
        return self.pinned + sum(group.promised for group in self._groups.values() if group is not own)

    def need(self, sequence: Sequence, found: list[int]) -> int:
        """How many pages one that waits takes to get on, those aside that are held and that it finds. For the first of
        a group: that its leases and each of its choices take, one after the other."""
        lease = self._leases.get(sequence.id)
        whole = pages(len(sequence))
        if lease is not None and lease.starting and not lease.group.begun:
            whole, found = lease.group.need, found[: lease.common(sequence)]
        return whole - sum(block in self._held for block in found)

    def tables(self) -> Iterator[list[int]]:
        """What each lease holds, for checks of conservation."""
        return (lease.pages for lease in self._leases.values())

    def open(self, id: str, choices: list[Sequence], hashes: list[bytes], name: str) -> None:
        """A work with these choices gets a lease for pages with these hashes, unless an older one has its id. ``name``:
        of its group, whose leases have no more pages than fit into the pool beside what one of its choices needs."""
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
        """The sequence is admitted."""
        lease = self._leases.get(sequence.id)
        if lease is not None and not lease.group.begun and sequence in lease.starting:
            lease.group.begun = True
            self._move(sequence, URGENT)
            self._begun.append(lease.group)

    def urge(self) -> None:
        """A step is to be planned: the other choices of groups that began with the last one are urgent as well."""
        for group in self._begun:
            for sequence in group.starting:
                self._move(sequence, URGENT)
        self._begun.clear()

    def grow(self, sequence: Sequence, computed: int) -> None:
        """The first ``computed`` tokens of a sequence have their keys and values."""
        lease = self._leases.get(sequence.id)
        if lease is None:
            return
        had = len(lease.pages)
        for digest in lease.hashes[had : computed // BLOCK_SIZE]:
            block = self._pool.find(digest)
            if block is None:  # this choice goes on otherwise, or the page is not to be trusted
                break
            self._pool.share(block)
            self._held[block] += 1
            lease.pages.append(block)
        if fresh := lease.pages[had:]:
            self._tell(sequence.id, fresh)

    def start(self, sequence: Sequence) -> None:
        """Something has come of a sequence, be it its end."""
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
                self.start(sequence)  # as far as anybody waits for it
            del self._leases[id]
            lease.group.leases.remove(lease)
            self._groups = {name: group for name, group in self._groups.items() if group.leases}
            for block in lease.pages:
                self._held[block] -= 1
                if not self._held[block]:
                    del self._held[block]
            self._pool.drop(lease.pages)
