"""Decides how many instances should prefill and how many decode, from the measured load, without oscillation.

Load is counted in instances: 1.5 of prefill would keep one instance busy and another half of the time. The better split
is the one whose busier role has the lowest utilization; it must be clearly better, for some time, before one instance
changes its role. A flex instance is part of both roles; its share changes sooner, in small steps, until the roles are
equally busy. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BETTER_BELOW = 0.8  # a split must reduce the present utilization to at most this part of it
MIN_UTILIZATION = 0.3  # utilization below which nothing is changed
SHARE_STEP = 5  # percent of an instance, per change of a share
SHARE_SLACK = 1.05  # the busier role must still be this many times as busy as the other after a step
LOAD_MEMORY = 60.0  # seconds


class RoleLoad(NamedTuple):
    """The load of the two roles, in instances."""

    prefill: float
    decode: float

    def busier_utilization(self, prefill_count: float, decode_count: float) -> float:
        """Return the utilization of the busier role for these numbers of instances."""
        prefill = self.prefill / prefill_count if prefill_count else float(self.prefill > 0)
        decode = self.decode / decode_count if decode_count else float(self.decode > 0)
        return max(prefill, decode)


def best_split(instances: int, load: RoleLoad) -> int:
    """Return the number of instances that should prefill: at least one, but not all; of equally good splits, the most
    even one."""

    def split_cost(prefill_count: int) -> tuple[float, int, int]:
        utilization = load.busier_utilization(prefill_count, instances - prefill_count)
        return round(utilization, 9), abs(2 * prefill_count - instances), prefill_count

    return min(range(1, instances), key=split_cost)


def fixed_split(instances: int, p_rate: int, d_rate: int) -> int:
    """Return how many of the instances should prefill, by a fixed ratio."""
    return max(1, min(instances - 1, round(instances * p_rate / (p_rate + d_rate))))


class RoleBalance:
    """The recent load, and a proposed change that must persist for ``period`` seconds.

    ``memory``: seconds until a measurement has lost two thirds of its weight. Before as many seconds have passed, all
    measurements weigh the same, because the first alone may be far off.
    """

    def __init__(self, period: float, memory: float = LOAD_MEMORY):
        self._period, self._memory = period, memory
        self._mean_load: RoleLoad | None = None
        self._first_at = self._observed_at = 0.0
        self._proposed_since: float | None = None  # time of the first proposal of the present step
        self._proposed_step = 0

    @property
    def mean_load(self) -> RoleLoad:
        """The smoothed load; 0 before any observation."""
        return self._mean_load or RoleLoad(0.0, 0.0)

    def observe_load(self, now: float, load: RoleLoad) -> None:
        """Record the present load."""
        if self._mean_load is None:
            self._mean_load, self._first_at = load, now
        elif now > self._observed_at:
            elapsed = now - self._observed_at
            weight = min(1.0, elapsed / min(self._memory, now - self._first_at + elapsed))
            earlier_load = self._mean_load
            self._mean_load = RoleLoad(
                *(old + weight * (new - old) for old, new in zip(earlier_load, load, strict=True))
            )
        self._observed_at = now

    def _persistent_step(self, now: float, step: int) -> int:
        """Return the step once it has been proposed for the whole period, which then restarts; 0 before that."""
        if step != self._proposed_step or not step:
            self._proposed_step, self._proposed_since = step, now
            return 0
        assert self._proposed_since is not None
        if now - self._proposed_since < self._period:
            return 0
        self._proposed_step, self._proposed_since = 0, None
        return step


class RoleRatio(RoleBalance):
    """Decides how many instances have each role."""

    def next_role_step(self, now: float, prefill_count: int, decode_count: int) -> int:
        """Return 1 to give one more instance to prefill, -1 to give one more to decode, 0 to change nothing."""
        return self._persistent_step(now, self._ratio_step(prefill_count, decode_count))

    def _ratio_step(self, prefill_count: int, decode_count: int) -> int:
        if prefill_count < 1 or decode_count < 1 or prefill_count + decode_count < 3:
            return 0
        best = best_split(prefill_count + decode_count, self.mean_load)
        step = (best > prefill_count) - (best < prefill_count)
        present = self.mean_load.busier_utilization(prefill_count, decode_count)
        if not step or present < MIN_UTILIZATION:
            return 0
        after = self.mean_load.busier_utilization(prefill_count + step, decode_count - step)
        return step if after <= BETTER_BELOW * present else 0


class FlexShares(RoleBalance):
    """Decides the prefill shares of flex instances, which have both roles.

    No step is taken that would make the other role the busier one, so a constant load causes no oscillation.
    """

    def next_share(
        self, now: float, shares: Sequence[int], prefill_count: float, decode_count: float
    ) -> tuple[int, int] | None:
        """Return the index of the flex instance to change and its new share; None to change nothing.

        ``shares``: prefill percentages of the flex instances; ``prefill_count``, ``decode_count``: instances per role,
        including the parts of flex ones. One share changes at a time: that of the instance with least of the busier
        role. Shares of 0 and 100 never change.
        """
        step = self._share_step(prefill_count, decode_count)
        movable = [
            (share * step, at)
            for at, share in enumerate(shares)
            if 0 < share < 100 and stepped_share(share, step) != share
        ]
        if not self._persistent_step(now, step if movable else 0):
            return None
        _, first = min(movable)
        return first, stepped_share(shares[first], step)

    def _share_step(self, prefill_count: float, decode_count: float) -> int:
        if self.mean_load.busier_utilization(prefill_count, decode_count) < MIN_UTILIZATION:
            return 0
        part = SHARE_STEP / 100
        if (
            prefill_count + part > 0
            and decode_count - part > 0
            and self.mean_load.prefill / (prefill_count + part)
            > SHARE_SLACK * self.mean_load.decode / (decode_count - part)
        ):
            return SHARE_STEP
        if (
            decode_count + part > 0
            and prefill_count - part > 0
            and self.mean_load.decode / (decode_count + part)
            > SHARE_SLACK * self.mean_load.prefill / (prefill_count - part)
        ):
            return -SHARE_STEP
        return 0


def stepped_share(share: int, step: int) -> int:
    """Return the share after a step, leaving at least SHARE_STEP for either role; never moved against the step."""
    further = min(100 - SHARE_STEP, max(SHARE_STEP, share + step))
    return further if (further - share) * step > 0 else share
