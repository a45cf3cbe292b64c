"""Scheduler for encoder models, which have no KV cache.

Such a model reads a text in both directions, so a sequence is one row, whole, and ends with its step. A step takes
sequences in queue order, as many as the step budget allows and at least one. Replaces ``Scheduler`` for these models;
there are no pages, no preemption, and no sequence runs between steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from parley.core.sequence import Row, Sequence, Status, Step
from parley.core.step_budget import Pace
from parley.core.wait_queue import Queue


class Whole:
    """At most ``max_batch`` sequences in a step. ``on_admit`` is called when one gets its row; False rejects it."""

    preemptions = 0

    def __init__(self, pace: Pace, most: int, admit: Callable[[Sequence], bool]):
        self.pace = pace
        self.most = most
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # in the current step
        self.waiting = Queue()
        self._admit = admit

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.running.pop(sequence, None)
        sequence.status = Status.FINISHED

    def schedule(self) -> Step:
        """Return the next step. It has rows whenever sequences wait."""
        step = Step([])
        self.pace.begin(0)
        while self.waiting and len(step.rows) < self.most:
            sequence = self.waiting.head
            count = len(sequence)
            if step.rows and count > self.pace.room(0):
                break
            self.waiting.pop()
            sequence.status = Status.FINISHED  # in case it is rejected
            if not self._admit(sequence):
                continue
            sequence.status = Status.RUNNING
            self.running[sequence] = None
            self.pace.take(0, count)
            self.waiting.serve(sequence, count)
            sequence.computed = count
            step.rows.append(Row(sequence, 0, count, sample=False, pool=sequence.work.pooling is not None))
        return step

    def abandon(self, step: Step) -> None:
        """Do nothing: a failed step leaves no state."""

    def reset(self, *, running: bool) -> bool:
        """Return True: there is no prefix cache."""
        return True

    def check(self, held: Collection[list[int]] = ()) -> None:
        """Check that no sequence runs between steps and no page is held, for tests. Raises AssertionError."""
        assert not self.running and not any(held)
        assert all(sequence.status is Status.WAITING for sequence in self.waiting)
