"""Wait queue: waiting sequences in the order of admission.

Priority comes first; lower numbers go first. There is no aging: while sequences of better priority arrive, others wait,
limited only by their request's timeout. Among equal priorities, preempted sequences come before all new ones, in the
order of their first admission. New sequences wait in one line per tenant, ordered by the tenant's own priority and then
by arrival. The next one is taken from the tenant that has received the least service. So a tenant's own priorities
reorder its line and delay no other tenant. With one tenant and no priorities that is the order of arrival.

**Service** is counted in tokens computed or sampled, so a generated token counts twice, a prompt token once, and a
prefix hit not at all (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", 2024). A
tenant gets no credit for time with an empty queue: when it returns, its count is raised to that of the last tenant that
was chosen (start-time fair queueing: Goyal et al., 1996).

This module knows nothing of pages, slots or steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf
from operator import attrgetter

from parley.core.sequence import Sequence

_by_admission_number = attrgetter("admission_number")


def _line_key(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a new sequence in its tenant's line."""
    return sequence.request.tenant_priority, sequence.arrival_number


class _PriorityLevel:
    """Waiting sequences of one priority. ``preempted``: by admission number. ``tenant_lines``: the new sequences of
    each tenant, by ``_line_key``; no line is empty."""

    def __init__(self) -> None:
        self.preempted: list[Sequence] = []
        self.tenant_lines: dict[str, list[Sequence]] = {}


class WaitQueue:
    """Waiting sequences. ``tenant_service``: the service of each tenant so far, in tokens. Entries are never removed:
    each tenant has an API key, so there are few."""

    def __init__(self) -> None:
        self.tenant_service: dict[str, int] = {}
        self._levels: dict[float, _PriorityLevel] = {}
        self._priorities: list[float] = []  # of levels, ascending; no level is empty
        self._size = 0
        self._virtual_time = 0  # service of the last tenant chosen, when it was chosen

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, by priority, each tenant's in order."""
        for priority in self._priorities:
            level = self._levels[priority]
            yield from level.preempted
            for line in level.tenant_lines.values():
                yield from line

    @property
    def head_priority(self) -> float:
        """Priority of the head; inf if the queue is empty."""
        return self._priorities[0] if self._priorities else inf

    @property
    def has_preempted(self) -> bool:
        """Whether a preempted sequence waits."""
        return any(level.preempted for level in self._levels.values())

    @property
    def head_sequence(self) -> Sequence:
        """The next sequence to admit. Raises IndexError if the queue is empty."""
        level = self._levels[self._priorities[0]]
        if level.preempted:
            return level.preempted[0]
        first_sequences = [line[0] for line in level.tenant_lines.values()]
        return (
            min(
                first_sequences,
                key=lambda sequence: (self.tenant_service[sequence.request.tenant], sequence.arrival_number),
            )
            if first_sequences[1:]
            else first_sequences[0]
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence: a new one to its tenant's line, a preempted one by its admission number."""
        level = self._levels.get(sequence.priority)
        if level is None:
            insort(self._priorities, sequence.priority)
            level = self._levels[sequence.priority] = _PriorityLevel()
        self._size += 1
        if sequence.admission_number >= 0:
            insort(level.preempted, sequence, key=_by_admission_number)
            return
        tenant = sequence.request.tenant
        if not any(tenant in level.tenant_lines for level in self._levels.values()):
            self.tenant_service[tenant] = max(self.tenant_service.get(tenant, 0), self._virtual_time)
        insort(level.tenant_lines.setdefault(tenant, []), sequence, key=_line_key)

    def pop_head(self) -> Sequence:
        """Remove and return the head."""
        sequence = self.head_sequence
        self.begin_turn(sequence)
        self.remove_waiting(sequence)
        return sequence

    def begin_turn(self, sequence: Sequence) -> None:
        """Record that a waiting sequence was chosen: no tenant has credit for the time before."""
        if sequence.admission_number < 0:
            self._virtual_time = max(self._virtual_time, self.tenant_service[sequence.request.tenant])

    def remove_waiting(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from any position."""
        priority, tenant = sequence.priority, sequence.request.tenant
        level = self._levels[priority]
        if sequence.admission_number >= 0:
            del level.preempted[bisect_left(level.preempted, sequence.admission_number, key=_by_admission_number)]
        else:
            line = level.tenant_lines[tenant]
            del line[bisect_left(line, _line_key(sequence), key=_line_key)]
            if not line:
                del level.tenant_lines[tenant]
        if not level.preempted and not level.tenant_lines:
            del self._levels[priority]
            self._priorities.remove(priority)
        self._size -= 1

    def record_service(self, sequence: Sequence, tokens: int) -> None:
        """Count ``tokens`` computed or sampled for the sequence as service of its tenant."""
        tenant = sequence.request.tenant
        self.tenant_service[tenant] = self.tenant_service.get(tenant, 0) + tokens
