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

from parley.core.shared_pages.pinned import PinnedPages
from parley.core.shared_pages.reservations import ReserveCallback, ReserveResult
from parley.types import KVPrefix

StagedPage = tuple[int, int]  # a KV page and its place


class StagingCopier(Protocol):
    """Staging memory of ``place_count`` places. Copies are complete when the methods return."""

    place_count: int

    def store_pages(self, pairs: list[StagedPage]) -> None:
        """Copy each KV page into its place."""

    def load_pages(self, pairs: list[StagedPage]) -> None:
        """Copy each place into its KV page."""


@dataclass(slots=True)
class OutgoingPages:
    """Pages of a lease, in order; the first ``announced_count`` of them have places and were announced."""

    pages: list[int] = field(default_factory=list)
    announced_count: int = 0


@dataclass(slots=True)
class IncomingPages:
    """Pages reserved under a key; the first ``received_count`` have been received, and their places are free again."""

    pairs: list[StagedPage]
    received_count: int = 0


class PageStaging:
    """Staging by request id (leases) and key (reservations). ``flush_outgoing`` calls ``on_pages_staged(request_id,
    places)`` with newly leased pages, as ``Leases`` would.

    ``attach_pinned_pages`` must be called first. ``unstaged_count``: total number of pages that got no place.
    """

    _pinned_pages: PinnedPages

    def __init__(self, copier: StagingCopier, on_pages_staged: Callable[[str, list[int]], None]):
        self.unstaged_count = 0
        self._copier = copier
        self._on_pages_staged = on_pages_staged
        self._free_places = list(range(copier.place_count))  # a heap: low numbers are adjacent, and travel in one piece
        self._places: dict[int, int] = {}  # by leased page
        self._reader_counts: dict[int, int] = {}  # number of leases that announced a place
        self._outgoing: dict[str, OutgoingPages] = {}
        self._unannounced: dict[str, OutgoingPages] = {}  # leases with new pages
        self._incoming: dict[str, IncomingPages] = {}

    def attach_pinned_pages(self, pinned_pages: PinnedPages) -> None:
        """Set the loop's pinned pages; the loop is made later, because it reports leased pages to this object."""
        self._pinned_pages = pinned_pages

    def add_leased_pages(self, request_id: str, pages: list[int]) -> None:
        """Record pages added to the lease of a request."""
        outgoing = self._outgoing.setdefault(request_id, OutgoingPages())
        outgoing.pages += pages
        self._unannounced[request_id] = outgoing

    def flush_outgoing(self) -> None:
        """Copy newly leased pages into places, as far as there are any, and announce them."""
        announcements: list[tuple[str, list[int]]] = []
        pairs: list[StagedPage] = []
        for request_id, outgoing in self._unannounced.items():
            announced_before = outgoing.announced_count
            for page in outgoing.pages[announced_before:]:
                if page not in self._places:
                    if not self._free_places:
                        break
                    self._places[page] = heappop(self._free_places)
                    pairs.append((page, self._places[page]))
                place = self._places[page]
                self._reader_counts[place] = self._reader_counts.get(place, 0) + 1
                outgoing.announced_count += 1
            if outgoing.announced_count > announced_before:
                announcements.append(
                    (
                        request_id,
                        [self._places[page] for page in outgoing.pages[announced_before : outgoing.announced_count]],
                    )
                )
        self._unannounced.clear()
        if pairs:
            self._copier.store_pages(pairs)
        for announcement in announcements:
            self._on_pages_staged(*announcement)

    def release_lease(self, request_id: str) -> None:
        """End the lease of a request and free its places."""
        outgoing = self._outgoing.pop(request_id, OutgoingPages())
        self._unannounced.pop(request_id, None)
        self.unstaged_count += len(outgoing.pages) - outgoing.announced_count
        for page in outgoing.pages[: outgoing.announced_count]:
            place = self._places[page]
            self._reader_counts[place] -= 1
            if not self._reader_counts[place]:
                del self._reader_counts[place], self._places[page]
                heappush(self._free_places, place)
        self._pinned_pages.release_lease(request_id)

    def reserve_pages(self, key: str, prefix: KVPrefix, answer: ReserveCallback) -> None:
        """Reserve pages for a prefix that another instance computes, as many as get a place."""
        self._pinned_pages.reserve_pages(key, prefix, partial(self._stage_reserved, key, answer))

    def mark_received(self, key: str, count: int) -> None:
        """Copy the first ``count`` places into their pages and mark those as received."""
        incoming = self._incoming.get(key)
        if incoming is not None and (fresh := incoming.pairs[incoming.received_count : count]):
            self._copier.load_pages(fresh)
            incoming.received_count += len(fresh)
            self._free_pairs(fresh)
        self._pinned_pages.mark_received(key, count)

    def free_reservation(self, key: str) -> None:
        """Free a reservation; no other instance writes into its places any more."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._free_pairs(incoming.pairs[incoming.received_count :])
        self._pinned_pages.free_reservation(key)

    def check_invariants(self) -> None:
        """Check conservation of places, for tests. Raises AssertionError."""
        incoming_places = [
            place for transfer in self._incoming.values() for _, place in transfer.pairs[transfer.received_count :]
        ]
        outgoing_places = list(self._places.values())
        assert sorted([*self._free_places, *incoming_places, *outgoing_places]) == list(
            range(self._copier.place_count)
        ), "free + used != all"
        announced = [
            self._places[page]
            for transfer in self._outgoing.values()
            for page in transfer.pages[: transfer.announced_count]
        ]
        assert sorted(announced) == sorted(place for place, count in self._reader_counts.items() for _ in range(count))
        assert set(announced) == set(outgoing_places), "a place that was never announced"

    def _stage_reserved(self, key: str, answer: ReserveCallback, result: ReserveResult) -> None:
        """Assign places to reserved pages and answer with their numbers."""
        count = min(len(result.pages), len(self._free_places))
        self.unstaged_count += len(result.pages) - count
        pairs = [(page, heappop(self._free_places)) for page in result.pages[:count]]
        if result.pages:
            self._incoming[key] = IncomingPages(pairs)
            self._pinned_pages.truncate_reservation(key, count)
        answer(result._replace(pages=[place for _, place in pairs]))

    def _free_pairs(self, pairs: list[StagedPage]) -> None:
        """Free the places of these pairs."""
        for _, place in pairs:
            heappush(self._free_places, place)
