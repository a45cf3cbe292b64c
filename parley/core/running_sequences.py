"""The running sequences: their order and their slots. Knows neither pages nor steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from parley.core.sequence import Sequence, SequenceStatus

_by_rank = attrgetter("rank")


class RunningSequences:
    """The running sequences by rank, each in one of ``max_slots`` slots (0 to ``max_slots - 1``).

    ``on_admit`` is called when a sequence has got a slot; False rejects it. ``on_release`` is called before a slot is
    taken away.
    """

    def __init__(self, max_slots: int, on_admit: Callable[[Sequence], bool], on_release: Callable[[Sequence], None]):
        self.by_rank: list[Sequence] = []
        self._max_slots = max_slots
        self._free_slots = list(reversed(range(max_slots)))
        self._next_admission_number = 0
        self._on_admit = on_admit
        self._on_release = on_release

    @property
    def has_free_slot(self) -> bool:
        """Whether another sequence can start."""
        return bool(self._free_slots)

    def start_sequence(self, sequence: Sequence) -> bool:
        """Run a sequence in a free slot. Return False, and mark it as finished, if it is rejected.

        A sequence gets its admission number, and with it its rank, when it starts for the first time.
        """
        sequence.status = SequenceStatus.FINISHED  # in case it is rejected
        sequence.slot = self._free_slots.pop()
        if not self._on_admit(sequence):
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
            return False
        sequence.status = SequenceStatus.RUNNING
        if sequence.admission_number < 0:
            sequence.admission_number = self._next_admission_number
            self._next_admission_number += sequence.admission_span
        insort(self.by_rank, sequence, key=_by_rank)
        return True

    def stop_sequence(self, sequence: Sequence) -> None:
        """Take the slot of a sequence. The caller frees its pages and sets its status."""
        del self.by_rank[bisect_left(self.by_rank, sequence.rank, key=_by_rank)]
        self._on_release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def set_priority(self, sequence: Sequence, priority: float) -> None:
        """Change the priority of a running sequence, and its position in the order."""
        del self.by_rank[bisect_left(self.by_rank, sequence.rank, key=_by_rank)]
        sequence.priority = priority
        insort(self.by_rank, sequence, key=_by_rank)

    def check_invariants(self) -> None:
        """Check the slots and the order, for tests. Raises AssertionError."""
        used_slots = [sequence.slot for sequence in self.by_rank]
        assert sorted(used_slots + self._free_slots) == list(range(self._max_slots)), "slots in use + free slots != all"
        ranks = [sequence.rank for sequence in self.by_rank]
        assert ranks == sorted(ranks), "sequences are not in order"
