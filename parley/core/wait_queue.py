"""Wait queue: waiting sequences in the order of admission.

Priority comes first; a lower number is sooner. There is no aging: as long as better ones arrive, a low priority waits,
bounded only by its request's timeout. Among equal priorities, preempted sequences come before all new ones, in the
order of their first admission. New ones stand in one queue per tenant, first come first served, and the next one is
taken from the tenant that has received the least service. With one tenant that is the order of arrival.

**Service** is counted in tokens computed or sampled, so a generated token counts twice, a prompt token once, and a
prefix hit not at all (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", 2024). A
tenant gets no credit for time with an empty queue: when it returns, its count is raised to that of the last tenant that
was chosen (start-time fair queueing: Goyal et al., 1996).

This module knows nothing of pages, slots or steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from math import inf
from operator import attrgetter

from parley.core.sequence import Sequence

_turn = attrgetter("turn")


class _Level:
    """Waiting sequences of one priority. ``preempted``: by admission number. ``tenant_lines``: new ones by tenant;
    no line is empty."""

    def __init__(self) -> None:
        self.back: list[Sequence] = []
        self.lines: dict[str, OrderedDict[Sequence, None]] = {}


class Queue:
    """Waiting sequences. ``tenant_service``: tokens received so far by each tenant. Tenants have API keys, so they are
    few."""

    def __init__(self) -> None:
        self.service: dict[str, int] = {}
        self._levels: dict[float, _Level] = {}
        self._priorities: list[float] = []  # of levels, ascending; no level is empty
        self._size = 0
        self._mark = 0  # service of the last tenant chosen, when it was chosen

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all waiting sequences, by priority, each tenant's in order."""
        for priority in self._priorities:
            level = self._levels[priority]
            yield from level.back
            for line in level.lines.values():
                yield from line

    @property
    def priority(self) -> float:
        """Priority of the head; inf if the queue is empty."""
        return self._priorities[0] if self._priorities else inf

    @property
    def returning(self) -> bool:
        """Whether a preempted sequence waits."""
        return any(level.back for level in self._levels.values())

    @property
    def head(self) -> Sequence:
        """The next sequence to admit. Raises IndexError if the queue is empty."""
        level = self._levels[self._priorities[0]]
        if level.back:
            return level.back[0]
        heads = [next(iter(line)) for line in level.lines.values()]
        return min(heads, key=lambda each: (self.service[each.work.tenant], each.order)) if heads[1:] else heads[0]

    def add(self, sequence: Sequence) -> None:
        """Add a sequence: a new one at the end of its tenant's line, a preempted one by its admission number."""
        level = self._levels.get(sequence.priority)
        if level is None:
            insort(self._priorities, sequence.priority)
            level = self._levels[sequence.priority] = _Level()
        self._size += 1
        if sequence.turn >= 0:
            insort(level.back, sequence, key=_turn)
            return
        tenant = sequence.work.tenant
        if not any(tenant in each.lines for each in self._levels.values()):
            self.service[tenant] = max(self.service.get(tenant, 0), self._mark)
        level.lines.setdefault(tenant, OrderedDict())[sequence] = None

    def pop(self) -> Sequence:
        """Remove and return the head."""
        sequence = self.head
        if sequence.turn < 0:
            self._mark = max(self._mark, self.service[sequence.work.tenant])
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from any position."""
        priority, tenant = sequence.priority, sequence.work.tenant
        level = self._levels[priority]
        if sequence.turn >= 0:
            del level.back[bisect_left(level.back, sequence.turn, key=_turn)]
        else:
            del level.lines[tenant][sequence]
            if not level.lines[tenant]:
                del level.lines[tenant]
        if not level.back and not level.lines:
            del self._levels[priority]
            self._priorities.remove(priority)
        self._size -= 1

    def serve(self, sequence: Sequence, tokens: int) -> None:
        """Count ``tokens`` computed or sampled for the sequence as service of its tenant."""
        self.service[sequence.work.tenant] += tokens
