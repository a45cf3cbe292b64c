"""How many instances should prefill and how many decode: by the work that there was for each, and without haste.

Work is counted in instances: 1.5 of prefill would keep one instance busy and another half of the time. Which split of
the instances leaves the busier kind least busy is the better one; it has to be clearly better, and to stay so, before a
role changes, and then one does. Knows numbers only.
"""

from __future__ import annotations

from typing import NamedTuple

BETTER = 0.8  # of the present split's utilisation, at most, or else nothing is changed for it
BUSY = 0.3  # utilisation below which no split is worth a change
MEMORY = 60.0  # seconds in which a measurement loses two thirds of its weight


class Work(NamedTuple):
    """Instances' worth of it."""

    prefill: float
    decode: float

    def utilisation(self, p: int, d: int) -> float:
        """Of the busier kind, where there are so many of each."""
        return max(self.prefill / p if p else float(self.prefill > 0), self.decode / d if d else float(self.decode > 0))


def split(instances: int, work: Work) -> int:
    """How many of these should prefill, at least one and not all; of equal splits the one nearer to halves."""
    return min(
        range(1, instances),
        key=lambda p: (round(work.utilisation(p, instances - p), 9), abs(2 * p - instances), p),
    )


def shared(instances: int, p_rate: int, d_rate: int) -> int:
    """How many should prefill where the ratio is given."""
    return max(1, min(instances - 1, round(instances * p_rate / (p_rate + d_rate))))


class Ratio:
    """``period``: seconds for which a better split must have been wanted."""

    def __init__(self, period: float):
        self._period = period
        self._work: Work | None = None
        self._when = 0.0
        self._since: float | None = None  # when a change in this direction was first wanted
        self._step = 0

    @property
    def work(self) -> Work:
        return self._work or Work(0.0, 0.0)

    def observe(self, now: float, work: Work) -> None:
        """The work that there is at this moment."""
        if self._work is None:
            self._work = work
        else:
            weight = min(1.0, (now - self._when) / MEMORY)
            before = self._work
            self._work = Work(*(old + weight * (new - old) for old, new in zip(before, work, strict=True)))
        self._when = now

    def change(self, now: float, p: int, d: int) -> int:
        """What to do with so many of each: 1 to have one more prefill, -1 to have one more decode, 0 to wait."""
        step = self._wanted(p, d)
        if step != self._step or not step:
            self._step, self._since = step, now
            return 0
        assert self._since is not None
        if now - self._since < self._period:
            return 0
        self._step, self._since = 0, None
        return step

    def _wanted(self, p: int, d: int) -> int:
        if p < 1 or d < 1 or p + d < 3:
            return 0
        best, present = split(p + d, self.work), self.work.utilisation(p, d)
        step = (best > p) - (best < p)
        if not step or present < BUSY:
            return 0
        return step if self.work.utilisation(p + step, d - step) <= BETTER * present else 0
