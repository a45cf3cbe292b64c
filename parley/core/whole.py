"""Which sequences are computed in the next step, where a model keeps nothing between steps: encoders.

Such a model reads a text in both directions, so a sequence is one row, whole, and ends with the step that has it.
In the order of the queue, as many as the pace has room for, and always at least one. What the scheduler does for models
with pages, this does here; there are no pages, no preemption, and nobody runs between steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from parley.core.pace import Pace
from parley.core.queue import Queue
from parley.core.sequence import Row, Sequence, Status, Step


class Whole:
    """At most ``most`` sequences in a step. ``admit`` is called when one gets its row; False refuses it."""

    preemptions = 0

    def __init__(self, pace: Pace, most: int, admit: Callable[[Sequence], bool]):
        self.pace = pace
        self.most = most
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # those of the step at hand
        self.waiting = Queue()
        self._admit = admit

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.running.pop(sequence, None)
        sequence.status = Status.FINISHED

    def schedule(self) -> Step:
        """The next step. It has rows whenever there are sequences."""
        step = Step([])
        self.pace.begin(0)
        while self.waiting and len(step.rows) < self.most:
            sequence = self.waiting.head
            count = len(sequence)
            if step.rows and count > self.pace.room(0):
                break
            self.waiting.pop()
            sequence.status = Status.FINISHED  # if it is refused
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
        """Nothing of a failed step remains."""

    def reset(self, *, running: bool) -> bool:
        """There are no cached prefixes."""
        return True

    def check(self, held: Collection[list[int]] = ()) -> None:
        """For tests: nobody runs between steps, and nobody holds pages. Raises AssertionError."""
        assert not self.running and not any(held)
        assert all(sequence.status is Status.WAITING for sequence in self.waiting)
