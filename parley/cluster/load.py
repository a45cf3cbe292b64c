"""What requests ask of an instance while they are there, and how that becomes one number. Knows no request.

A *side* is what an instance has for one of the two jobs: prefill or decode. A mixed instance has both in full, a flex
instance a share of itself for each; that makes it the two virtual instances of the documented scheme.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from parley.cluster.trend import Trend


class Demand(NamedTuple):
    """Of one request: ``tokens`` are those that have to be computed, ``length`` those that it has."""

    slots: int
    blocks: int
    length: int
    tokens: int


class Owner(Protocol):
    """What sides ask of the instance that they are of."""

    role: str
    p_percentage: int
    slots: int
    blocks: int
    tasks: int
    prefill_rate: float

    @property
    def used(self) -> int: ...


class Side:
    """One job of one instance: the sum of demands that it has now, and how fast it was."""

    def __init__(self, instance: Owner, job: str):
        self.instance = instance
        self.job = job  # prefill or decode
        self.slots = self.blocks = self.tokens = 0
        self.lengths: list[int] = []  # ascending
        self.pace = Trend(flat=job == "decode")  # to a first token over tokens ahead of it; decode: of a hand-over
        self.cadence = 0.0  # decode: seconds of a token
        self.rhythm = Trend(flat=True)  # decode: the same over the requests that are here
        self.stay = 0.0  # decode: seconds that a request is here
        self._asked = self._since = 0.0  # tokens that came since then

    @property
    def tasks(self) -> int:
        """Requests that are on this side."""
        return len(self.lengths)

    @property
    def share(self) -> float:
        """Which part of the instance this side has, 0 to 1."""
        role = self.instance.role
        if role == "mixed" or role == self.job:
            return 1.0
        if role != "flex":
            return 0.0
        part = self.instance.p_percentage / 100
        return part if self.job == "prefill" else 1.0 - part

    def busy(self, now: float) -> float:
        """Work that came since this was asked last, as a share of that time: above 1 it is more than can be done.

        What a request takes is judged by its tokens and the measured pace, a flex instance's by the rate that it tells:
        its pace is that of a part of it. All shares are of the whole instance.
        """
        asked, self._asked = self._asked, 0.0
        seconds, self._since = now - self._since, now
        rate = self.instance.prefill_rate if self.instance.role == "flex" else 0.0
        each = 1 / rate if rate else self.pace.fit()[1] * self.share
        return asked * each / seconds if seconds > 0 else 0.0

    def room(self, demand: Demand, rate: float) -> bool:
        """Would the demand fit besides what is here, with resources over-committed by ``rate``?"""
        most = self.share * rate
        return (
            self.slots + demand.slots <= self.instance.slots * most
            and self.blocks + demand.blocks <= self.instance.blocks * most
        )

    def charge(self, demand: Demand, task: bool = True) -> Charge:
        """Take a demand. ``task``: it counts as one; of a request that has both sides here only one does."""
        self.slots += demand.slots
        self.blocks += demand.blocks
        self.tokens += demand.tokens
        self._asked += demand.tokens
        insort(self.lengths, demand.length)
        self.instance.tasks += task
        return Charge(self, demand, task)


class Charge:
    """A demand that a side has taken, until it is released: once, however often that is asked."""

    __slots__ = ("_task", "demand", "side")

    def __init__(self, side: Side, demand: Demand, task: bool):
        self.side: Side | None = side
        self.demand = demand
        self._task = task

    def release(self) -> None:
        side, self.side = self.side, None
        if side is None:
            return
        side.slots -= self.demand.slots
        side.blocks -= self.demand.blocks
        side.tokens -= self.demand.tokens
        side.instance.tasks -= self._task
        del side.lengths[bisect_left(side.lengths, self.demand.length)]


def prefill_load(side: Side, demand: Demand, values: Sequence[float]) -> float:
    """P's load with the demand: slots and blocks of what is not prefilled yet, and tokens, by two weights."""
    work = side.slots + demand.slots + side.blocks + demand.blocks
    return (values[0] * work + values[1] * (side.tokens + demand.tokens)) / max(side.share, 1e-9)


def decode_load(side: Side, demand: Demand, coefficient: Sequence[float]) -> float:
    """D's load with the demand: a·tokenSum + m·maxSlots + r·blocks used + b·slots + c·blocks.

    ``coefficient`` is (a, per sequence, unit, n, k, m, r, b, c). maxSlots counts the requests as long as the longest,
    which is one more if the new one is that itself.
    """
    a, fixed, unit, cores, halved, m, r, b, c = coefficient
    longest = side.lengths[-1] if side.lengths else 0
    most = len(side.lengths) - bisect_left(side.lengths, longest)
    if demand.length >= longest:
        most += 1
    lengths = [*side.lengths, demand.length] if a else []
    return (
        a * token_sum(lengths, int(cores), int(halved), fixed * unit)
        + m * most
        + r * side.instance.used
        + b * (side.slots + demand.slots)
        + c * (side.blocks + demand.blocks)
    ) / max(side.share, 1e-9)


def token_sum(lengths: Sequence[int], cores: int, halved: int, fixed: float) -> float:
    """How long an attention kernel takes for sequences of these lengths, in tokens.

    The longest ``cores`` are computed side by side, then the next; a round takes what its longest does. In the last
    round, where cores are idle, up to ``halved`` of the longest are split in two, as far as there are cores for it.
    ``fixed``: what a sequence takes beside its tokens.
    """
    ordered = sorted(lengths, reverse=True)
    whole = len(ordered) - len(ordered) % cores
    total = sum(ordered[at] + fixed for at in range(0, whole, cores))
    tail = ordered[whole:]
    if tail:
        split = min(halved, len(tail), cores - len(tail))
        total += (
            max([length / 2 for length in tail[:split]] + [float(length) for length in tail[split : split + 1]]) + fixed
        )
    return total
