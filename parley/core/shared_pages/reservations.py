"""Reservations: pages that another instance fills with a prompt's KV cache. They are cached as soon as they arrive.

A reservation holds the cached prefix of a prompt, and free pages for the rest. Until the content of a page has arrived,
or is known not to arrive, nothing else can use the page. So such pages are only allocated if all running sequences
still fit, and never while a preempted sequence waits for pages. Received pages can be revoked at any time
(``revoke_reservation``): they then stay in the prefix cache until they are overwritten, and a request that no longer
finds them recomputes them.

No step writes or clears such pages: all their bytes are overwritten by the transfer. A page that is returned without
content is cleared for its next holder like any other.

This module knows pages, hashes and the keys of reservations; nothing of transports or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from parley.core.adapter_cache import AdapterCache, AdapterEntry
from parley.core.media.placeholders import are_known_tokens, placement_fault
from parley.core.pages.page_pool import (
    PagePool,
    count_transferable_pages,
    extend_hashes,
    hash_chain_root,
    long_rope_root,
)
from parley.types import KVPrefix

NO_PREFIX_CACHE = "The prefix cache is off: the engine keeps no prefixes, so it cannot receive pages."
DUPLICATE_KEY = "Something is reserved under this key already."
BAD_TOKEN_ID = "A token id is outside the vocabulary."
NO_CAPACITY = "There is no capacity for this number of pages."
ADAPTER_DIFFERS = "The adapter of this name has different content here."
RESERVATION_FREED = "The reservation was freed."


class ReserveResult(NamedTuple):
    """The answer to ``ReservePages``; ``engine.messages.ReserveResponse`` describes the fields."""

    skip: int = 0
    pages: Sequence[int] = ()
    error: str = ""
    digest: str = ""


@dataclass(eq=False, slots=True)
class PageReservation:
    """The pages reserved under one key.

    * ``prefix``: the prompt.
    * ``hashes``: of all its pages, in prompt order.
    * ``pages`` await their content; the first ``received_count`` of them have received it.
    * ``held_pages``: pages with content, cached or received, that were not revoked.
    * ``state_slot``: the slot for the state at the end of the pages, -1 for none.
    * ``awaits_state``: the content of that slot has not arrived; it follows that of all pages.
    """

    prefix: KVPrefix
    hashes: list[bytes]
    held_pages: list[int]
    pages: list[int]
    received_count: int = 0
    state_slot: int = -1
    awaits_state: bool = False

    @property
    def pending_pages(self) -> list[int]:
        """Pages that have not been received."""
        return self.pages[self.received_count :]


ReserveCallback = Callable[[ReserveResult], None]


class PageReservations:
    """Reservations by key. ``root_name``: root name of all prompt hashes; None where no prefix is cached.

    ``long_rope_after``: as in ``ModelRunner``. ``reservable_pages()`` returns how many pages may be reserved now.
    ``states``: the slots for states, as in ``PageLeases``.
    """

    def __init__(
        self,
        pool: PagePool,
        adapter_cache: AdapterCache,
        root_name: str | None,
        vocab_size: int,
        long_rope_after: float,
        reservable_pages: Callable[[], int],
        states: PagePool | None = None,
    ):
        self._pool = pool
        self._states = states
        self._adapter_cache = adapter_cache
        self._root_name = root_name
        self._vocab_size = vocab_size
        self._long_rope_after = long_rope_after
        self._reservable_pages = reservable_pages
        self._reservations: dict[str, PageReservation] = {}
        self._awaiting_adapter: dict[str, ReserveCallback] = {}  # callbacks of reservations that wait for an adapter

    @property
    def pending_count(self) -> int:
        """Number of pages that have not been received."""
        return sum(len(reservation.pages) - reservation.received_count for reservation in self._reservations.values())

    @property
    def reserved_count(self) -> int:
        """Number of pages held; a page shared by several reservations counts once for each."""
        return sum(
            len(reservation.held_pages) + len(reservation.pages) - reservation.received_count
            for reservation in self._reservations.values()
        )

    def reservation_tables(self) -> Iterator[list[int]]:
        """Return the page table of each reservation, for conservation checks."""
        return ([*reservation.held_pages, *reservation.pending_pages] for reservation in self._reservations.values())

    def held_states(self) -> Iterator[list[int]]:
        """Return the slots with states of each reservation, for conservation checks."""
        return ([reservation.state_slot] for reservation in self._reservations.values() if reservation.state_slot >= 0)

    def reserve_pages(self, key: str, prefix: KVPrefix, answer: ReserveCallback) -> None:
        """Reserve the whole pages of a prefix. ``answer`` is called now, or when the adapter is in memory."""
        if self._root_name is None:
            answer(ReserveResult(error=NO_PREFIX_CACHE))
        elif key in self._reservations or key in self._awaiting_adapter:
            answer(ReserveResult(error=DUPLICATE_KEY))
        elif (fault := placement_fault(prefix.media, len(prefix.token_ids))) is not None:
            answer(ReserveResult(error=fault))
        elif not are_known_tokens(prefix.token_ids, prefix.media, self._vocab_size):
            answer(ReserveResult(error=BAD_TOKEN_ID))
        elif prefix.adapter:
            self._awaiting_adapter[key] = answer
            on_ready = partial(self._reserve_with_adapter, key, prefix)
            on_failure = partial(self._fail_reservation, key)
            self._adapter_cache.acquire_adapter(_adapter_wait_id(key), prefix.adapter, on_ready, on_failure)
        else:
            answer(self._allocate_pages(key, prefix, adapter_digest=""))

    def mark_received(self, key: str, count: int) -> None:
        """Mark the first ``count`` pages of a reservation as received. Unknown keys are ignored."""
        reservation = self._reservations.get(key)
        if reservation is None:
            return
        cached_count = len(reservation.hashes) - len(reservation.pages)
        fresh_indices: list[int] = []  # in the prompt's order, of pages that were not cached before
        while reservation.received_count < min(count, len(reservation.pages)):
            page, index = reservation.pages[reservation.received_count], cached_count + reservation.received_count
            cached_page = _cache_received(self._pool, page, reservation.hashes[index])
            if cached_page == page:
                fresh_indices.append(index)
            reservation.held_pages.append(cached_page)
            reservation.received_count += 1
        if self._states is not None and reservation.awaits_state and count > len(reservation.pages):
            reservation.state_slot = _cache_received(self._states, reservation.state_slot, reservation.hashes[-1])
            reservation.awaits_state = False
        if fresh_indices and self._pool.event_log is not None:
            prefix = reservation.prefix
            self._pool.event_log.record_stored(
                fresh_indices, reservation.hashes, prefix.token_ids, prefix.adapter, prefix.cache_salt, prefix.media
            )

    def truncate_reservation(self, key: str, count: int) -> None:
        """Free all but the first ``count`` pages of a reservation; no other instance writes the rest. Unknown keys are
        ignored."""
        reservation = self._reservations.get(key)
        if reservation is not None and (surplus := reservation.pages[max(count, reservation.received_count) :]):
            del reservation.pages[-len(surplus) :], reservation.hashes[-len(surplus) :]
            self._pool.release_pages(surplus)

    def free_reservation(self, key: str) -> None:
        """Free a reservation. Unknown keys are ignored."""
        reservation = self._reservations.pop(key, None)
        if reservation is not None:
            self._pool.release_pages([*reservation.held_pages, *reservation.pending_pages])
            if self._states is not None and reservation.state_slot >= 0:
                self._states.release_pages([reservation.state_slot])
        elif key in self._awaiting_adapter:
            self._adapter_cache.cancel_acquire(_adapter_wait_id(key))
            self._awaiting_adapter.pop(key)(ReserveResult(error=RESERVATION_FREED))

    def revoke_reservation(self) -> bool:
        """Drop the received pages of the newest reservation that has any. False if no reservation has any."""
        for reservation in reversed(self._reservations.values()):
            if reservation.held_pages:
                self._pool.release_pages(reservation.held_pages)
                reservation.held_pages = []
                return True
        return False

    def _hash_pages(self, prefix: KVPrefix, adapter_digest: str) -> list[bytes]:
        """Return the hashes of the prefix's whole pages."""
        assert self._root_name is not None
        adapter_names = (adapter_digest,) if adapter_digest else ()
        chain_root = hash_chain_root(self._root_name, prefix.cache_salt, *adapter_names)
        if len(prefix.token_ids) > self._long_rope_after:
            chain_root = long_rope_root(chain_root)
        hashes: list[bytes] = []
        page_count = count_transferable_pages(len(prefix.token_ids), has_states=self._states is not None)
        extend_hashes(hashes, chain_root, prefix.token_ids, page_count, prefix.media)
        return hashes

    def _allocate_pages(self, key: str, prefix: KVPrefix, adapter_digest: str) -> ReserveResult:
        """Hold the cached pages of a prefix and allocate pages for the rest. Return their numbers, or an error."""
        hashes = self._hash_pages(prefix, adapter_digest)
        cached_pages: list[int] = []
        for page_hash in hashes:
            if (page := self._pool.find_cached(page_hash)) is None:
                break
            cached_pages.append(page)
        fresh_count = len(hashes) - len(cached_pages)
        if hashes and fresh_count + self._pool.count_free(cached_pages) > self._reservable_pages():
            return ReserveResult(error=NO_CAPACITY, digest=adapter_digest)
        if hashes and self._states is not None and not self._has_room_for_state(hashes[-1]):
            return ReserveResult(error=NO_CAPACITY, digest=adapter_digest)
        for page in cached_pages:
            self._pool.add_reference(page)
        reservation = self._reservations[key] = PageReservation(
            prefix, hashes, cached_pages, [self._pool.allocate() for _ in range(fresh_count)]
        )
        numbers = list(reservation.pages)
        if hashes and self._states is not None:
            self._reserve_state(reservation, self._states)
            if reservation.awaits_state:
                numbers.append(self._pool.page_count + reservation.state_slot)
        return ReserveResult(len(cached_pages), numbers, "", adapter_digest)

    def _has_room_for_state(self, digest: bytes) -> bool:
        """Whether there is a free slot for a state, or one with the state itself."""
        assert self._states is not None
        return self._states.free_count > 0 or self._states.find_cached(digest) is not None

    def _reserve_state(self, reservation: PageReservation, states: PagePool) -> None:
        """Hold the state at the end of a reservation's pages, or a slot for it."""
        slot = states.find_cached(reservation.hashes[-1])
        if slot is None and states.free_count:
            reservation.state_slot, reservation.awaits_state = states.allocate(), True
        elif slot is not None:
            states.add_reference(slot)
            reservation.state_slot = slot

    def _reserve_with_adapter(self, key: str, prefix: KVPrefix, entry: AdapterEntry) -> None:
        """Reserve the pages of a prefix whose adapter is in memory now."""
        assert entry.adapter is not None
        adapter_digest = entry.adapter.digest.hex()
        # Its request takes it again; keeping it until then could block that request.
        self._adapter_cache.release_adapter(entry)
        answer = self._awaiting_adapter.pop(key)
        if prefix.adapter_digest not in ("", adapter_digest):
            answer(ReserveResult(error=ADAPTER_DIFFERS, digest=adapter_digest))
        else:
            answer(self._allocate_pages(key, prefix, adapter_digest))

    def _fail_reservation(self, key: str, reason: str) -> None:
        """Refuse a reservation, because its adapter cannot be read."""
        self._awaiting_adapter.pop(key)(ReserveResult(error=reason))


def _cache_received(pool: PagePool, page: int, digest: bytes) -> int:
    """Add a page whose content has arrived to a prefix cache. Return the page; if another one has this content already,
    return that one."""
    if pool.cache_page(page, digest):
        return page
    cached_page = pool.find_cached(digest)
    assert cached_page is not None
    pool.add_reference(cached_page)
    pool.release_pages([page])
    return cached_page


def _adapter_wait_id(key: str) -> str:
    """Return this reservation's id for the adapter cache; no request id begins with NUL."""
    return f"\0{key}"
