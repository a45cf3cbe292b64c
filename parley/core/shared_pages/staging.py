"""Staging of KV pages in transfer, for a KV cache on an accelerator, which other processes cannot access.

Other instances then read and fill *places*, pages of a staging memory, and know only their numbers. Leased pages are
copied there before they are announced; received pages are copied into the KV cache before they are cached. A page takes
one place, however many leases have it. There may be fewer places than pages: without a free place, the rest of a prompt
is not announced, or not requested, and the other instance (or this one) recomputes it.

Sits between ``PinnedPages``, whose methods it offers, and the code that talks to other instances. Handles numbers only,
no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Protocol

from parley.core.shared_pages.pinned import Holds
from parley.core.shared_pages.reservations import Answer, Taken

Pair = tuple[int, int]  # a KV page and its place


class Copier(Protocol):
    """Staging memory of ``place_count`` places. Copies are complete when the methods return."""

    blocks: int

    def store(self, pairs: list[Pair]) -> None:
        """Copy each KV page into its place."""

    def load(self, pairs: list[Pair]) -> None:
        """Copy each place into its KV page."""


@dataclass(slots=True)
class Outgoing:
    """Pages of a lease, in order; the first ``announced_count`` of them have places and were announced."""

    pages: list[int] = field(default_factory=list)
    told: int = 0


@dataclass(slots=True)
class Incoming:
    """Pages reserved under a key; the first ``received_count`` have been received, and their places are free again."""

    pairs: list[Pair]
    landed: int = 0


class Transit:
    """Staging by request id (leases) and key (reservations). ``flush_outgoing`` calls ``on_pages_staged(request_id,
    places)`` with newly leased pages, as ``Leases`` would.

    ``pinned_pages`` must be set before any call. ``unstaged_count``: total number of pages that got no place.
    """

    holds: Holds

    def __init__(self, copier: Copier, tell: Callable[[str, list[int]], None]):
        self.short = 0
        self._copier = copier
        self._tell = tell
        self._free = list(range(copier.blocks))  # a heap: low numbers are adjacent, and travel in one piece
        self._places: dict[int, int] = {}  # by leased page
        self._readers: dict[int, int] = {}  # number of leases that announced a place
        self._outgoing: dict[str, Outgoing] = {}
        self._fresh: dict[str, Outgoing] = {}  # leases with new pages
        self._incoming: dict[str, Incoming] = {}

    def fill(self, id: str, pages: list[int]) -> None:
        """Record pages added to the lease of a request."""
        outgoing = self._outgoing.setdefault(id, Outgoing())
        outgoing.pages += pages
        self._fresh[id] = outgoing

    def flush(self) -> None:
        """Copy newly leased pages into places, as far as there are any, and announce them."""
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
        """End the lease of a request and free its places."""
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
        """Reserve pages for a prompt that another instance computes, as many as get a place."""
        self.holds.reserve(key, token_ids, salt, adapter, digest, partial(self._taken, key, answer))

    def land(self, key: str, count: int) -> None:
        """Copy the first ``count`` places into their pages and mark those as received."""
        incoming = self._incoming.get(key)
        if incoming is not None and (fresh := incoming.pairs[incoming.landed : count]):
            self._copier.load(fresh)
            incoming.landed += len(fresh)
            self._give(fresh)
        self.holds.land(key, count)

    def free(self, key: str) -> None:
        """Free a reservation; no other instance writes into its places any more."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._give(incoming.pairs[incoming.landed :])
        self.holds.free(key)

    def check(self) -> None:
        """Check conservation of places, for tests. Raises AssertionError."""
        coming = [place for each in self._incoming.values() for _, place in each.pairs[each.landed :]]
        leaving = list(self._places.values())
        assert sorted([*self._free, *coming, *leaving]) == list(range(self._copier.blocks)), "free + used != all"
        told = [self._places[page] for each in self._outgoing.values() for page in each.pages[: each.told]]
        assert sorted(told) == sorted(place for place, count in self._readers.items() for _ in range(count))
        assert set(told) == set(leaving), "a place that was never announced"

    def _taken(self, key: str, answer: Answer, taken: Taken) -> None:
        """Assign places to reserved pages and answer with their numbers."""
        count = min(len(taken.pages), len(self._free))
        self.short += len(taken.pages) - count
        pairs = [(page, heappop(self._free)) for page in taken.pages[:count]]
        if taken.pages:
            self._incoming[key] = Incoming(pairs)
            self.holds.cut(key, count)
        answer(taken._replace(pages=[place for _, place in pairs]))

    def _give(self, pairs: list[Pair]) -> None:
        """Free the places of these pairs."""
        for _, place in pairs:
            heappush(self._free, place)
