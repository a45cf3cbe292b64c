"""Scheduler: plan the tokens that each sequence computes in the next step, and their KV pages.

There are no prefill and decode phases. The first ``computed`` of a sequence's ``tokens`` are in the KV cache, and each
step computes some of the others. A sequence that decodes has one uncomputed token. A new prompt, the rest of a long
one, the rest after a prefix hit and a preempted sequence have more; they are computed in chunks (chunked prefill).

**Order.** Priority decides, then the order of first admission; ``core.wait_queue`` orders waiting sequences. Rows are
assigned in this order, running and waiting sequences together, and the last running sequence is preempted first. It
returns to its position in the queue, ahead of all of its priority that have not run yet. So the first sequence in order
gets a row in every step, unless the prefill share holds its prompt back, and there is no livelock. A waiting sequence
preempts running sequences of worse priority, the last one first, but never those of equal priority. A tenant's own
priorities order only its waiting sequences and preempt nothing.

**Budget.** Decodes cost few tokens, and users notice their delay: each running sequence with one uncomputed token gets
a row in every step. ``core.chunk_planner`` limits the additional tokens of prompts. It may hold prompts back, but not a
preempted sequence that recomputes its output tokens (its own or prior ones). A prompt that is held back also holds back
all sequences after it in the queue, so its prefill starts at the latest when the running requests have ended.

**Pages.** A sequence gets pages for the scheduled chunk, never for tokens that it may produce later. When no page is
free, the last running sequence is preempted: it frees all pages and will recompute its tokens. The prefix cache makes
this cheap, because it still has every page that was not overwritten meanwhile. Admission leaves one free page for each
running sequence, so that the new sequence does not cause a preemption in the next step. ``core.pages.block_tables``
says how pages and states are shared.

**Beams.** Beams of one search are sequences that fork from each other. A beam that waits for the others has no
uncomputed token and gets no row. Their admission numbers are consecutive, so no other sequence stands between the first
and the last of them, and a search only starts if all its beams fit into pool and slots at their full length. So if the
first sequence in order waits, another beam of its search is next.

**Pinned pages.** Pages that other instances read or fill cannot be taken back (``core.shared_pages``), so a waiting
sequence is only admitted if all of its tokens fit into the other pages. So a step may have no row although there are
sequences: they wait for a transfer to end. Choices of a request with a lease have the best of all priorities until
their first result.

**Drafts.** A decode's row may have draft tokens. They get pages only if no sequence is preempted for them. A page that
they fill is published only after they were accepted: ``commit_drafts``.

**Long rope.** Models with two sets of rotary factors (longrope) use the long ones for all tokens of a sequence of more
than ``long_rope_after`` tokens. A sequence that grows beyond that length loses its pages, because their keys have the
short factors, and is recomputed like a preempted one, but keeps its slot. No cached page is used with both sets.

**Media.** A sequence gets a chunk only if it holds the embeddings of all media items that it will compute. Otherwise it
waits in the encode queue (``core.media.encode_queue``) without slot and pages, does not hold back others, and returns
to its position when it has them.

This module knows neither outputs nor why a sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from math import inf

from parley.core.chunk_planner import ChunkPlanner
from parley.core.media.encode_queue import EncodeQueue
from parley.core.pages.block_tables import BlockTables
from parley.core.pages.page_pool import PagePool, count_pages
from parley.core.pages.state_slots import StateSlots
from parley.core.prefill_share import PrefillShare
from parley.core.running_sequences import RunningSequences
from parley.core.sequence import PAGE_SIZE, Sequence, SequenceStatus, Step, StepRow
from parley.core.speculative.speculation import Speculation
from parley.core.step_budget import StepBudget
from parley.core.wait_queue import WaitQueue


class Scheduler:
    """Schedules sequences over a pool of pages; at most ``max_slots`` run at once.

    * ``step_budget`` limits the tokens of prompts in a step, ``prefill_share`` their share of the time; without it
      prefill is never held back.
    * ``on_admit(sequence)`` is called when a sequence has got a slot; False rejects and removes it.
      ``on_release(sequence)`` is called before it loses its slot.
    * ``prefix_cache``: False looks up and publishes no pages.
    * ``speculation`` proposes drafts.
    * ``fits_in_pool(sequence, cached_pages)`` says whether all tokens of a waiting sequence fit next to the pinned
      pages, given the pages that it would find in the prefix cache.
    * ``revoke_reservation()`` frees some revocable pages; False if there are none.
    * ``long_rope_after``: as in ``ModelRunner``.
    * ``states``: the slots for states, for models with layers that keep them.

    ``attach_encode_queue`` must be called before sequences with media are added.
    """

    _encode_queue: EncodeQueue | None = None

    def __init__(
        self,
        pool: PagePool,
        step_budget: StepBudget,
        max_slots: int,
        on_admit: Callable[[Sequence], bool],
        on_release: Callable[[Sequence], None],
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        fits_in_pool: Callable[[Sequence, list[int]], bool] = lambda sequence, pages: True,
        revoke_reservation: Callable[[], bool] = lambda: False,
        prefill_share: PrefillShare | None = None,
        long_rope_after: float = inf,
        states: StateSlots | None = None,
    ):
        self.pool = pool
        self._chunk_planner = ChunkPlanner(step_budget, prefill_share or PrefillShare())
        self._long_rope_after = long_rope_after
        self._block_tables = BlockTables(pool, prefix_cache, states)
        self.preemptions = 0
        self._running_sequences = RunningSequences(max_slots, on_admit, on_release)
        self.running = self._running_sequences.by_rank  # the same list: the first sequence in order comes first
        self.waiting = WaitQueue()
        self._fits_in_pool = fits_in_pool
        self._revoke_reservation = revoke_reservation
        self.speculation = speculation

    def attach_encode_queue(self, encode_queue: EncodeQueue) -> None:
        """Set the queue of sequences that wait for embeddings; it is made later, because it resumes sequences here."""
        self._encode_queue = encode_queue

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if its tokens do not fit into the whole pool."""
        if count_pages(len(sequence)) > self.pool.page_count:
            raise ValueError(f"{len(sequence)} tokens do not fit into {self.pool.page_count} pages")
        if not sequence.request.media or self._claim_embeddings(
            sequence, self._block_tables.find_prefix(sequence) or []
        ):
            self.waiting.enqueue(sequence)

    def resume_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence again, at its old position, because its embeddings have arrived."""
        self.waiting.enqueue(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its pages are freed at once and stay in the prefix cache."""
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate_slot(sequence)
        elif sequence.status is SequenceStatus.WAITING and not self._awaits_embeddings(sequence):
            self.waiting.remove_waiting(sequence)
        if sequence.request.media and self._encode_queue is not None:
            self._encode_queue.remove_sequence(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Step:
        """Return the next step; ``computed`` is advanced as if it had been run. It has rows whenever there are
        sequences, unless all of them wait for other instances to release pages, or for embeddings."""
        step = Step([])
        drafts = self._begin_step()
        next_priority = self.waiting.head_priority  # inf once a sequence could not be admitted
        for sequence in list(self.running):
            if next_priority < sequence.priority:
                next_priority = self.waiting.head_priority if self._admit_waiting(step, sequence.priority) else inf
            if sequence.status is not SequenceStatus.RUNNING:
                break  # preempted for an earlier sequence; so were all later ones, as the last is preempted first
            if sequence.uncomputed_count == 1:
                self._add_decode(step, sequence, drafts)
            elif sequence.uncomputed_count:  # 0: a beam that waits for others of its search
                self._catch_up(step, sequence)
        if next_priority < inf:
            self._admit_waiting(step, inf)
        self._block_tables.finish_step(step)
        return step

    def schedule_ahead(self, step: Step) -> Step | None:
        """Return the step that follows ``step``, whose rows are decodes and whose results are not known yet. None if it
        may have to admit or preempt sequences.

        Its rows assume that each sequence continues, except those that reach their output limit with ``step``. Nothing
        counts as computed until ``mark_row_computed``.
        """
        sequences = [row.sequence for row in step.rows]
        if self._block_tables.has_states or self._may_add_rows() or len(sequences) != len(self.running):
            return None
        unfinished = [sequence for sequence in sequences if sequence.output_length + 1 < sequence.output_limit]
        if any(len(sequence) + 1 > self._long_rope_after and not sequence.uses_long_rope for sequence in unfinished):
            return None
        needing_page = [sequence for sequence in unfinished if len(sequence) == len(sequence.block_table) * PAGE_SIZE]
        if not unfinished or len(needing_page) > self.pool.free_count:
            return None
        next_step = Step([StepRow(sequence, len(sequence), 1, True) for sequence in unfinished])
        for sequence in needing_page:
            self._block_tables.append_pages(next_step, sequence, 1)
        return next_step

    def begin_started_step(self, step: Step) -> None:
        """Tell the step budget and the prefill share that the next results are those of this ``schedule_ahead``
        step."""
        self._chunk_planner.begin_step(len(step.rows))
        self._chunk_planner.charge_decodes(len(step.rows))

    def fork_sequence(self, sequence: Sequence, parent: Sequence) -> None:
        """Continue a running sequence as a copy of ``parent``; the caller sets its tokens."""
        self._block_tables.fork_table(sequence, parent)

    def spawn_sequence(self, sequence: Sequence, parent: Sequence) -> None:
        """Run a sequence that has no slot, as a copy of ``parent``. It must have an admission number. If no slot is
        free, a running sequence after it in order is preempted.

        If there is none, or a preempted sequence precedes it, the sequence is queued and recomputed later.
        """
        sequence.block_table, sequence.computed = [], 0
        if not self._precedes_preempted(sequence) or not (
            self._running_sequences.has_free_slot or self.running[-1].rank > sequence.rank
        ):
            sequence.hashes, sequence.uses_long_rope = list(parent.hashes), parent.uses_long_rope
            sequence.status = SequenceStatus.WAITING
            self.waiting.enqueue(sequence)
            return
        if not self._running_sequences.has_free_slot:
            self.preempt_last()
        if self._running_sequences.start_sequence(sequence):
            self.fork_sequence(sequence, parent)

    def preempt_last(self) -> Sequence:
        """Preempt the last running sequence, queue it at its old position, and return it."""
        sequence = self.running[-1]
        self._preempt_sequence(sequence)
        self.waiting.enqueue(sequence)
        return sequence

    def reset_cache(self, *, running: bool) -> bool:
        """Clear the prefix cache, and return whether it was cleared. ``running``: preempt all running sequences first;
        without it nothing is cleared while one runs."""
        while running and self.running:
            self.preempt_last()
        return self._block_tables.clear_cached_pages()

    def set_priority(self, sequence: Sequence, priority: float) -> None:
        """Change the priority of a sequence, and its position in the order."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running_sequences.set_priority(sequence, priority)
            return
        queue = self.waiting
        if self._encode_queue is not None and self._awaits_embeddings(sequence):
            queue = self._encode_queue.waiting
        is_waiting = sequence.status is SequenceStatus.WAITING
        if is_waiting:
            queue.remove_waiting(sequence)
        sequence.priority = priority
        if is_waiting:
            queue.enqueue(sequence)

    def spare_pages(self) -> int:
        """Return the number of pages that may be reserved: the free pages less one for each running sequence; 0 while a
        preempted sequence waits."""
        return 0 if self.waiting.has_preempted else max(0, self.pool.free_count - len(self.running))

    def commit_drafts(self, row: StepRow) -> None:
        """Commit the accepted drafts of a computed row. The tokens of its result must have been appended."""
        sequence = row.sequence
        computed_before, sequence.computed = sequence.computed, len(sequence.tokens) - 1
        self.waiting.record_service(sequence, 2 * (sequence.computed - computed_before))  # computed and sampled
        sequence.furthest_computed = max(sequence.furthest_computed, sequence.computed)
        self._block_tables.commit_drafts(row, computed_before, len(self.running))

    def abandon_step(self, step: Step) -> None:
        """Evict the pages that a failed step published. The caller must remove the sequences of its rows."""
        self._block_tables.abandon_step(step)

    def evict_sequence_pages(self, sequence: Sequence) -> None:
        """Evict the pages of a sequence and the states at their ends: they may hold wrong values."""
        self._block_tables.evict_table(sequence)

    def check_invariants(
        self, held_tables: Collection[list[int]] = (), held_states: Collection[list[int]] = ()
    ) -> None:
        """Check conservation of pages and slots, for tests; ``held_tables``, ``held_states``: pages and slots for
        states with other holders. Raises AssertionError."""
        self._block_tables.check_invariants(self.running, held_tables, held_states)
        self._running_sequences.check_invariants()
        waiting_sequences = list(self.waiting)
        assert len(waiting_sequences) == len(self.waiting)
        all_waiting = [*waiting_sequences, *(self._encode_queue.waiting if self._encode_queue is not None else ())]
        assert len(set(all_waiting)) == len(all_waiting), "a sequence waits twice"
        assert all(sequence.slot == -1 and not sequence.block_table for sequence in all_waiting)
        assert all(sequence.status is SequenceStatus.WAITING for sequence in all_waiting)
        if self._encode_queue is not None:
            self._encode_queue.check_invariants([*self.running, *all_waiting])
        ranks = [sequence.rank for sequence in waiting_sequences if sequence.admission_number >= 0]
        assert ranks == sorted(ranks), "sequences are not in order"

    def _begin_step(self) -> dict[Sequence, tuple[int, ...]]:
        """Begin a step in budgets, block tables and states. Return the proposed drafts of sequences that decode."""
        if self._long_rope_after < inf:
            for sequence in self.running:
                self._update_rope(sequence)
        self._block_tables.begin_step()
        decodes = [sequence for sequence in self.running if sequence.uncomputed_count == 1]
        self._chunk_planner.begin_step(len(decodes))
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if self.speculation is not None and self.speculation.is_active:
            has_prefill = any(
                sequence.uncomputed_count > 1 and self._chunk_planner.may_compute(sequence) for sequence in self.running
            )
            drafts = self.speculation.draft_decodes(decodes, has_prefill=has_prefill)
        self._chunk_planner.charge_decodes(len(decodes) + sum(map(len, drafts.values())))
        return drafts

    def _add_decode(self, step: Step, sequence: Sequence, drafts: dict[Sequence, tuple[int, ...]]) -> None:
        """Add the row of a sequence with one uncomputed token, and its drafts. If it gets no page, it is preempted."""
        if sequence.computed < len(sequence.block_table) * PAGE_SIZE or self._allocate_pages(step, sequence, 1):
            row_drafts = self._allocate_drafts(step, sequence, drafts.get(sequence, ())) if drafts else ()
            self._add_row(step, sequence, 1, row_drafts)

    def _catch_up(self, step: Step, sequence: Sequence) -> None:
        """Attach the cached pages that continue a running sequence, and add a chunk of the tokens after them."""
        cached_pages = self._block_tables.find_prefix(sequence)
        if cached_pages is None:
            return
        if not self._claim_embeddings(sequence, cached_pages):
            self._preempt_sequence(sequence)  # it has lost pages that it had computed
            return
        count = self._chunk_planner.chunk_size(sequence, len(cached_pages))
        if count:
            self._block_tables.attach_pages(sequence, cached_pages)
            if self._allocate_pages(step, sequence, count):
                self._add_chunk(step, sequence, count)

    def _admit_waiting(self, step: Step, priority_limit: float) -> bool:
        """Admit sequences of better priority than ``priority_limit``, in order, and add a row for each. Return False
        if one of them cannot be admitted."""
        while self.waiting and (sequence := self.waiting.head_sequence).priority < priority_limit:
            if not self._running_sequences.has_free_slot and not self._can_preempt_for(step, sequence):
                return False
            self._update_rope(sequence)
            cached_pages = self._block_tables.find_prefix(sequence)
            if cached_pages is None:
                return False
            if not self._claim_embeddings(sequence, cached_pages):
                self.waiting.remove_waiting(sequence)
                continue
            count = self._chunk_planner.chunk_size(sequence, len(cached_pages))
            if (
                not count
                or not self._fits_in_pool(sequence, cached_pages)
                or not self._make_room(step, sequence, cached_pages, count)
            ):
                return False
            if self._admit_head(sequence):
                self._block_tables.attach_pages(sequence, cached_pages)
                self._allocate_pages(step, sequence, count)
                self._add_chunk(step, sequence, count)
        return True

    def _claim_embeddings(self, sequence: Sequence, cached_pages: Sized) -> bool:
        """Whether the sequence holds the embeddings of all items that end after ``cached_pages`` more pages. If not, it
        waits in the encode queue from now on."""
        if not sequence.request.media:
            return True
        assert self._encode_queue is not None
        start = sequence.computed + len(cached_pages) * PAGE_SIZE
        return self._encode_queue.claim_embeddings(sequence, start)

    def _awaits_embeddings(self, sequence: Sequence) -> bool:
        """Whether the sequence waits in the encode queue."""
        return self._encode_queue is not None and sequence in self._encode_queue

    def _update_rope(self, sequence: Sequence) -> None:
        """Recompute a sequence that has grown beyond the short rotary factors."""
        if len(sequence) > self._long_rope_after and not sequence.uses_long_rope:
            if sequence.furthest_computed:
                sequence.preemptions += 1
            self._block_tables.switch_to_long_rope(sequence)

    def _precedes_preempted(self, sequence: Sequence) -> bool:
        """Whether the sequence precedes all waiting sequences that have run before."""
        if not self.waiting:
            return True
        head = self.waiting.head_sequence
        return head.priority >= sequence.priority and (head.admission_number < 0 or head.rank > sequence.rank)

    def _can_preempt_for(self, step: Step, sequence: Sequence) -> bool:
        """Whether the last running sequence may be preempted for this waiting one: it has worse priority, or the
        waiting one is a beam that has run before.

        The other beams of its search wait for such a beam. If it waited for embeddings while a later search began, the
        beams of both searches would wait for each other's slots.
        """
        if not self.running:
            return False
        candidate = self.running[-1]
        if candidate.priority > sequence.priority:
            return True
        has_run = sequence.request.beam is not None and sequence.admission_number >= 0
        return has_run and candidate.rank > sequence.rank and all(row.sequence is not candidate for row in step.rows)

    def _make_room(self, step: Step, sequence: Sequence, cached_pages: list[int], count: int) -> bool:
        """Make a slot and enough pages free for a waiting sequence, by preemption if necessary: pages for ``count``
        tokens after its ``cached_pages``. Return False if that is not possible."""
        page_need = count_pages(len(cached_pages) * PAGE_SIZE + count) - len(cached_pages)
        while (
            not self._running_sequences.has_free_slot
            or page_need + self.pool.count_free(cached_pages) + len(self.running) > self.pool.free_count
        ):
            if not self._can_preempt_for(step, sequence):
                return False
            self.preempt_last()
        return True

    def _add_chunk(self, step: Step, sequence: Sequence, count: int) -> None:
        """Add a row of prompt tokens to the step."""
        self._chunk_planner.charge_chunk(sequence, count)
        self._add_row(step, sequence, count)

    def _admit_head(self, sequence: Sequence) -> bool:
        """Give the head of the queue a slot. Return False if it is rejected."""
        self.waiting.pop_head()
        if not self._running_sequences.start_sequence(sequence):
            return False
        if self._block_tables.prefix_cache and not sequence.preemptions and not sequence.request.resumed:
            self.pool.prefix_queries += len(sequence)
        return True

    def _preempt_sequence(self, sequence: Sequence) -> None:
        """Free the slot and pages of a running sequence, which will run again."""
        self._vacate_slot(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.preemptions += 1
        self.preemptions += 1

    def _vacate_slot(self, sequence: Sequence) -> None:
        """Free the slot and pages of a running sequence."""
        self._running_sequences.stop_sequence(sequence)
        self._block_tables.free_table(sequence)

    def _allocate_pages(self, step: Step, sequence: Sequence, count: int) -> bool:
        """Allocate pages for ``count`` more tokens; if too few are free, preempt later sequences. Return False if
        ``sequence`` itself was preempted.

        The last running sequence has no row in this step yet, since rows are assigned in order.
        """
        page_need = count_pages(sequence.computed + count) - len(sequence.block_table)
        while self.pool.free_count < page_need:
            if not self._revoke_reservation() and self.preempt_last() is sequence:
                return False
        self._block_tables.append_pages(step, sequence, page_need)
        return True

    def _allocate_drafts(self, step: Step, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first of the drafts that get pages without a preemption, after those of one token, and allocate
        them.

        One free page is left for each running sequence.
        """
        if not drafts:
            return ()
        if not sequence.uses_long_rope:  # tokens after ``long_rope_after`` need keys with the long factors
            drafts = drafts[: int(min(len(drafts), self._long_rope_after - len(sequence)))]
        usable_pages = len(sequence.block_table) + max(0, self.pool.free_count - len(self.running))
        drafts = self._block_tables.cut_drafts(drafts)[: usable_pages * PAGE_SIZE - sequence.computed - 1]
        page_need = count_pages(sequence.computed + 1 + len(drafts)) - len(sequence.block_table)
        self._block_tables.append_pages(step, sequence, page_need)
        return drafts

    def _may_add_rows(self) -> bool:
        """Whether the next step may have drafts, or rows of sequences without a row in this one."""
        if self.speculation is not None and self.speculation.is_active:
            return True
        if self._encode_queue is not None and (len(self._encode_queue) or self._encode_queue.is_encoding):
            return True
        if not self.waiting:
            return False
        return self._running_sequences.has_free_slot or self._can_preempt_for(Step([]), self.waiting.head_sequence)

    def _add_row(self, step: Step, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Add a row of ``count`` tokens and its drafts to the step, and publish the pages that the tokens fill."""
        start = sequence.computed
        end = start + count
        scored_count = len(sequence.prompt_scores)
        score_from = scored_count if 0 < scored_count < sequence.prompt_len and scored_count <= end else None
        is_last = end == len(sequence.tokens)
        row = StepRow(
            sequence,
            start,
            count,
            sample=is_last and sequence.output_limit > 0,
            score_from=score_from,
            make_vector=is_last and sequence.request.pooling is not None,
            drafts=drafts,
        )
        step.rows.append(row)
        self.mark_row_computed(step, row)

    def mark_row_computed(self, step: Step, row: StepRow) -> None:
        """Count the tokens of a row as computed, and publish the pages that they fill."""
        sequence, start, end = row.sequence, row.start, row.start + row.count
        sequence.computed = end
        service = int(row.sample)
        if end > sequence.furthest_computed:
            service += end - max(start, sequence.furthest_computed)
            sequence.furthest_computed = end
        self.waiting.record_service(sequence, service)
        self._block_tables.publish_row(step, row, len(self.running))
