"""Leases: pages of a prompt that are kept for another instance, from when they are computed until that instance has
read them, even if the sequences that computed them end earlier.

A leased page cannot be taken back, so two incomplete leases must never wait for each other's pages. The other instance
ends a lease only when it has the first outputs of all choices, including those of other engine requests that belong to
the same client request. Therefore a *group* of leases starts only if the pool has room for all of them next to all held
and promised pages. From then on its choices run before all others (``URGENT_PRIORITY``) until each has produced a
result. So there is always one group that makes progress.

A lease gets the pages that the prefix cache has for its hashes, whichever sequence computed them. If layers keep a
state, it gets the pages up to a page end whose state is kept, and holds that state: otherwise a preempted choice could
not use the leased pages, and would need additional ones.

This module knows pages and sequences; nothing of the readers, of slots or of steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from parley.core.pages.page_pool import PagePool, count_pages
from parley.core.sequence import PAGE_SIZE, Sequence

URGENT_PRIORITY = -inf  # priority of the choices of a group that has started, until their first result


@dataclass(eq=False, slots=True)
class PageLease:
    """The lease of one request. ``hashes``: of the pages that it will have; ``pages``: those that it has.

    ``pending_choices``: the choices without a result yet. ``has_states``: layers keep a state, so the lease also holds
    one. ``state_slot``: the slot with the state at the end of ``pages``, -1 for none; it is announced to the other
    instance once the lease has all of the prompt's ``transferable_count`` pages.
    """

    group: LeaseGroup
    hashes: list[bytes]
    pending_choices: list[Sequence]
    pages: list[int] = field(default_factory=list)
    has_states: bool = False
    state_slot: int = -1
    transferable_count: int = field(init=False)  # pages that it would have if the pool were large enough

    def __post_init__(self) -> None:
        self.transferable_count = len(self.hashes)

    def shared_page_count(self, sequence: Sequence) -> int:
        """Return how many of the lease's pages a choice can share: leading pages only, and never the page of its last
        token; 0 if it computes its prompt for the scores. With states: all or none."""
        if sequence.prompt_scores:
            return 0
        pairs = zip(self.hashes, sequence.hashes, strict=False)
        equal_count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        shared_count = min(equal_count, (len(sequence) - 1) // PAGE_SIZE)
        return 0 if self.has_states and shared_count < len(self.hashes) else shared_count


@dataclass(eq=False, slots=True)
class LeaseGroup:
    """Leases that end together. ``has_started``: a choice of one of their requests has been admitted."""

    leases: list[PageLease] = field(default_factory=list)
    has_started: bool = False

    @property
    def pending_sequences(self) -> list[Sequence]:
        """All pending choices of the group."""
        return [sequence for lease in self.leases for sequence in lease.pending_choices]

    @property
    def pages_required(self) -> int:
        """Number of pages that suffice for all leases and any one of the pending choices."""
        choice_pages = (
            count_pages(len(choice)) - lease.shared_page_count(choice)
            for lease in self.leases
            for choice in lease.pending_choices
        )
        return sum(len(lease.hashes) for lease in self.leases) + max(choice_pages, default=0)

    @property
    def promised_pages(self) -> int:
        """Number of pages that may still be taken before all choices have a result."""
        if not self.has_started or not any(lease.pending_choices for lease in self.leases):
            return 0
        return self.pages_required - sum(len(lease.pages) for lease in self.leases)


class PageLeases:
    """Leases by request id.

    ``on_pages_leased(request_id, pages)`` is called with the pages that a lease has received, ``set_priority(sequence,
    priority)`` to change a sequence's priority. ``states``: the slots for states, if layers keep them; the state at the
    end of a lease's pages follows them, as one more page (``Arena.states``).
    """

    def __init__(
        self,
        pool: PagePool,
        on_pages_leased: Callable[[str, list[int]], None],
        set_priority: Callable[[Sequence, float], None],
        states: PagePool | None = None,
    ) -> None:
        self._pool = pool
        self._on_pages_leased = on_pages_leased
        self._set_priority = set_priority
        self._states = states
        self._leases: dict[str, PageLease] = {}
        self._groups: dict[str, LeaseGroup] = {}
        self._started_groups: list[LeaseGroup] = []  # started in the last step
        self._holder_counts: Counter[int] = Counter()  # number of leases that hold a page

    @property
    def pinned_count(self) -> int:
        """Number of pages held by leases."""
        return len(self._holder_counts)

    def claimed_pages(self, excluding: Sequence | None = None) -> int:
        """Return how many pages leases hold, plus those promised to groups other than that of ``excluding``."""
        lease = self._leases.get(excluding.request_id) if excluding is not None else None
        own_group = lease.group if lease is not None else None
        return self.pinned_count + sum(
            group.promised_pages for group in self._groups.values() if group is not own_group
        )

    def pages_to_admit(self, sequence: Sequence, cached_pages: list[int]) -> int:
        """Return how many pages a waiting sequence needs to run, in addition to leased pages that it shares.

        For the first sequence of a group, that is the number of pages that suffice for all of the group's leases and
        any one of its choices.
        """
        lease = self._leases.get(sequence.request_id)
        page_need = count_pages(len(sequence))
        if lease is not None and lease.pending_choices and not lease.group.has_started:
            page_need, cached_pages = lease.group.pages_required, cached_pages[: lease.shared_page_count(sequence)]
        return page_need - sum(page in self._holder_counts for page in cached_pages)

    def lease_tables(self) -> Iterator[list[int]]:
        """Return the pages of each lease, for conservation checks."""
        return (lease.pages for lease in self._leases.values())

    def held_states(self) -> Iterator[list[int]]:
        """Return the slots with states of each lease, for conservation checks."""
        return ([lease.state_slot] for lease in self._leases.values() if lease.state_slot >= 0)

    def open_lease(self, request_id: str, choices: list[Sequence], hashes: list[bytes], group_name: str) -> None:
        """Open a lease for pages with these hashes, in the group ``group_name``, unless the request has one.

        The leases of the group are shortened until they fit into the pool next to the pages of one of its choices.
        """
        if request_id in self._leases:
            return
        group = self._groups.setdefault(group_name, LeaseGroup())
        lease = self._leases[request_id] = PageLease(group, hashes, choices, has_states=self._states is not None)
        group.leases.append(lease)
        room = self._pool.page_count - (self.claimed_pages(choices[0]) if group.has_started else 0)
        for group_lease in reversed(group.leases):
            while group.pages_required > room and len(group_lease.hashes) > len(group_lease.pages):
                group_lease.hashes.pop()
            for sequence in group_lease.pending_choices:
                sequence.leased_length = len(group_lease.hashes) * PAGE_SIZE
        if group.has_started:
            self._started_groups.append(group)

    def mark_admitted(self, sequence: Sequence) -> None:
        """Record that the sequence was admitted; its group starts."""
        lease = self._leases.get(sequence.request_id)
        if lease is not None and not lease.group.has_started and sequence in lease.pending_choices:
            lease.group.has_started = True
            self._set_priority(sequence, URGENT_PRIORITY)
            self._started_groups.append(lease.group)

    def raise_priorities(self) -> None:
        """Give urgent priority to all choices of groups that started in the last step. Call it before ``schedule``."""
        for group in self._started_groups:
            for sequence in group.pending_sequences:
                self._set_priority(sequence, URGENT_PRIORITY)
        self._started_groups.clear()

    def extend_lease(self, sequence: Sequence, computed: int) -> None:
        """Add the pages of the sequence's first ``computed`` tokens, which have keys and values, to its lease."""
        lease = self._leases.get(sequence.request_id)
        if lease is None:
            return
        cached_pages = [
            self._pool.find_cached(page_hash) for page_hash in lease.hashes[len(lease.pages) : computed // PAGE_SIZE]
        ]
        # None: no page with this hash is cached, because this choice has other tokens or the page was evicted.
        new_pages = [page for page in takewhile(lambda page: page is not None, cached_pages) if page is not None]
        if self._states is not None:
            new_pages = self._move_state(lease, new_pages, self._states)
        for page in new_pages:
            self._pool.add_reference(page)
            self._holder_counts[page] += 1
        lease.pages += new_pages
        if new_pages:
            is_complete = lease.state_slot >= 0 and len(lease.pages) == lease.transferable_count
            states = [self._pool.page_count + lease.state_slot] if is_complete else []
            self._on_pages_leased(sequence.request_id, new_pages + states)

    def _move_state(self, lease: PageLease, new_pages: list[int], states: PagePool) -> list[int]:
        """Make a lease hold the last state that is kept at the end of one of its new pages, instead of its previous
        one. Return the new pages up to that state."""
        for count in range(len(new_pages), 0, -1):
            slot = states.find_cached(lease.hashes[len(lease.pages) + count - 1])
            if slot is not None:
                states.add_reference(slot)
                if lease.state_slot >= 0:
                    states.release_pages([lease.state_slot])
                lease.state_slot = slot
                return new_pages[:count]
        return []

    def mark_first_result(self, sequence: Sequence) -> None:
        """Record that a sequence has produced a result, or ended: it loses its urgent priority."""
        lease = self._leases.get(sequence.request_id)
        if lease is not None and sequence in lease.pending_choices:
            lease.pending_choices.remove(sequence)
            if sequence.priority == URGENT_PRIORITY:
                self._set_priority(sequence, sequence.request.priority)

    def release_lease(self, request_id: str) -> None:
        """End a lease. Unknown ids are ignored."""
        lease = self._leases.get(request_id)
        if lease is not None:
            for sequence in list(lease.pending_choices):
                self.mark_first_result(sequence)  # no lease waits for it any more
            del self._leases[request_id]
            lease.group.leases.remove(lease)
            self._groups = {name: group for name, group in self._groups.items() if group.leases}
            for page in lease.pages:
                self._holder_counts[page] -= 1
                if not self._holder_counts[page]:
                    del self._holder_counts[page]
            self._pool.release_pages(lease.pages)
            if self._states is not None and lease.state_slot >= 0:
                self._states.release_pages([lease.state_slot])
