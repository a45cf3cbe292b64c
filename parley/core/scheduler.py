"""Which sequence computes how many tokens in the next step, and in which pages.

There are no prefill and decode phases. Every sequence has ``len(tokens)`` tokens, ``computed`` of which are in the
cache, and a step lets ``computed`` catch up. A decode is a distance of one token; a new prompt, the rest of a long one,
what a prefix hit left over and a preempted sequence are longer distances, cut into chunks.

**Order.** Priority decides, then who was admitted first; ``queue`` says who of those that wait is next. Rows are given
in this order, running and waiting sequences together, and whoever has to leave is the last one that runs. It goes back
to its turn, before all of its priority that have not run yet. So the first in order gets a row in every step, or is a
prompt whose turn comes when answers have had their time, and there is no livelock. One that waits takes slot and pages
from those of worse priority, the last first; from its equals never.

**Budget.** Decodes are few tokens and people watch them: each running sequence that is one token behind gets its row in
every step. The pace says how many further tokens, of prompts, the step may have, and the quota whether it may have any
that belong to prompts without a token yet: who was given or has drawn one is an answer, also while it catches up. A
prompt that is held back so holds back all that wait behind it, so it gets on when the answers under way have ended, or
sooner.

**Pages.** A sequence gets pages for the chunk that is scheduled, never for tokens it may once produce. When none is
free, the last running sequence is preempted: it gives back all pages and will compute its tokens again. What makes
this cheap is the prefix cache, in which it finds whatever has not been overwritten meanwhile. Admission leaves one
spare page for each running sequence, so that it does not cause the next preemption itself.

**Sharing.** A page becomes findable in the moment in which its last token is *scheduled*, before it is written. That
is sound within one step, for a layer writes the keys and values of all rows before any row attends; and it lets
requests that arrive together compute their common prefix once: the first is scheduled a chunk, the next ones find it,
also in the middle of their own prompts. The price is that a step that fails leaves findable pages that were never
written: ``abandon`` takes them back. A sequence attaches only to pages in a step in which it has a row itself, so
nobody outside of a failed step depends on them.

**Beams.** Those of one search are sequences that fork from each other. One that waits for the others has no distance
left and gets no row. Their turns follow one another, so nobody else stands between the first and the last of them; and
a search is only begun if all its beams fit into pool and slots at their full length. So if the first in order waits,
another one of its search is next.

**Holds.** Pages that other instances read or fill cannot be taken back (``lease``, ``landing``), so one that waits is
only admitted if all of its tokens fit beside them. Then a step may have no row although there are sequences: they wait
for the end of a transfer. The choices of a work whose pages are read have the best of all priorities at first.

**Drafts.** A decode's row may carry guesses at the tokens that follow. They get pages only where nobody is preempted
for it, and a page that they fill becomes findable when its tokens are certain: ``settle``.

The file knows neither outputs nor why a sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sized
from math import inf
from operator import attrgetter

from parley.core.blocks import BlockPool, pages
from parley.core.pace import Pace
from parley.core.queue import Queue
from parley.core.quota import Quota
from parley.core.sequence import BLOCK_SIZE, Row, Sequence, Status, Step
from parley.core.speculation import Speculation
from parley.core.tables import Tables

_rank = attrgetter("rank")


class Scheduler:
    """Sequences over a pool of pages, of which at most ``slots`` run at once.

    ``admit`` is called when a sequence has got a slot; False refuses it, and it is out. ``release`` is called before
    a slot is taken away. With ``prefix_cache`` False nothing is looked up or made findable. Drafts are those of
    ``speculation``. ``fits`` says of one that waits whether all its tokens have room beside the pages that nobody can
    take back; the others given are those that it would find in the cache. ``revoke`` takes back what can be, some at a
    time: False if there is nothing. ``quota``: of prompts, beside answers; as usual all that they can use.
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
        self.running: list[Sequence] = []  # by rank
        self.waiting = Queue()
        self._turns = 0  # first admissions so far
        self._slots = list(reversed(range(slots)))
        self._filled = False  # the step at hand has a row of a prompt
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
        """Take a sequence out, whatever it is doing. Its pages are free at once, and stay findable."""
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Step:
        """The next step. It has rows whenever there are sequences, but for those that wait until pages are given back
        from outside; ``computed`` is advanced as if it had been run."""
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
        waiting = self.waiting.priority  # of who is next, inf once one has to wait on
        for sequence in list(self.running):
            if waiting < sequence.priority:
                waiting = self.waiting.priority if self._fill(step, sequence.priority) else inf
            if sequence.status is not Status.RUNNING:
                break  # one before it in order needed its pages, and before that those of all that follow
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
        """Let a running sequence go on from where another has come to; its tokens are set by the caller."""
        self._tables.fork(sequence, parent)

    def spawn(self, sequence: Sequence, parent: Sequence) -> None:
        """As ``fork``, for a sequence that does not run: it has a turn, and takes a slot, from a later one if need be.

        If there is none for it, it waits until it is its turn, and computes its tokens again.
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
        """Send the last running sequence back to its turn in the queue, without slot and pages."""
        sequence = self.running[-1]
        self._stop(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)
        return sequence

    def reset(self, *, running: bool) -> bool:
        """Forget all cached prefixes. ``running``: who runs is put back first; else that forbids it."""
        while running and self.running:
            self.preempt()
        return self._tables.clear()

    def move(self, sequence: Sequence, priority: float) -> None:
        """Give a sequence another priority, and the place that goes with it."""
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
        """How many pages may be taken from outside: one is left for each that runs, none taken while one waits that
        ran before."""
        return 0 if self.waiting.returning else max(0, self.pool.free - len(self.running))

    def settle(self, row: Row) -> None:
        """A row with drafts was computed, and what it gave appended: of the drafts, what was right is certain now."""
        sequence = row.sequence
        certain, sequence.computed = sequence.computed, len(sequence.tokens) - 1
        self.waiting.serve(sequence, 2 * (sequence.computed - certain))  # computed and drawn
        sequence.reached = max(sequence.reached, sequence.computed)
        self._tables.publish(sequence, certain)
        self._tables.trim(sequence)

    def abandon(self, step: Step) -> None:
        """The step was not computed: nobody may find its pages. Its sequences are to be removed by the caller."""
        for block in step.hashed:
            self.pool.forget(block)

    def check(self, held: Collection[list[int]] = ()) -> None:
        """Conservation of pages and slots, for tests; ``held`` are pages that others hold. Raises AssertionError."""
        self._tables.check([*held, *(sequence.blocks for sequence in self.running)])
        taken = [sequence.slot for sequence in self.running]
        assert sorted(taken + self._slots) == list(range(self.slots)), "slots in use + free slots != all"
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting)
        assert all(sequence.slot == -1 and not sequence.blocks for sequence in waiting)
        for line in (self.running, waiting):
            ranks = [sequence.rank for sequence in line if sequence.turn >= 0]
            assert ranks == sorted(ranks), "they are not in order"

    def _fill(self, step: Step, before: float) -> bool:
        """Admit sequences of better priority than ``before``, in order, each with a row. False: one cannot be."""
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
        """Is it before all that wait and have run?"""
        if not self.waiting:
            return True
        head = self.waiting.head
        return head.priority >= sequence.priority and (head.turn < 0 or head.rank > sequence.rank)

    def _yields(self, sequence: Sequence) -> bool:
        """Is there somebody who has to leave if this one needs it?"""
        return bool(self.running) and self.running[-1].priority > sequence.priority

    def _clear(self, sequence: Sequence, found: list[int], count: int) -> bool:
        """A slot, and pages for ``count`` tokens behind those that were found, for one that waits. False: too few."""
        need = pages(len(found) * BLOCK_SIZE + count) - len(found)
        while not self._slots or need + self.pool.idle(found) + len(self.running) > self.pool.free:
            if not self._yields(sequence):
                return False
            self.preempt()
        return True

    def _room(self, sequence: Sequence, found: Sized) -> int:
        """How many tokens of it this step computes, behind pages that were found: all, or up to a page's end; or none.

        Scraps of what a step may have are not worth a row, unless it has nothing else.
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
        """Is the step open to it?"""
        return self.quota.open or sequence.generated > 0

    def _chunk(self, step: Step, sequence: Sequence, count: int) -> None:
        """A row of a prompt's tokens."""
        self.pace.take(sequence.computed, count)
        if not sequence.generated:
            self.quota.take(count)
        self._filled = True
        self._row(step, sequence, count)

    def _start(self, sequence: Sequence) -> bool:
        """Give the first that waits a slot."""
        self.waiting.pop()
        if not self._place(sequence):
            return False
        if self._tables.prefix_cache and not sequence.preemptions and not sequence.work.begun:
            self.pool.queries += len(sequence)
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Let it run, in a free slot. False: it is refused."""
        sequence.status = Status.FINISHED  # if it is refused
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
        """Pages for ``count`` more tokens, taken from later sequences if need be. False: it was preempted itself.

        The last one has no row in this step yet, since rows are given in order.
        """
        need = pages(sequence.computed + count) - len(sequence.blocks)
        while self.pool.free < need:
            if not self._revoke() and self.preempt() is sequence:
                return False
        self._tables.take(step, sequence, need)
        return True

    def _afford(self, step: Step, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """As many drafts as there is room for behind one token, with pages: one is left for each that runs."""
        if not drafts:
            return ()
        spare = max(0, self.pool.free - len(self.running))
        drafts = drafts[: (len(sequence.blocks) + spare) * BLOCK_SIZE - sequence.computed - 1]
        self._tables.take(step, sequence, pages(sequence.computed + 1 + len(drafts)) - len(sequence.blocks))
        return drafts

    def _row(self, step: Step, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Put ``count`` tokens into the step and make the pages that they fill findable; drafts behind them."""
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
