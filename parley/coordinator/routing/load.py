"""The resources that requests use on an instance, and the load formulas. Knows no requests.

A *side* is the capacity of an instance for one of two jobs: prefill or decode. A mixed instance has both in full, a
flex instance a share of itself for each; these are the two virtual instances of the documented scheme.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from parley.coordinator.routing.cost_model import CostModel


class ResourceDemand(NamedTuple):
    """The resources that one request needs: ``tokens`` is the part of ``length`` that must be computed."""

    slots: int
    blocks: int
    length: int
    tokens: int


class SideOwner(Protocol):
    """The attributes of an instance that its sides use."""

    role: str
    p_percentage: int
    slots: int
    blocks: int
    tasks: int
    prefill_rate: float

    @property
    def used_blocks(self) -> int:
        """Number of KV blocks in use."""


class JobSide:
    """One job of one instance: the sum of its current demands, and its measured speed."""

    def __init__(self, instance: SideOwner, job: str):
        self.instance = instance
        self.job = job  # "prefill" or "decode"
        self.slots = self.blocks = self.tokens = 0
        self.lengths: list[int] = []  # ascending
        # Prefill: seconds to a first token by tokens; decode: of a handover.
        self.time_model = CostModel(flat=job == "decode")
        self.token_seconds = 0.0  # decode: mean seconds per token
        self.token_model = CostModel(flat=True)  # decode: seconds per token by number of requests
        self.stay_seconds = 0.0  # decode: mean seconds that a request stays
        self._arrived_tokens = self._busy_since = 0.0  # tokens demanded since the last ``busy_share``

    @property
    def tasks(self) -> int:
        """Number of requests on this side."""
        return len(self.lengths)

    @property
    def instance_share(self) -> float:
        """The part of the instance that this side has, from 0 to 1."""
        role = self.instance.role
        if role == "mixed" or role == self.job:
            return 1.0
        if role != "flex":
            return 0.0
        part = self.instance.p_percentage / 100
        return part if self.job == "prefill" else 1.0 - part

    def busy_share(self, now: float) -> float:
        """Return the work that arrived since the last call, as a share of that time; above 1 it is too much.

        The time of a request is estimated from its tokens and the measured pace, or from the reported rate for a flex
        instance, whose measured pace is that of a part. Shares refer to the whole instance.
        """
        arrived_tokens, self._arrived_tokens = self._arrived_tokens, 0.0
        seconds, self._busy_since = now - self._busy_since, now
        rate = self.instance.prefill_rate if self.instance.role == "flex" else 0.0
        token_seconds = 1 / rate if rate else self.time_model.fitted_line()[1] * self.instance_share
        return arrived_tokens * token_seconds / seconds if seconds > 0 else 0.0

    def has_room(self, demand: ResourceDemand, rate: float) -> bool:
        """Whether the demand fits in addition to the current ones, with resources over-committed by ``rate``."""
        share_limit = self.instance_share * rate
        return (
            self.slots + demand.slots <= self.instance.slots * share_limit
            and self.blocks + demand.blocks <= self.instance.blocks * share_limit
        )

    def add_demand(self, demand: ResourceDemand, task: bool = True) -> HeldDemand:
        """Add a demand. ``task``: count it as a task; of a request that uses both sides here only one does."""
        self.slots += demand.slots
        self.blocks += demand.blocks
        self.tokens += demand.tokens
        self._arrived_tokens += demand.tokens
        insort(self.lengths, demand.length)
        self.instance.tasks += task
        return HeldDemand(self, demand, task)


class HeldDemand:
    """A demand added to a side, until it is released. Releasing it again has no effect."""

    __slots__ = ("_task", "demand", "side")

    def __init__(self, side: JobSide, demand: ResourceDemand, task: bool):
        self.side: JobSide | None = side
        self.demand = demand
        self._task = task

    def release_demand(self) -> None:
        """Subtract the demand from its side."""
        side, self.side = self.side, None
        if side is None:
            return
        side.slots -= self.demand.slots
        side.blocks -= self.demand.blocks
        side.tokens -= self.demand.tokens
        side.instance.tasks -= self._task
        del side.lengths[bisect_left(side.lengths, self.demand.length)]


def prefill_load(side: JobSide, demand: ResourceDemand, values: Sequence[float]) -> float:
    """Return P's load including the demand: slots and blocks not prefilled yet, and tokens, by two weights."""
    work = side.slots + demand.slots + side.blocks + demand.blocks
    return (values[0] * work + values[1] * (side.tokens + demand.tokens)) / max(side.instance_share, 1e-9)


def decode_load(side: JobSide, demand: ResourceDemand, coefficient: Sequence[float]) -> float:
    """Return D's load including the demand: a·tokenSum + m·maxSlots + r·blocks used + b·slots + c·blocks.

    ``coefficient`` is (a, per sequence, unit, n, k, m, r, b, c). maxSlots is the number of requests as long as the
    longest, plus one if the new request is the longest itself.
    """
    a, fixed, unit, cores, halved, m, r, b, c = coefficient
    longest = side.lengths[-1] if side.lengths else 0
    longest_count = len(side.lengths) - bisect_left(side.lengths, longest)
    if demand.length >= longest:
        longest_count += 1
    lengths = [*side.lengths, demand.length] if a else []
    return (
        a * token_sum(lengths, int(cores), int(halved), fixed * unit)
        + m * longest_count
        + r * side.instance.used_blocks
        + b * (side.slots + demand.slots)
        + c * (side.blocks + demand.blocks)
    ) / max(side.instance_share, 1e-9)


def token_sum(lengths: Sequence[int], cores: int, halved: int, fixed: float) -> float:
    """Estimate how long an attention kernel takes for sequences of these lengths, in tokens.

    The longest ``cores`` sequences are computed in parallel, then the next ones; a round takes as long as its longest.
    In the last round, where cores are idle, up to ``halved`` of the longest are split in two, as far as cores allow.
    ``fixed``: overhead per sequence, in tokens.
    """
    ordered = sorted(lengths, reverse=True)
    full_rounds_end = len(ordered) - len(ordered) % cores
    total = sum(ordered[at] + fixed for at in range(0, full_rounds_end, cores))
    tail = ordered[full_rounds_end:]
    if tail:
        split = min(halved, len(tail), cores - len(tail))
        total += (
            max([length / 2 for length in tail[:split]] + [float(length) for length in tail[split : split + 1]]) + fixed
        )
    return total
