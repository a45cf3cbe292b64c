"""Scheduler for encoder models, which have no KV cache.

The tokens of such a model attend in both directions, so a whole sequence is one row, and it ends with its step. A step
gets sequences in queue order, as many as the step budget allows and at least one. This scheduler replaces ``Scheduler``
for these models; there are no pages, no preemption, and no sequence runs between steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from parley.core.sequence import Sequence, SequenceStatus, Step, StepRow
from parley.core.step_budget import StepBudget
from parley.core.wait_queue import WaitQueue


class EncoderScheduler:
    """At most ``max_batch`` sequences in a step. ``on_admit`` is called when one gets its row; False rejects it."""

    preemptions = 0

    def __init__(self, step_budget: StepBudget, max_batch: int, on_admit: Callable[[Sequence], bool]):
        self.step_budget = step_budget
        self.max_batch = max_batch
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # the sequences of the current step
        self.waiting = WaitQueue()
        self._on_admit = on_admit

    def add_sequence(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.enqueue(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a sequence in any state."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove_waiting(sequence)
        self.running.pop(sequence, None)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Step:
        """Return the next step. It has rows whenever sequences wait."""
        step = Step([])
        self.step_budget.begin_step(0)
        while self.waiting and len(step.rows) < self.max_batch:
            sequence = self.waiting.head_sequence
            count = len(sequence)
            if step.rows and count > self.step_budget.tokens_left(0):
                break
            self.waiting.pop_head()
            sequence.status = SequenceStatus.FINISHED  # in case it is rejected
            if not self._on_admit(sequence):
                continue
            sequence.status = SequenceStatus.RUNNING
            self.running[sequence] = None
            self.step_budget.spend_tokens(0, count)
            self.waiting.record_service(sequence, count)
            sequence.computed = count
            step.rows.append(
                StepRow(sequence, 0, count, sample=False, make_vector=sequence.request.pooling is not None)
            )
        return step

    def abandon_step(self, step: Step) -> None:
        """Do nothing: a failed step leaves no state."""

    def reset_cache(self, *, running: bool) -> bool:
        """Return True: there is no prefix cache."""
        return True

    def check_invariants(
        self, held_tables: Collection[list[int]] = (), held_states: Collection[list[int]] = ()
    ) -> None:
        """Check that no sequence runs between steps and no page is held, for tests. Raises AssertionError."""
        assert not self.running and not any(held_tables) and not held_states
        assert all(sequence.status is SequenceStatus.WAITING for sequence in self.waiting)
