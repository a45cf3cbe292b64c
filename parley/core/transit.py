"""Pages on their way between instances, where the KV cache itself is out of other processes' reach: on an accelerator.

Then others read and fill *places*, pages of a staging memory, and know the numbers of those alone. What a lease has got
is copied there before it is told; what has come there is copied into the cache before it is found. One page takes one
place, however many leases have it. There may be fewer places than pages: where none is free, the rest of a prompt is
not told of, or not asked for, and whoever would have had it computes it.

Stands between ``Holds``, whose verbs it has, and whoever speaks with other instances. Knows numbers, and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from parley.core.holds import Holds
from parley.core.landing import Answer, Taken

Pair = tuple[int, int]  # a page and its place


class Copier(Protocol):
    """Memory of ``blocks`` places. What it is told is done when it returns."""

    blocks: int

    def store(self, pairs: list[Pair]) -> None:
        """Copy each page into its place."""

    def load(self, pairs: list[Pair]) -> None:
        """Copy into each page what its place has."""


@dataclass(slots=True)
class Outgoing:
    """Pages of a lease, in order; the first ``told`` of them have places."""

    pages: list[int] = field(default_factory=list)
    told: int = 0


@dataclass(slots=True)
class Incoming:
    """What is reserved under a key; the first ``landed`` have come, and their places are others' again."""

    pairs: list[Pair]
    landed: int = 0


class Transit:
    """``tell(id, places)`` is called with what the lease of a work has got, as of ``Leases``, but by ``flush``.

    ``holds`` is to be set before anything is called. ``short``: how many pages had no place, in all.
    """

    holds: Holds

    def __init__(self, copier: Copier, tell: Callable[[str, list[int]], None]):
        self.short = 0
        self._copier = copier
        self._tell = tell
        self._free = list(range(copier.blocks))  # a heap: low numbers lie side by side, and travel in one piece
        self._places: dict[int, int] = {}  # by page that leases have
        self._readers: dict[int, int] = {}  # how many leases have been told of a place
        self._outgoing: dict[str, Outgoing] = {}
        self._fresh: dict[str, Outgoing] = {}  # those that have got something
        self._incoming: dict[str, Incoming] = {}

    def fill(self, id: str, pages: list[int]) -> None:
        """The lease of a work has got these pages."""
        outgoing = self._outgoing.setdefault(id, Outgoing())
        outgoing.pages += pages
        self._fresh[id] = outgoing

    def flush(self) -> None:
        """Copy what leases have got, as far as there are places, and tell of it."""
        news: list[tuple[str, list[int]]] = []
        pairs: list[Pair] = []
        for id, outgoing in self._fresh.items():
            told = outgoing.told
            for page in outgoing.pages[told:]:
                if page not in self._places:
                    if not self._free:
                        break
                    self._places[page] = heappop(self._free)
                    pairs.append((page, self._places[page]))
                place = self._places[page]
                self._readers[place] = self._readers.get(place, 0) + 1
                outgoing.told += 1
            if outgoing.told > told:
                news.append((id, [self._places[page] for page in outgoing.pages[told : outgoing.told]]))
        self._fresh.clear()
        if pairs:
            self._copier.store(pairs)
        for each in news:
            self._tell(*each)

    def release(self, id: str) -> None:
        """The lease of a work ends."""
        outgoing = self._outgoing.pop(id, Outgoing())
        self._fresh.pop(id, None)
        self.short += len(outgoing.pages) - outgoing.told
        for page in outgoing.pages[: outgoing.told]:
            place = self._places[page]
            self._readers[place] -= 1
            if not self._readers[place]:
                del self._readers[place], self._places[page]
                heappush(self._free, place)
        self.holds.release(id)

    def reserve(self, key: str, token_ids: list[int], salt: str, adapter: str, digest: str, answer: Answer) -> None:
        """Take pages for a prompt that another instance computes, as many as have places."""
        self.holds.reserve(key, token_ids, salt, adapter, digest, partial(self._taken, key, answer))

    def land(self, key: str, count: int) -> None:
        """So many of them have their content."""
        incoming = self._incoming.get(key)
        if incoming is not None and (fresh := incoming.pairs[incoming.landed : count]):
            self._copier.load(fresh)
            incoming.landed += len(fresh)
            self._give(fresh)
        self.holds.land(key, count)

    def free(self, key: str) -> None:
        """They are not held any longer, and nobody writes into their places."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._give(incoming.pairs[incoming.landed :])
        self.holds.free(key)

    def check(self) -> None:
        """Conservation of places, for tests. Raises AssertionError."""
        coming = [place for each in self._incoming.values() for _, place in each.pairs[each.landed :]]
        leaving = list(self._places.values())
        assert sorted([*self._free, *coming, *leaving]) == list(range(self._copier.blocks)), "free + used != all"
        told = [self._places[page] for each in self._outgoing.values() for page in each.pages[: each.told]]
        assert sorted(told) == sorted(place for place, count in self._readers.items() for _ in range(count))
        assert set(told) == set(leaving), "a place that nobody was told of"

    def _taken(self, key: str, answer: Answer, taken: Taken) -> None:
        count = min(len(taken.pages), len(self._free))
        self.short += len(taken.pages) - count
        pairs = [(page, heappop(self._free)) for page in taken.pages[:count]]
        if taken.pages:
            self._incoming[key] = Incoming(pairs)
            self.holds.cut(key, count)
        answer(taken._replace(pages=[place for _, place in pairs]))

    def _give(self, pairs: list[Pair]) -> None:
        """Their places are free."""
        for _, place in pairs:
            heappush(self._free, place)
