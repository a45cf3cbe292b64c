"""Who computes a request: given what it asks for and the instances there are, a pair to prefill and decode, or none.

Here are what all policies share and those that follow the documented schemes to the letter; ours is in ``predicted``.
They neither wait nor count: that is done by who asks them. Formulas are in ``load``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from parley.cluster.config import Options
from parley.cluster.instance import Instance
from parley.cluster.load import Demand, Side, decode_load, prefill_load
from parley.instance.prefix import Mark, Turns


@dataclass(frozen=True)
class Wanted:
    """What a request asks for. ``length``: of its prompt, in tokens; ``marks``: of its beginnings, shortest first;
    ``deadline``: seconds from now in which its first token is wanted; ``model``: by any name that instances tell, empty
    for whichever.

    ``avoid``: instances, by id, that failed it; ``attempt``: how often it was tried before; ``layout``: of those that
    computed what its client has got, empty for nobody, or where that is not told.
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
    """``first``: seconds to the first token as foreseen, None if there is nothing to foresee it by; ``wait``: of those,
    spent behind others."""

    p: Instance
    d: Instance
    first: float | None = None
    wait: float = 0.0


class Policy(Protocol):
    def pick(self, sight: Sight) -> Pair | None:
        """Among usable instances; None if none has room."""


class Sight:
    """The instances as one request finds them: what it asks of each and what of it is cached there, looked up once."""

    def __init__(self, wanted: Wanted, usable: Sequence[Instance], now: float):
        self.wanted, self.usable = wanted, usable
        self.now = now
        self._asked: dict[int, Demand] = {}

    def cached(self, instance: Instance) -> int:
        """Tokens of its prompt."""
        return self.wanted.length - self.asked(instance).tokens

    def asked(self, instance: Instance) -> Demand:
        """1 slot and ⌈length / block size⌉ blocks, and the tokens that are not cached."""
        asked = self._asked.get(instance.id)
        if asked is None:
            length = self.wanted.length
            cached = instance.cached(self.wanted.marks, self.now) if self.wanted.marks else 0
            blocks = -(-length // max(1, instance.block_size))
            asked = self._asked[instance.id] = Demand(1, blocks, length, max(0, length - cached))
        return asked


class Base:
    """What policies have in common: who comes into question."""

    def __init__(self, options: Options):
        self.options = options

    def room(self, instance: Instance, side: Side, sight: Sight) -> bool:
        """May the request go to this side of the instance, as far as limits are concerned?"""
        if instance.tasks >= self.options.single_node_max_requests:
            return False
        return self.options.select_type == 1 or side.room(sight.asked(instance), self.options.res_limit_rate)

    def decodes(self, sight: Sight) -> list[Instance]:
        """Those that could go on with what another prefilled."""
        return [
            each
            for each in sight.usable
            if each.role != "mixed" and each.decode.share > 0 and self.room(each, each.decode, sight)
        ]

    def prefills(self, sight: Sight, ds: Sequence[Instance]) -> list[Instance]:
        """Those that could prefill it and have somebody to go on: one of ``ds``, or themselves where they are mixed."""
        return [
            each
            for each in sight.usable
            if each.prefill.share > 0
            and self.room(each, each.prefill, sight)
            and (each.role == "mixed" or any(each.linked(d) for d in ds))
        ]


class LoadBalance(Base):
    """The least loaded P, then the least loaded D that it is linked with; of equals the lower id."""

    def pick(self, sight: Sight) -> Pair | None:
        values, coefficient = self.options.load_cost_values, self.options.load_cost_coefficient
        ds = self.decodes(sight)
        ps = self.prefills(sight, ds)
        if not ps:
            return None
        p = min(ps, key=lambda each: (prefill_load(each.prefill, sight.asked(each), values), each.id))
        d = min(followers(p, ds), key=lambda each: (decode_load(each.decode, sight.asked(each), coefficient), each.id))
        return Pair(p, d)


def followers(p: Instance, ds: Sequence[Instance]) -> list[Instance]:
    """Of ``ds``, those that can go on with what ``p`` prefilled. A mixed instance goes on itself."""
    return [p] if p.role == "mixed" else [d for d in ds if p.linked(d)]


class Turn(Base):
    """Each in its turn, P and D apart."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._p = self._d = -1  # whose turn it was, by id

    def pick(self, sight: Sight) -> Pair | None:
        ds = self.decodes(sight)
        ps = self.prefills(sight, ds)
        if not ps:
            return None
        p = _next(ps, self._p)
        d = _next(followers(p, ds), self._d)
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

    def pick(self, sight: Sight) -> Pair | None:
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
