"""Scheduling policies: pick the instances that prefill and decode a request, from its requirements and their state.

This module has the parts that all policies share, and the policies that follow the documented schemes exactly; parley's
own policy is in ``predicted_ttft``. Policies neither queue nor count, which is left to the scheduler. The load formulas
are in ``load``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parley.coordinator.config import Options
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.load import Demand, Side, decode_load, prefill_load
from parley.disagg.wire.prompt_hash import Mark, Turns


@dataclass(frozen=True)
class Wanted:
    """The scheduling requirements of a request.

    ``length``: of its prompt, in tokens; ``marks``: hashes of the prompt's prefixes, shortest first; ``deadline``:
    seconds from now until the first token is due; ``model``: by any name that instances report, empty for any model.

    ``avoid``: ids of instances that failed it; ``attempt``: number of earlier attempts; ``layout``: KV layout of the
    instances that computed the part the client has, empty if there is no such part or the layout is not reported.
    """

    length: int
    marks: Sequence[Mark] = ()
    deadline: float | None = None
    model: str = ""
    turns: Turns | None = None
    avoid: frozenset[int] = frozenset()
    attempt: int = 0
    layout: str = ""


class Pair(NamedTuple):
    """The instances for prefill and decode.

    ``predicted_ttft``: predicted seconds to the first token, None without measurements; ``queue_seconds``: the part of
    them spent waiting for other requests.
    """

    p: Instance
    d: Instance
    first: float | None = None
    wait: float = 0.0


class Policy(Protocol):
    """Picks instances for requests."""

    def pick(self, sight: Sight) -> Pair | None:
        """Pick among the usable instances; None if none has room."""


class Sight:
    """The instances as one request sees them; its demand and cache hits on each instance are computed once."""

    def __init__(self, wanted: Wanted, usable: Sequence[Instance], now: float):
        self.wanted, self.usable = wanted, usable
        self.now = now
        self._asked: dict[int, Demand] = {}

    def cached(self, instance: Instance) -> int:
        """Return the number of prompt tokens cached on the instance."""
        return self.wanted.length - self.asked(instance).tokens

    def asked(self, instance: Instance) -> Demand:
        """Return the demand: 1 slot, ⌈length / block size⌉ blocks, and the tokens that are not cached."""
        asked = self._asked.get(instance.id)
        if asked is None:
            length = self.wanted.length
            cached = instance.cached(self.wanted.marks, self.now) if self.wanted.marks else 0
            blocks = -(-length // max(1, instance.block_size))
            asked = self._asked[instance.id] = Demand(1, blocks, length, max(0, length - cached))
        return asked


class Base:
    """Selects the candidate instances, in the way common to all policies."""

    def __init__(self, options: Options):
        self.options = options

    def room(self, instance: Instance, side: Side, sight: Sight) -> bool:
        """Whether the limits allow the request on this side of the instance."""
        if instance.tasks >= self.options.single_node_max_requests:
            return False
        return self.options.select_type == 1 or side.room(sight.asked(instance), self.options.res_limit_rate)

    def decodes(self, sight: Sight) -> list[Instance]:
        """Return the instances that can decode after another one prefilled."""
        return [
            each
            for each in sight.usable
            if each.role != "mixed" and each.decode.share > 0 and self.room(each, each.decode, sight)
        ]

    def prefills(self, sight: Sight, ds: Sequence[Instance]) -> list[Instance]:
        """Return the instances that can prefill and have a decoder: one of ``ds``, or themselves if mixed."""
        return [
            each
            for each in sight.usable
            if each.prefill.share > 0
            and self.room(each, each.prefill, sight)
            and (each.role == "mixed" or any(each.linked(d) for d in ds))
        ]


class LoadBalance(Base):
    """Picks the least loaded P, then the least loaded D linked with it; the lower id wins ties."""

    def pick(self, sight: Sight) -> Pair | None:
        """Pick by load; None if there is no room."""
        values, coefficient = self.options.load_cost_values, self.options.load_cost_coefficient
        ds = self.decodes(sight)
        ps = self.prefills(sight, ds)
        if not ps:
            return None
        p = min(ps, key=lambda each: (prefill_load(each.prefill, sight.asked(each), values), each.id))
        d = min(followers(p, ds), key=lambda each: (decode_load(each.decode, sight.asked(each), coefficient), each.id))
        return Pair(p, d)


def followers(p: Instance, ds: Sequence[Instance]) -> list[Instance]:
    """Return the instances of ``ds`` that can decode after ``p``. A mixed instance decodes itself."""
    return [p] if p.role == "mixed" else [d for d in ds if p.linked(d)]


class Turn(Base):
    """Round-robin, separately for P and D."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._p = self._d = -1  # ids of the last picks

    def pick(self, sight: Sight) -> Pair | None:
        """Pick the next instances; None if there is no room."""
        ds = self.decodes(sight)
        ps = self.prefills(sight, ds)
        if not ps:
            return None
        p = _next(ps, self._p)
        d = _next(followers(p, ds), self._d)
        self._p, self._d = p.id, d.id
        return Pair(p, d)


def _next(instances: Iterable[Instance], last: int) -> Instance:
    """Return the instance with the next higher id after ``last``, wrapping around."""
    return min(instances, key=lambda each: (each.id <= last, each.id))


class CacheAffinity(Base):
    """Picks the mixed instance that answered the previous turn of the conversation, or else round-robin."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._turn = Turn(options)
        self._held: OrderedDict[int, int] = OrderedDict()  # history -> instance

    def pick(self, sight: Sight) -> Pair | None:
        """Pick by conversation; None if there is no room."""
        mixed = Sight(sight.wanted, [each for each in sight.usable if each.role == "mixed"], sight.now)
        turns = sight.wanted.turns
        if turns is None:
            return self._turn.pick(mixed)
        pair: Pair | None = None
        if turns.count > 2 and turns.before in self._held:
            id = self._held[turns.before]
            found = next((each for each in mixed.usable if each.id == id), None)
            if found is not None and self._free(found) and self.room(found, found.decode, mixed):
                del self._held[turns.before]
                pair = Pair(found, found)
        pair = pair or self._turn.pick(mixed)
        if pair is not None:
            self._held[turns.whole] = pair.p.id
            self._held.move_to_end(turns.whole)
            while len(self._held) > self.options.cache_size:
                self._held.popitem(last=False)
        return pair

    def _free(self, instance: Instance) -> bool:
        side = instance.decode
        slots = instance.slots - side.slots
        blocks = instance.blocks - side.blocks
        if instance.avail_slots is not None:
            slots = min(slots, instance.avail_slots)
        if instance.avail_blocks is not None:
            blocks = min(blocks, instance.avail_blocks)
        return (
            slots > self.options.slots_thresh * instance.slots and blocks > self.options.block_thresh * instance.blocks
        )
