"""Scheduler: plan the tokens that each sequence computes in the next step, and their KV pages.

There are no prefill and decode phases. Every sequence has ``len(tokens)`` tokens, of these ``computed`` are in the KV
cache, and a step lets ``computed`` catch up. A decode is a distance of one token; a new prompt, the rest of a long one,
the rest after a prefix hit and a preempted sequence are longer distances, computed in chunks (chunked prefill).

**Order.** Priority decides, then the order of first admission; ``core.wait_queue`` orders waiting sequences. Rows are
assigned in this order, running and waiting sequences together, and the last running sequence is preempted first. It
returns to its position in the queue, ahead of all of its priority that have not run yet. So the first sequence in order
gets a row in every step, or is a prompt held back only by the prefill share, and there is no livelock. A waiting
sequence takes slot and pages from sequences of worse priority, the last first; never from those of equal priority.

**Budget.** Decodes are few tokens and users watch them: each running sequence at a distance of one token gets its row
in every step. The step budget limits the additional tokens of prompts, and the prefill share decides whether the step
may have any from sequences without an output token. A sequence with output tokens (its own or prior ones) counts as
decoding, also while it recomputes. A prompt that is held back also holds back all sequences after it in the queue, so
it gets its turn when the running requests have ended, or sooner.

**Pages.** A sequence gets pages for the scheduled chunk, never for tokens that it may produce later. When no page is
free, the last running sequence is preempted: it frees all pages and will recompute its tokens. The prefix cache makes
this cheap, because it still has every page that was not overwritten meanwhile. Admission leaves one spare page for each
running sequence, so that it does not cause the next preemption itself.

**Sharing.** A page is published in the prefix cache when its last token is *scheduled*, before it is written. That is
sound within one step, because a layer writes the keys and values of all rows before any row attends. It lets requests
that arrive together compute their common prefix once: the first is scheduled a chunk, the next ones find it, also in
the middle of their own prompts. The price: a failed step leaves cached pages that were never written; ``abandon_step``
evicts them. A sequence attaches cached pages only in a step where it has a row itself, so nothing outside of a failed
step depends on them.

**Beams.** Beams of one search are sequences that fork from each other. A beam that waits for the others has no distance
left and gets no row. Their admission numbers are consecutive, so no other sequence stands between the first and the
last of them, and a search only starts if all its beams fit into pool and slots at their full length. So if the first
sequence in order waits, another beam of its search is next.

**Pinned pages.** Pages that other instances read or fill cannot be taken back (``core.shared_pages``), so a waiting
sequence is only admitted if all of its tokens fit next to them. Then a step may have no row although there are
sequences: they wait for a transfer to end. Choices of a request with a lease have the best of all priorities at first.

**Drafts.** A decode's row may carry draft tokens. They get pages only if no sequence is preempted for them, and a page
that they fill is published when its tokens are certain: ``commit_drafts``.

This module knows neither outputs nor why a sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sized
from math import inf
from operator import attrgetter

from parley.core.guess.speculation import Speculation
from parley.core.pages.block_pool import BlockPool, pages
from parley.core.pages.block_tables import Tables
from parley.core.prefill_share import Quota
from parley.core.sequence import BLOCK_SIZE, Row, Sequence, Status, Step
from parley.core.step_budget import Pace
from parley.core.wait_queue import Queue

_rank = attrgetter("rank")


class Scheduler:
    """Sequences over a pool of pages; at most ``max_slots`` run at once.

    ``on_admit`` is called when a sequence has got a slot; False rejects and removes it. ``on_release`` is called before
    a slot is taken away. With ``prefix_cache`` False nothing is looked up or published. Drafts come from
    ``speculation``. ``fits_in_pool`` says whether all tokens of a waiting sequence fit next to the pinned pages, given
    the pages that it would find in the prefix cache. ``revoke_reservation`` frees some revocable pages at a time; False
    if there are none. ``prefill_share``: the prefill share; without it prefill is never held back.
    """

    def __init__(
        self,
        pool: BlockPool,
        pace: Pace,
        slots: int,
        admit: Callable[[Sequence], bool],
        release: Callable[[Sequence], None],
        prefix_cache: bool = True,
        speculation: Speculation | None = None,
        fits: Callable[[Sequence, list[int]], bool] = lambda sequence, found: True,
        revoke: Callable[[], bool] = lambda: False,
        quota: Quota | None = None,
    ):
        self.pool = pool
        self.pace = pace
        self.quota = quota or Quota()
        self.slots = slots
        self._tables = Tables(pool, prefix_cache)
        self.preemptions = 0
        self.running: list[Sequence] = []  # sorted by rank
        self.waiting = Queue()
        self._turns = 0  # next admission number
        self._slots = list(reversed(range(slots)))
        self._filled = False  # the current step has a chunk of a prompt
        self._admit = admit
        self._release = release
        self._fits = fits
        self._revoke = revoke
        self.speculation = speculation

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if its tokens do not fit into the whole pool."""
        if pages(len(sequence)) > self.pool.size:
            raise ValueError(f"{len(sequence)} tokens do not fit into {self.pool.size} pages")
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state. Its pages are freed at once and stay in the prefix cache."""
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Step:
        """Return the next step; ``computed`` is advanced as if it had been run. It has rows whenever there are
        sequences, unless all of them wait for other instances to release pages."""
        step = Step([])
        self._tables.begin()
        self._filled = False
        decodes = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed == 1]
        self.quota.begin(len(decodes))
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if self.speculation is not None and self.speculation.wanted:
            busy = any(len(each.tokens) - each.computed > 1 and self._may(each) for each in self.running)
            drafts = self.speculation.drafts(decodes, busy=busy)
        self.pace.begin(len(decodes) + sum(map(len, drafts.values())))
        waiting = self.waiting.priority  # of the next sequence; inf once one could not be admitted
        for sequence in list(self.running):
            if waiting < sequence.priority:
                waiting = self.waiting.priority if self._fill(step, sequence.priority) else inf
            if sequence.status is not Status.RUNNING:
                break  # an earlier one in order needed its pages, so it took those of all later ones first
            distance = len(sequence.tokens) - sequence.computed
            if distance == 1:
                if sequence.computed < len(sequence.blocks) * BLOCK_SIZE or self._reserve(step, sequence, 1):
                    guess = self._afford(step, sequence, drafts.get(sequence, ())) if drafts else ()
                    self._row(step, sequence, 1, guess)
                continue
            if not distance:
                continue  # a beam that waits for others of its search
            found = self._tables.find(sequence)
            count = self._room(sequence, found)
            if count:
                self._tables.attach(sequence, found)
                if self._reserve(step, sequence, count):
                    self._chunk(step, sequence, count)
        if waiting < inf:
            self._fill(step, inf)
        self._tables.end(step)
        return step

    def fork(self, sequence: Sequence, parent: Sequence) -> None:
        """Continue a running sequence as a copy of ``parent``; the caller sets its tokens."""
        self._tables.fork(sequence, parent)

    def spawn(self, sequence: Sequence, parent: Sequence) -> None:
        """Fork into a sequence that does not run. It has an admission number and takes a slot, from a later sequence if
        necessary.

        Without a free slot it is queued and recomputed later.
        """
        sequence.blocks, sequence.computed = [], 0
        if not self._first(sequence) or not (self._slots or self.running[-1].rank > sequence.rank):
            sequence.hashes = list(parent.hashes)
            sequence.status = Status.WAITING
            self.waiting.add(sequence)
            return
        if not self._slots:
            self.preempt()
        if self._place(sequence):
            self.fork(sequence, parent)

    def preempt(self) -> Sequence:
        """Return the last running sequence to its position in the queue, without slot and pages."""
        sequence = self.running[-1]
        self._stop(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)
        return sequence

    def reset(self, *, running: bool) -> bool:
        """Clear the prefix cache. ``running``: preempt all running sequences first; else they prevent it. Returns
        whether it was cleared."""
        while running and self.running:
            self.preempt()
        return self._tables.clear()

    def move(self, sequence: Sequence, priority: float) -> None:
        """Change the priority of a sequence, and its position in the order."""
        if sequence.status is Status.RUNNING:
            del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
            sequence.priority = priority
            insort(self.running, sequence, key=_rank)
            return
        waits = sequence.status is Status.WAITING
        if waits:
            self.waiting.remove(sequence)
        sequence.priority = priority
        if waits:
            self.waiting.add(sequence)

    def spare(self) -> int:
        """Return how many pages may be reserved: all free ones but one for each running sequence, and none while a
        preempted sequence waits."""
        return 0 if self.waiting.returning else max(0, self.pool.free - len(self.running))

    def settle(self, row: Row) -> None:
        """Commit the drafts of a computed row that were right. The results of the row have been appended."""
        sequence = row.sequence
        certain, sequence.computed = sequence.computed, len(sequence.tokens) - 1
        self.waiting.serve(sequence, 2 * (sequence.computed - certain))  # computed and sampled
        sequence.reached = max(sequence.reached, sequence.computed)
        self._tables.publish(sequence, certain)
        self._tables.trim(sequence)

    def abandon(self, step: Step) -> None:
        """Evict the pages that a failed step published. The caller must remove its sequences."""
        for block in step.hashed:
            self.pool.forget(block)

    def check(self, held: Collection[list[int]] = ()) -> None:
        """Check conservation of pages and slots, for tests; ``held_tables``: pages with other holders. Raises
        AssertionError."""
        self._tables.check([*held, *(sequence.blocks for sequence in self.running)])
        taken = [sequence.slot for sequence in self.running]
        assert sorted(taken + self._slots) == list(range(self.slots)), "slots in use + free slots != all"
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting)
        assert all(sequence.slot == -1 and not sequence.blocks for sequence in waiting)
        for line in (self.running, waiting):
            ranks = [sequence.rank for sequence in line if sequence.turn >= 0]
            assert ranks == sorted(ranks), "sequences are not in order"

    def _fill(self, step: Step, before: float) -> bool:
        """Admit sequences of better priority than ``priority_limit``, in order, each with a row. False if one cannot
        be."""
        while self.waiting and (sequence := self.waiting.head).priority < before:
            if not self._slots and not self._yields(sequence):
                return False
            found = self._tables.find(sequence)
            count = self._room(sequence, found)
            if not count or not self._fits(sequence, found) or not self._clear(sequence, found, count):
                return False
            if self._start(sequence):
                self._tables.attach(sequence, found)
                self._reserve(step, sequence, count)
                self._chunk(step, sequence, count)
        return True

    def _first(self, sequence: Sequence) -> bool:
        """Whether the sequence precedes all waiting sequences that have run before."""
        if not self.waiting:
            return True
        head = self.waiting.head
        return head.priority >= sequence.priority and (head.turn < 0 or head.rank > sequence.rank)

    def _yields(self, sequence: Sequence) -> bool:
        """Whether a running sequence has to give way to this one."""
        return bool(self.running) and self.running[-1].priority > sequence.priority

    def _clear(self, sequence: Sequence, found: list[int], count: int) -> bool:
        """Free a slot, and pages for ``count`` tokens after the found ones, for a waiting sequence. False: too few."""
        need = pages(len(found) * BLOCK_SIZE + count) - len(found)
        while not self._slots or need + self.pool.idle(found) + len(self.running) > self.pool.free:
            if not self._yields(sequence):
                return False
            self.preempt()
        return True

    def _room(self, sequence: Sequence, found: Sized) -> int:
        """Return how many tokens of the sequence this step computes after the found pages: all, up to a page end, or 0.

        A remainder of the budget below a page is not worth a row, unless the step has no other chunk.
        """
        if not self._may(sequence):
            return 0
        start, total = sequence.computed + len(found) * BLOCK_SIZE, len(sequence.tokens)
        room = self.pace.room(start)
        if self._filled and room < min(BLOCK_SIZE, total - start):
            return 0
        end = min(total, start + room)
        boundary = end // BLOCK_SIZE * BLOCK_SIZE
        return (boundary if start < boundary and end < total else end) - start

    def _may(self, sequence: Sequence) -> bool:
        """Whether the prefill share lets the sequence have a row in this step."""
        return self.quota.open or sequence.generated > 0

    def _chunk(self, step: Step, sequence: Sequence, count: int) -> None:
        """Add a row of prompt tokens to the step."""
        self.pace.take(sequence.computed, count)
        if not sequence.generated:
            self.quota.take(count)
        self._filled = True
        self._row(step, sequence, count)

    def _start(self, sequence: Sequence) -> bool:
        """Give the head of the queue a slot. False if it is rejected."""
        self.waiting.pop()
        if not self._place(sequence):
            return False
        if self._tables.prefix_cache and not sequence.preemptions and not sequence.work.begun:
            self.pool.queries += len(sequence)
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Run the sequence in a free slot. False if it is rejected."""
        sequence.status = Status.FINISHED  # in case it is rejected
        sequence.slot = self._slots.pop()
        if not self._admit(sequence):
            self._slots.append(sequence.slot)
            sequence.slot = -1
            return False
        sequence.status = Status.RUNNING
        if sequence.turn < 0:
            sequence.turn = self._turns
            self._turns += sequence.turns
        insort(self.running, sequence, key=_rank)
        return True

    def _stop(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
        self._release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        self._tables.drop(sequence)

    def _reserve(self, step: Step, sequence: Sequence, count: int) -> bool:
        """Allocate pages for ``count`` more tokens, from later sequences if necessary. False: it was preempted itself.

        The last running sequence has no row in this step yet, since rows are assigned in order.
        """
        need = pages(sequence.computed + count) - len(sequence.blocks)
        while self.pool.free < need:
            if not self._revoke() and self.preempt() is sequence:
                return False
        self._tables.take(step, sequence, need)
        return True

    def _afford(self, step: Step, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the drafts that fit after one token, and allocate their pages; one page is left for each running
        sequence."""
        if not drafts:
            return ()
        spare = max(0, self.pool.free - len(self.running))
        drafts = drafts[: (len(sequence.blocks) + spare) * BLOCK_SIZE - sequence.computed - 1]
        self._tables.take(step, sequence, pages(sequence.computed + 1 + len(drafts)) - len(sequence.blocks))
        return drafts

    def _row(self, step: Step, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Add a row of ``count`` tokens and its drafts to the step, and publish the pages that the tokens fill."""
        start = sequence.computed
        end = sequence.computed = start + count
        scored = len(sequence.prompt_scores)
        score_from = scored if 0 < scored < sequence.prompt_len and scored <= end else None
        last = end == len(sequence.tokens)
        sample, pool = last and sequence.limit > 0, last and sequence.work.pooling is not None
        step.rows.append(Row(sequence, start, count, sample, score_from, pool, drafts))
        served = int(sample)
        if end > sequence.reached:
            served += end - max(start, sequence.reached)
            sequence.reached = end
        self.waiting.serve(sequence, served)
        if end // BLOCK_SIZE > start // BLOCK_SIZE:
            step.hashed += self._tables.publish(sequence, start)
