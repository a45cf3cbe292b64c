"""How many instances should prefill and how many decode: by the work that there was for each, and without haste.

Work is counted in instances: 1.5 of prefill would keep one instance busy and another half of the time. Which split of
the instances leaves the busier kind least busy is the better one; it has to be clearly better, and to stay so, before a
role changes, and then one does. A flex instance is a part of each kind; its share moves sooner, in small steps, until
both kinds are as busy. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BETTER = 0.8  # of the present split's utilisation, at most, or else nothing is changed for it
BUSY = 0.3  # utilisation below which no split is worth a change
STEP = 5  # percent of an instance, by which a share moves
SLACK = 1.05  # times as busy as the other kind must one be after the step, or else there is none
MEMORY = 60.0  # seconds


class Work(NamedTuple):
    """Instances' worth of it."""

    prefill: float
    decode: float

    def utilisation(self, p: float, d: float) -> float:
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


class Balance:
    """Work as it was lately, and a wish that must last, ``period`` seconds. ``memory``: seconds in which a measurement
    loses two thirds of its weight."""

    def __init__(self, period: float, memory: float = MEMORY):
        self._period, self._memory = period, memory
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
            weight = min(1.0, (now - self._when) / self._memory)
            before = self._work
            self._work = Work(*(old + weight * (new - old) for old, new in zip(before, work, strict=True)))
        self._when = now

    def _lasting(self, now: float, step: int) -> int:
        """The step, if it has been wanted for the whole period; then that begins anew."""
        if step != self._step or not step:
            self._step, self._since = step, now
            return 0
        assert self._since is not None
        if now - self._since < self._period:
            return 0
        self._step, self._since = 0, None
        return step


class Ratio(Balance):
    """How many have which role."""

    def change(self, now: float, p: int, d: int) -> int:
        """What to do with so many of each: 1 to have one more prefill, -1 to have one more decode, 0 to wait."""
        return self._lasting(now, self._wanted(p, d))

    def _wanted(self, p: int, d: int) -> int:
        if p < 1 or d < 1 or p + d < 3:
            return 0
        best, present = split(p + d, self.work), self.work.utilisation(p, d)
        step = (best > p) - (best < p)
        if not step or present < BUSY:
            return 0
        return step if self.work.utilisation(p + step, d - step) <= BETTER * present else 0


class Shares(Balance):
    """What flex instances, which do both, have for prefill. A step that would make the other kind the busier one is
    not made, so of constant work there is no way back."""

    def change(self, now: float, shares: Sequence[int], p: float, d: float) -> tuple[int, int] | None:
        """Which of those with these ``shares``, in percent, is to have which one, if any another; ``p`` and ``d`` are
        how many instances there are for each kind, parts of flex ones among them.

        One moves at a time, who has the least of what is wanted. What is all of one kind stays so.
        """
        step = self._wanted(p, d)
        able = [
            (share * step, at) for at, share in enumerate(shares) if 0 < share < 100 and moved(share, step) != share
        ]
        if not self._lasting(now, step if able else 0):
            return None
        _, first = min(able)
        return first, moved(shares[first], step)

    def _wanted(self, p: float, d: float) -> int:
        if self.work.utilisation(p, d) < BUSY:
            return 0
        part = STEP / 100
        if p + part > 0 and d - part > 0 and self.work.prefill / (p + part) > SLACK * self.work.decode / (d - part):
            return STEP
        if d + part > 0 and p - part > 0 and self.work.decode / (d + part) > SLACK * self.work.prefill / (p - part):
            return -STEP
        return 0


def moved(share: int, step: int) -> int:
    """The share a step further, within what leaves both kinds something; it never goes the other way."""
    further = min(100 - STEP, max(STEP, share + step))
    return further if (further - share) * step > 0 else share
