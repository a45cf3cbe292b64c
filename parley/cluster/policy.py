"""Who computes a request: given what it asks for and the instances there are, a prefill and a decode side, or none.

``LoadBalance`` and ``CacheAffinity`` follow the documented schemes to the letter; ``Predicted`` is where the first
token is foreseen soonest. They neither wait nor count: that is done by who asks them. Formulas: ``load``, ``pace``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parley.cluster.config import Options
from parley.cluster.load import Demand, Side, decode_load, prefill_load
from parley.cluster.prefix import Mark, Turns
from parley.cluster.table import Instance


@dataclass(frozen=True)
class Wanted:
    """What a request asks for. ``length``: of its prompt, in tokens; ``marks``: of its beginnings, shortest first;
    ``deadline``: seconds from now in which its first token is wanted; ``model``: by any name that instances tell, empty
    for whichever.

    ``avoid``: instances, by id, that failed it; ``attempt``: how often it was tried before.
    """

    length: int
    marks: Sequence[Mark] = ()
    deadline: float | None = None
    model: str = ""
    turns: Turns | None = None
    avoid: frozenset[int] = frozenset()
    attempt: int = 0


class Pair(NamedTuple):
    """``first``: seconds to the first token as foreseen, None if there is nothing to foresee it by; ``wait``: of those,
    spent behind others."""

    p: Instance
    d: Instance
    first: float | None = None
    wait: float = 0.0


class Policy(Protocol):
    def pick(self, wanted: Wanted, usable: Sequence[Instance], now: float) -> Pair | None:
        """Among usable instances; None if none has room."""


def demand(wanted: Wanted, instance: Instance, cached: int = 0) -> Demand:
    """1 slot and ⌈length / block size⌉ blocks."""
    blocks = math.ceil(wanted.length / max(1, instance.block_size))
    return Demand(1, blocks, wanted.length, max(0, wanted.length - cached))


class Base:
    def __init__(self, options: Options):
        self.options = options

    def room(self, side: Side, wanted: Wanted) -> bool:
        """May the request go there, as far as limits are concerned?"""
        if side.instance.tasks >= self.options.single_node_max_requests:
            return False
        return self.options.select_type == 1 or side.room(demand(wanted, side.instance), self.options.res_limit_rate)

    def prefills(self, wanted: Wanted, usable: Sequence[Instance]) -> list[Side]:
        """Sides that could prefill it and have somebody to go on, mixed instances among them."""
        return [
            each.prefill
            for each in usable
            if each.prefill.share > 0 and self.room(each.prefill, wanted) and self.decodes(wanted, each, usable)
        ]

    def decodes(self, wanted: Wanted, p: Instance, usable: Sequence[Instance]) -> list[Side]:
        """Sides that could go on with what ``p`` prefilled. A mixed instance goes on itself."""
        others = [p] if p.role == "mixed" else [each for each in usable if each.role != "mixed"]
        return [
            each.decode
            for each in others
            if each.decode.share > 0 and p.linked(each) and self.room(each.decode, wanted)
        ]


class LoadBalance(Base):
    """The least loaded P, then the least loaded D that it is linked with; of equals the lower id."""

    def pick(self, wanted: Wanted, usable: Sequence[Instance], now: float) -> Pair | None:
        values, coefficient = self.options.load_cost_values, self.options.load_cost_coefficient
        ps = self.prefills(wanted, usable)
        if not ps:
            return None
        p = min(ps, key=lambda side: (prefill_load(side, demand(wanted, side.instance), values), side.instance.id))
        d = min(
            self.decodes(wanted, p.instance, usable),
            key=lambda side: (decode_load(side, demand(wanted, side.instance), coefficient), side.instance.id),
        )
        return Pair(p.instance, d.instance)


class Turn(Base):
    """Each in its turn, P and D apart."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._p = self._d = -1  # whose turn it was, by id

    def pick(self, wanted: Wanted, usable: Sequence[Instance], now: float) -> Pair | None:
        ps = [side.instance for side in self.prefills(wanted, usable)]
        if not ps:
            return None
        p = _next(ps, self._p)
        d = _next([side.instance for side in self.decodes(wanted, p, usable)], self._d)
        self._p, self._d = p.id, d.id
        return Pair(p, d)


def _next(instances: Iterable[Instance], last: int) -> Instance:
    """The one behind the last in the order of ids, in a circle."""
    return min(instances, key=lambda each: (each.id <= last, each.id))


class CacheAffinity(Base):
    """Of mixed instances, the one that answered a conversation's last turn, else each in its turn."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._turn = Turn(options)
        self._held: OrderedDict[int, int] = OrderedDict()  # history -> instance

    def pick(self, wanted: Wanted, usable: Sequence[Instance], now: float) -> Pair | None:
        mixed = [each for each in usable if each.role == "mixed"]
        turns = wanted.turns
        if turns is None:
            return self._turn.pick(wanted, mixed, now)
        pair: Pair | None = None
        if turns.count > 2 and turns.before in self._held:
            id = self._held[turns.before]
            found = next((each for each in mixed if each.id == id), None)
            if found is not None and self._free(found) and self.room(found.decode, wanted):
                del self._held[turns.before]
                pair = Pair(found, found)
        pair = pair or self._turn.pick(wanted, mixed, now)
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


class Predicted(Base):
    """Where the first token is foreseen soonest, by cached prefix, queue and measured speed; then the emptiest D.

    A prompt of which little has to be computed stays on one D, if that holds its streams up for less than a hand-over
    takes.
    """

    def pick(self, wanted: Wanted, usable: Sequence[Instance], now: float) -> Pair | None:
        ps = self.prefills(wanted, usable)
        weighed = [self._weigh(side, wanted, usable, now) for side in ps]
        pair = min(weighed, key=lambda each: each[0])[1] if weighed else None
        mode = self.options.separate
        if pair is not None and pair.p.role == "mixed":
            return pair
        whole = [each for each in usable if each.extended and each.role != "mixed"]
        if mode == "never":
            return self._soonest(whole, wanted, usable, now) or pair
        if pair is None:
            alone = wanted.attempt > 0 or self.options.fallback
            return self._soonest(whole, wanted, usable, now) if alone else None
        if mode == "auto":
            ds = [each for each in whole if each.decode.share > 0 and self.room(each.decode, wanted)]
            short = [each for each in ds if self._short(each, pair, wanted, now)]
            return self._soonest(short, wanted, usable, now) or pair
        return pair

    def _weigh(
        self, side: Side, wanted: Wanted, usable: Sequence[Instance], now: float
    ) -> tuple[tuple[float, float, float, int], Pair]:
        first, wait = foresee(side, wanted, now, usable)
        p = side.instance
        d = min(
            (each.instance for each in self.decodes(wanted, p, usable)),
            key=lambda each: (fullness(each, wanted), -each.cached(wanted.marks, now), each.id),
        )
        guess = prefill_load(side, demand(wanted, p, p.cached(wanted.marks, now)), (1.0, 1.0))
        return (first or 0.0, fullness(d, wanted) if p is d else 0.0, guess, p.id), Pair(p, d, first, wait)

    def _soonest(
        self, instances: Sequence[Instance], wanted: Wanted, usable: Sequence[Instance], now: float
    ) -> Pair | None:
        """One instance for all of it."""
        pairs = [
            (fullness(each, wanted), Pair(each, each, *foresee(each.prefill, wanted, now, usable)))
            for each in instances
            if self.room(each.decode if each.decode.share else each.prefill, wanted)
        ]
        if not pairs:
            return None
        return min(pairs, key=lambda pair: (pair[1].first or 0.0, pair[0], pair[1].p.id))[1]

    def _short(self, d: Instance, pair: Pair, wanted: Wanted, now: float) -> bool:
        """Does the prompt cost D less than handing it over would?

        On D it stands in the way of each stream there, and of one more that may come; where it is apart it waits for P
        and is moved. Without measurements of both nothing is called short.
        """
        cached = d.cached(wanted.marks, now)
        line = d.prefill.pace if d.prefill.pace.seen else pair.p.prefill.pace
        computed = line.predict(wanted.length - cached)
        moved = pair.d.decode.pace.predict(wanted.length - pair.d.cached(wanted.marks, now))
        if computed is None or moved is None:
            return False
        queue = line.predict(wanted.length - cached + d.prefill.tokens)
        assert queue is not None
        return (queue - computed) + computed * (1 + d.decode.tasks) <= pair.wait + moved


def foresee(side: Side, wanted: Wanted, now: float, usable: Sequence[Instance]) -> tuple[float | None, float]:
    """Seconds to the first token there, and how many of them behind others; None if nobody measured anything yet.

    One that is new is judged by what it says of its speed, or else as if it were like one of the others.
    """
    own = max(1, wanted.length - side.instance.cached(wanted.marks, now))
    line, rate = side.pace, side.instance.prefill_rate
    if not line.seen and rate > 0:
        return (own + side.tokens) / rate, side.tokens / rate
    if not line.seen:
        line = next((each.prefill.pace for each in usable if each.prefill.pace.seen), line)
    alone, both = line.predict(own), line.predict(own + side.tokens)
    return (None, 0.0) if alone is None or both is None else (both, both - alone)


def fullness(instance: Instance, wanted: Wanted) -> float:
    """The fuller of slots and blocks with the request there, 0 when empty, 1 when full; by what is known here and what
    it says itself, whichever is more."""
    side = instance.decode if instance.decode.share else instance.prefill
    asked, share = demand(wanted, instance), side.share
    used = instance.slots - instance.avail_slots if instance.avail_slots is not None else 0
    slots = max(side.slots, used) + asked.slots
    blocks = max(side.blocks, instance.used) + asked.blocks
    return max(slots / max(1, instance.slots * share), blocks / max(1, instance.blocks * share))


def policy(options: Options) -> Policy:
    """The one that the configuration names."""
    if options.algorithm_type == "cache_affinity":
        return CacheAffinity(options)
    if options.scheduler_type == "default_scheduler":
        return Turn(options)
    return LoadBalance(options) if options.algorithm_type == "load_balance" else Predicted(options)
