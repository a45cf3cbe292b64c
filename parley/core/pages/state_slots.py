"""Slots for states besides those of running sequences: snapshots at page ends, and the states after drafts.

A slot is like a page of the KV cache: it has references, its content is found by a hash, and the slot that was freed
longest ago is overwritten first (``PagePool``). A snapshot has the hash of the page that ends with it. So it is the
state after all tokens that this hash covers, and it is evicted together with that page.

No snapshot is copied. A row reads the state before its tokens from one slot, and writes the state after some of them to
others (``StepRow.states``). A sequence whose last write went to a snapshot reads it from there in its next row.

**Which states are kept:**

* at the last page end of a prompt: its other choices, repeated prompts and the next turn of its conversation continue
  from there;
* at the last page end of the output so far, if there are enough slots;
* where cached pages of a prompt end, but no state was kept: two prompts differ from there on, and a third may;
* in long prompts, also at equal distances.

Rows of one step cannot read each other's states. So if a sequence finds pages that the same step computes, it waits for
the next step, and the row that computes these pages keeps the state at their end.

**Drafts.** The state after each draft has a slot of its own until it is known how many of them were right.

Knows slots as numbers; nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parley.core.pages.page_pool import PagePool
from parley.core.sequence import PAGE_SIZE, Sequence, StateWrite, StepRow, StepStates

MIN_DISTANCE = 1024  # tokens between the states that are kept within a long prompt, at least
LONG_PROMPT_SHARE = 8  # those of one prompt use at most 1/8 of the slots


class StateSlots:
    """``count`` slots for states, numbered from ``first_slot`` on.

    ``keeps_snapshots`` False: they serve drafts only. ``copy_state(source, target)``: as in ``ModelRunner``.
    """

    def __init__(
        self,
        first_slot: int,
        count: int,
        copy_state: Callable[[Sequence, Sequence], None],
        keeps_snapshots: bool = True,
    ):
        self.pool = PagePool(count)
        self.keeps_snapshots = keeps_snapshots and count > 0
        self._first_slot = first_slot
        self._copy_state = copy_state
        self._is_assembling = False
        self._step_slots: list[int] = []  # slots that the step reads or writes; no later row of it may write them
        self._fresh_hashes: set[bytes] = set()  # hashes of the snapshots that the step writes
        # By the hash of a page: the row of this step that computes its last token, and the position after that token.
        self._page_rows: dict[bytes, tuple[StepRow, int]] = {}

    @property
    def draft_limit(self) -> int:
        """How many slots may be used for drafts now: half of all slots are left to snapshots."""
        return max(0, self.pool.free_count - self.pool.page_count // 2)

    def begin_step(self) -> None:
        """Release the slots that the last step used."""
        self.pool.release_pages(self._step_slots)
        self._step_slots.clear()
        self._fresh_hashes.clear()
        self._is_assembling = True

    def finish_step(self) -> None:
        """End the assembly of a step: its rows do not change any more."""
        self._page_rows.clear()
        self._is_assembling = False

    def abandon_step(self) -> None:
        """Forget the snapshots of a step that failed."""
        self.forget_snapshots(self._fresh_hashes)

    def forget_snapshots(self, hashes: Iterable[bytes]) -> None:
        """Forget the snapshots with these hashes. Unknown hashes are ignored."""
        for digest in hashes:
            if (slot := self.pool.find_cached(digest)) is not None:
                self.pool.evict_page(slot)

    def count_usable(self, sequence: Sequence, hashes: list[bytes]) -> int | None:
        """Return how many of the sequence's next pages, which are cached, it can use: those up to the last snapshot.
        ``hashes``: theirs, in order.

        None: it can use more of them in the next step, and should wait for it.
        """
        usable = next((count for count in range(len(hashes), 0, -1) if self._is_readable(hashes[count - 1])), 0)
        if usable == len(hashes):
            return usable
        if self._is_assembling:
            is_computed_now = hashes[-1] in self._page_rows and self._keep_end_of_page(hashes[-1])
            if is_computed_now or not self._fresh_hashes.isdisjoint(hashes[usable:]):
                return None
        sequence.branch_point = sequence.computed + len(hashes) * PAGE_SIZE
        return usable

    def attach_snapshot(self, sequence: Sequence, digest: bytes) -> None:
        """Let a sequence continue from a snapshot."""
        slot = self.pool.find_cached(digest)
        assert slot is not None
        self.release_state(sequence)
        self._move_state(sequence, slot)

    def release_state(self, sequence: Sequence) -> None:
        """Make a sequence use the state in its own slot."""
        if sequence.state_slot >= 0:
            self._step_slots.append(sequence.state_slot - self._first_slot)  # the step may still read it
            sequence.state_slot = -1

    def fork_state(self, sequence: Sequence, parent: Sequence) -> None:
        """Let a running sequence continue from the state of another."""
        self.release_state(sequence)
        if parent.state_slot >= 0:
            self._move_state(sequence, parent.state_slot - self._first_slot)
        else:
            self._copy_state(parent, sequence)

    def plan_row(self, row: StepRow, running_count: int) -> None:
        """Choose the slots that a row reads and writes. Its drafts are fixed, and the hashes of its pages known.

        ``running_count``: the number of running sequences.
        """
        sequence, end = row.sequence, row.start + row.count
        source_slot = -1 if not row.start else sequence.slot if sequence.state_slot < 0 else sequence.state_slot
        self.release_state(sequence)
        row.states = StepStates(source_slot, [])
        at = row.start
        for boundary in self._boundaries_to_keep(row, running_count):
            slot = self._take_snapshot(sequence.hashes[boundary // PAGE_SIZE - 1])
            if slot is not None:
                row.states.writes.append(StateWrite(boundary - at, self._first_slot + slot))
                at = boundary
        for _ in range(at, end + len(row.drafts) - 1 if row.drafts else at):
            row.states.writes.append(StateWrite(1, self._first_slot + self._take_slot()))
        if at < end + len(row.drafts):
            row.states.writes.append(StateWrite(1 if row.drafts else end - at, sequence.slot))
        else:
            self._move_state(sequence, row.states.writes[-1].slot - self._first_slot)
        if self.keeps_snapshots and not row.drafts:
            pages = range(row.start // PAGE_SIZE, end // PAGE_SIZE)
            self._page_rows.update({sequence.hashes[page]: (row, (page + 1) * PAGE_SIZE) for page in pages})

    def commit_drafts(self, row: StepRow, running_count: int) -> None:
        """Let the sequence continue from the state after the last accepted draft of a row, and keep the state at a page
        end before it.

        ``running_count``: the number of running sequences.
        """
        sequence, states = row.sequence, row.states
        assert states is not None
        at = row.start
        for tokens, slot in states.writes:
            at += tokens
            if at > sequence.computed or slot == sequence.slot:
                break
            if at % PAGE_SIZE == 0 and at > row.start + row.count and self._keeps_outputs(running_count):
                self._replace_output_snapshot(sequence, at)
                self.pool.cache_page(slot - self._first_slot, sequence.output_snapshot)
            if at == sequence.computed:
                self._move_state(sequence, slot - self._first_slot)

    def check_invariants(self, sequences: Iterable[Sequence], held_slots: Iterable[list[int]] = ()) -> None:
        """Check conservation of slots, for tests. ``held_slots``: those with other holders. Raises AssertionError."""
        sequence_slots = [
            [sequence.state_slot - self._first_slot] for sequence in sequences if sequence.state_slot >= 0
        ]
        self.pool.check_invariants([self._step_slots, *sequence_slots, *held_slots])

    def _is_readable(self, digest: bytes) -> bool:
        """Whether a snapshot has been written."""
        is_fresh = self._is_assembling and digest in self._fresh_hashes
        return not is_fresh and self.pool.find_cached(digest) is not None

    def _boundaries_to_keep(self, row: StepRow, running_count: int) -> list[int]:
        """Return the page ends among the tokens of a row whose states are kept, in order."""
        sequence, end = row.sequence, row.start + row.count
        if not self.keeps_snapshots or row.start // PAGE_SIZE == end // PAGE_SIZE:
            return []
        if row.count == 1 and sequence.output_length and row.start >= sequence.leased_length:
            if not self._keeps_outputs(running_count):
                return []
            self._replace_output_snapshot(sequence, end)
            return [end]
        total = len(sequence.tokens)
        distance = MIN_DISTANCE
        while total // distance > max(1, self.pool.page_count // LONG_PROMPT_SHARE):
            distance *= 2
        stored_positions = {
            (total - 1) // PAGE_SIZE * PAGE_SIZE,
            sequence.branch_point,
            *range(distance, end + 1, distance),
        }
        stored_positions.add(min(end // PAGE_SIZE * PAGE_SIZE, sequence.leased_length))
        return sorted(boundary for boundary in stored_positions if row.start < boundary <= end)

    def _keeps_outputs(self, running_count: int) -> bool:
        """Whether there are enough slots to keep a state of each sequence while it decodes."""
        return self.keeps_snapshots and 2 * running_count <= self.pool.page_count

    def _replace_output_snapshot(self, sequence: Sequence, end: int) -> None:
        """Forget the last state that was kept while a sequence decoded; the one after ``end`` tokens replaces it."""
        self.forget_snapshots([sequence.output_snapshot])
        sequence.output_snapshot = sequence.hashes[end // PAGE_SIZE - 1]

    def _keep_end_of_page(self, digest: bytes) -> bool:
        """Let the row of this step that computes the end of a page keep its state. False: there is no slot for it."""
        row, boundary = self._page_rows[digest]
        slot = self._take_snapshot(digest)
        if slot is None:
            return digest in self._fresh_hashes
        assert row.states is not None
        writes, at = row.states.writes, row.start
        index = 0  # of the write that crosses the boundary; it is split there
        while at + writes[index].tokens < boundary:
            at += writes[index].tokens
            index += 1
        tokens_after = at + writes[index].tokens - boundary
        new_writes = [StateWrite(boundary - at, self._first_slot + slot)]
        if tokens_after:
            new_writes.append(StateWrite(tokens_after, writes[index].slot))
        else:
            self.release_state(row.sequence)  # if the row kept this state before, and that was forgotten in this step
            self._move_state(row.sequence, slot)
        writes[index : index + 1] = new_writes
        return True

    def _take_snapshot(self, digest: bytes) -> int | None:
        """Return a slot for a new snapshot with this hash; None if no slot is free, or if the snapshot exists."""
        if not self.pool.free_count or self.pool.find_cached(digest) is not None:
            return None
        slot = self._take_slot()
        self.pool.cache_page(slot, digest)
        self._fresh_hashes.add(digest)
        return slot

    def _take_slot(self) -> int:
        """Return a slot that the step writes, and holds until it has ended."""
        slot = self.pool.allocate()
        self._step_slots.append(slot)
        return slot

    def _move_state(self, sequence: Sequence, slot: int) -> None:
        """Make a sequence use the state in this slot."""
        self.pool.add_reference(slot)
        sequence.state_slot = self._first_slot + slot
