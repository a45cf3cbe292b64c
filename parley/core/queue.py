"""Who is next: sequences that wait, in the order in which they are to be admitted.

Priority comes first, a lower number is sooner. Nothing ages: as long as better ones come, a bad one waits, and what
bounds that is its request's time-out. Of equal priority, those that ran before and had to leave go before all new ones,
in the order in which they were admitted then. The new ones stand in lines, one for each tenant; who came first is first
in its line, and the next one is from the line of the tenant that has had the least service. With one tenant that is the
order of arrival.

**Service** is counted in tokens that were computed or drawn, so a generated token counts twice, a prompt's once, and
one found in the cache not at all (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models",
2024). A tenant whose line was empty is not paid for the time: when it comes again its count is lifted to that of the
last tenant that was chosen (start-time fair queueing: Goyal et al., 1996).

The file knows nothing of pages, slots or steps.
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
    """Those of one priority. ``back``: who ran before, by turn. ``lines``: the others by tenant; none is empty."""

    def __init__(self) -> None:
        self.back: list[Sequence] = []
        self.lines: dict[str, OrderedDict[Sequence, None]] = {}


class Queue:
    """``service``: what each tenant has had, in tokens. Tenants are those who have keys, so they are few."""

    def __init__(self) -> None:
        self.service: dict[str, int] = {}
        self._levels: dict[float, _Level] = {}
        self._priorities: list[float] = []  # of levels, ascending; none of those is empty
        self._size = 0
        self._mark = 0  # the service that the last one chosen had had

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, of better priority first, those of one line in its order."""
        for priority in self._priorities:
            level = self._levels[priority]
            yield from level.back
            for line in level.lines.values():
                yield from line

    @property
    def priority(self) -> float:
        """That of the head, inf when nobody waits."""
        return self._priorities[0] if self._priorities else inf

    @property
    def returning(self) -> bool:
        """Does one wait that ran before?"""
        return any(level.back for level in self._levels.values())

    @property
    def head(self) -> Sequence:
        """Who is next. Raises IndexError when nobody waits."""
        level = self._levels[self._priorities[0]]
        if level.back:
            return level.back[0]
        heads = [next(iter(line)) for line in level.lines.values()]
        return min(heads, key=lambda each: (self.service[each.work.tenant], each.order)) if heads[1:] else heads[0]

    def add(self, sequence: Sequence) -> None:
        """Let it wait: at the end of its line, or, if it ran before, where its turn is."""
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
        """Take out the head."""
        sequence = self.head
        if sequence.turn < 0:
            self._mark = max(self._mark, self.service[sequence.work.tenant])
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits, wherever it stands."""
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
        """So many tokens were computed or drawn for it."""
        self.service[sequence.work.tenant] += tokens
