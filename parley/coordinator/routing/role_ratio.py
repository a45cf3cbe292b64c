"""Decides how many instances should prefill and how many decode, from the measured load, without oscillation.

Load is counted in instances: 1.5 of prefill would keep one instance busy and another half of the time. The better split
is the one whose busier role has the lowest utilisation; it must be clearly better, for some time, before one instance
changes its role. A flex instance is part of both roles; its share changes sooner, in small steps, until the roles are
equally busy. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BETTER = 0.8  # a split must reduce the present utilisation to at most this part of it
BUSY = 0.3  # utilisation below which nothing is changed
STEP = 5  # percent of an instance, per change of a share
SLACK = 1.05  # the busier role must still be this many times as busy as the other after a step
MEMORY = 60.0  # seconds


class Work(NamedTuple):
    """The load of the two roles, in instances."""

    prefill: float
    decode: float

    def utilisation(self, p: float, d: float) -> float:
        """Return the utilisation of the busier role, with ``p`` and ``d`` instances."""
        return max(self.prefill / p if p else float(self.prefill > 0), self.decode / d if d else float(self.decode > 0))


def split(instances: int, work: Work) -> int:
    """Return how many of the instances should prefill: at least one, not all, and of equal splits the most even."""
    return min(
        range(1, instances),
        key=lambda p: (round(work.utilisation(p, instances - p), 9), abs(2 * p - instances), p),
    )


def shared(instances: int, p_rate: int, d_rate: int) -> int:
    """Return how many of the instances should prefill, by a fixed ratio."""
    return max(1, min(instances - 1, round(instances * p_rate / (p_rate + d_rate))))


class Balance:
    """The recent load, and a proposed change that must persist for ``period`` seconds.

    ``memory``: seconds until a measurement has lost two thirds of its weight.
    """

    def __init__(self, period: float, memory: float = MEMORY):
        self._period, self._memory = period, memory
        self._work: Work | None = None
        self._when = 0.0
        self._since: float | None = None  # time of the first proposal of the present step
        self._step = 0

    @property
    def work(self) -> Work:
        """The smoothed load; 0 before any observation."""
        return self._work or Work(0.0, 0.0)

    def observe(self, now: float, work: Work) -> None:
        """Record the present load."""
        if self._work is None:
            self._work = work
        else:
            weight = min(1.0, (now - self._when) / self._memory)
            before = self._work
            self._work = Work(*(old + weight * (new - old) for old, new in zip(before, work, strict=True)))
        self._when = now

    def _lasting(self, now: float, step: int) -> int:
        """Return the step once it has been proposed for the whole period, which then restarts; 0 before that."""
        if step != self._step or not step:
            self._step, self._since = step, now
            return 0
        assert self._since is not None
        if now - self._since < self._period:
            return 0
        self._step, self._since = 0, None
        return step


class Ratio(Balance):
    """Decides how many instances have each role."""

    def change(self, now: float, p: int, d: int) -> int:
        """Return 1 to give one more instance to prefill, -1 to give one more to decode, 0 to change nothing."""
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
    """Decides the prefill shares of flex instances, which have both roles.

    No step is taken that would make the other role the busier one, so a constant load causes no oscillation.
    """

    def change(self, now: float, shares: Sequence[int], p: float, d: float) -> tuple[int, int] | None:
        """Return the index of the flex instance to change and its new share; None to change nothing.

        ``shares``: prefill percentages of the flex instances; ``p``, ``d``: instances per role, including the parts of
        flex ones. One share changes at a time: that of the instance with least of the busier role. Shares of 0 and 100
        never change.
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
    """Return the share after a step, leaving at least SHARE_STEP for either role; never moved against the step."""
    further = min(100 - STEP, max(STEP, share + step))
    return further if (further - share) * step > 0 else share
