"""Staging of KV pages in transfer, for a KV cache on an accelerator, which other processes cannot access.

Other instances then read and fill *staging pages*, pages of a host memory, and know only their numbers. Leased pages
are copied there before they are announced; received pages are copied into the KV cache before they are cached. A KV
page has one staging page, however many leases hold it. There may be fewer staging pages than KV pages: without a free
one, the rest of a prompt is not announced, or not requested, and the other instance (or this one) recomputes it.

``PageStaging`` has the methods of ``PinnedPages``, and the code that talks to other instances calls it instead. It
handles numbers only, no bytes.
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

StagedPage = tuple[int, int]  # a KV page and its staging page


class StagingCopier(Protocol):
    """Staging memory of ``staging_page_count`` pages. Copies are complete when the methods return."""

    staging_page_count: int

    def store_pages(self, pairs: list[StagedPage]) -> None:
        """Copy each KV page into its staging page."""

    def load_pages(self, pairs: list[StagedPage]) -> None:
        """Copy each staging page into its KV page."""


@dataclass(slots=True)
class OutgoingPages:
    """Pages of a lease, in order; the first ``announced_count`` of them have staging pages and were announced."""

    pages: list[int] = field(default_factory=list)
    announced_count: int = 0


@dataclass(slots=True)
class IncomingPages:
    """Pages reserved under a key; the first ``received_count`` have been received, and their staging pages are free."""

    pairs: list[StagedPage]
    received_count: int = 0


class PageStaging:
    """Staging by request id (leases) and key (reservations). ``flush_outgoing`` calls ``on_pages_staged(request_id,
    staging_pages)`` for newly leased pages.

    ``attach_pinned_pages`` must be called first. ``unstaged_count``: total number of pages that got no staging page.
    """

    _pinned_pages: PinnedPages

    def __init__(self, copier: StagingCopier, on_pages_staged: Callable[[str, list[int]], None]):
        self.unstaged_count = 0
        self._copier = copier
        self._on_pages_staged = on_pages_staged
        # A heap, so that low numbers are used first: adjacent pages are sent in one piece.
        self._free_pages = list(range(copier.staging_page_count))
        self._staging_pages: dict[int, int] = {}  # by leased KV page
        self._reader_counts: dict[int, int] = {}  # by staging page: number of leases that announced it
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
        """Copy newly leased pages into staging pages, while any are free, and announce them."""
        announcements: list[tuple[str, list[int]]] = []
        pairs: list[StagedPage] = []
        for request_id, outgoing in self._unannounced.items():
            announced_before = outgoing.announced_count
            for page in outgoing.pages[announced_before:]:
                if page not in self._staging_pages:
                    if not self._free_pages:
                        break
                    self._staging_pages[page] = heappop(self._free_pages)
                    pairs.append((page, self._staging_pages[page]))
                staging_page = self._staging_pages[page]
                self._reader_counts[staging_page] = self._reader_counts.get(staging_page, 0) + 1
                outgoing.announced_count += 1
            if new_pages := outgoing.pages[announced_before : outgoing.announced_count]:
                announcements.append((request_id, [self._staging_pages[page] for page in new_pages]))
        self._unannounced.clear()
        if pairs:
            self._copier.store_pages(pairs)
        for announcement in announcements:
            self._on_pages_staged(*announcement)

    def release_lease(self, request_id: str) -> None:
        """End the lease of a request and free its staging pages."""
        outgoing = self._outgoing.pop(request_id, OutgoingPages())
        self._unannounced.pop(request_id, None)
        self.unstaged_count += len(outgoing.pages) - outgoing.announced_count
        for page in outgoing.pages[: outgoing.announced_count]:
            staging_page = self._staging_pages[page]
            self._reader_counts[staging_page] -= 1
            if not self._reader_counts[staging_page]:
                del self._reader_counts[staging_page], self._staging_pages[page]
                heappush(self._free_pages, staging_page)
        self._pinned_pages.release_lease(request_id)

    def reserve_pages(self, key: str, prefix: KVPrefix, answer: ReserveCallback) -> None:
        """Reserve pages for a prefix that another instance computes, as many as get a staging page."""
        self._pinned_pages.reserve_pages(key, prefix, partial(self._stage_reserved, key, answer))

    def mark_received(self, key: str, count: int) -> None:
        """Copy the first ``count`` staging pages of a reservation into its KV pages, and mark these as received."""
        incoming = self._incoming.get(key)
        if incoming is not None and (fresh := incoming.pairs[incoming.received_count : count]):
            self._copier.load_pages(fresh)
            incoming.received_count += len(fresh)
            self._free_pairs(fresh)
        self._pinned_pages.mark_received(key, count)

    def free_reservation(self, key: str) -> None:
        """Free a reservation. No other instance may write into its staging pages any more."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self._free_pairs(incoming.pairs[incoming.received_count :])
        self._pinned_pages.free_reservation(key)

    def check_invariants(self) -> None:
        """Check conservation of staging pages, for tests. Raises AssertionError."""
        incoming_pages = [
            staging_page
            for transfer in self._incoming.values()
            for _, staging_page in transfer.pairs[transfer.received_count :]
        ]
        outgoing_pages = list(self._staging_pages.values())
        assert sorted([*self._free_pages, *incoming_pages, *outgoing_pages]) == list(
            range(self._copier.staging_page_count)
        ), "free + used != all"
        announced = [
            self._staging_pages[page]
            for transfer in self._outgoing.values()
            for page in transfer.pages[: transfer.announced_count]
        ]
        assert sorted(announced) == sorted(page for page, count in self._reader_counts.items() for _ in range(count))
        assert set(announced) == set(outgoing_pages), "a staging page that was never announced"

    def _stage_reserved(self, key: str, answer: ReserveCallback, result: ReserveResult) -> None:
        """Assign staging pages to reserved pages, and answer with the numbers of the staging pages."""
        count = min(len(result.pages), len(self._free_pages))
        self.unstaged_count += len(result.pages) - count
        pairs = [(page, heappop(self._free_pages)) for page in result.pages[:count]]
        if result.pages:
            self._incoming[key] = IncomingPages(pairs)
            self._pinned_pages.truncate_reservation(key, count)
        answer(result._replace(pages=[staging_page for _, staging_page in pairs]))

    def _free_pairs(self, pairs: list[StagedPage]) -> None:
        """Free the staging pages of these pairs."""
        for _, staging_page in pairs:
            heappush(self._free_pages, staging_page)
