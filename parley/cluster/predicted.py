"""The policy that foresees: the first token soonest, by cached prefix, queue and measured speed; then the emptiest D.

A prompt of which little has to be computed stays on one D, if that holds its streams up for less than a hand-over
takes. Nothing is a constant here: without measurements nothing is foreseen, and every request is separated.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.cluster.config import Options
from parley.cluster.instance import Instance
from parley.cluster.load import prefill_load
from parley.cluster.policy import Base, Pair, Sight, followers

TRIAL = 32  # of so many short prompts one is handed over all the same, or what that takes would not be known any more


class Predicted(Base):
    def __init__(self, options: Options):
        super().__init__(options)
        self._short = 0  # prompts that were

    def pick(self, sight: Sight) -> Pair | None:
        mode = self.options.separate
        ds = self.decodes(sight)
        pair = self._pair(sight, ds)
        if pair is not None and pair.p.role == "mixed":
            return pair
        whole = [each for each in sight.usable if each.extended and each.role != "mixed"]
        if mode == "never":
            return self._alone(sight, whole) or pair
        if pair is None:
            return self._alone(sight, whole) if sight.wanted.attempt > 0 or self.options.fallback else None
        if mode == "always":
            return pair
        if pair.p.apart(pair.d, sight.now):
            return self._alone(sight, whole) or pair
        short = [d for d in ds if d.extended and _short(sight, d, pair)]
        self._short += bool(short)
        return pair if self._short % TRIAL == 0 else self._alone(sight, short) or pair

    def _pair(self, sight: Sight, ds: Sequence[Instance]) -> Pair | None:
        """Where the first token comes soonest, and who has the most room behind it."""
        best: tuple[float, float, float, int] | None = None
        for each in self.prefills(sight, ds):
            first, wait = foresee(sight, each)
            if best is not None and (first or 0.0) > best[0]:
                continue
            full = fullness(sight, each) if each.role == "mixed" else 0.0
            key = (first or 0.0, full, prefill_load(each.prefill, sight.asked(each), (1.0, 1.0)), each.id)
            if best is None or key < best:
                best, p, told = key, each, (first, wait)
        if best is None:
            return None
        if p.role == "mixed":
            return Pair(p, p, *told)
        d = min(
            followers(p, ds),
            key=lambda each: (p.apart(each, sight.now), fullness(sight, each), -sight.cached(each), each.id),
        )
        return Pair(p, d, *told)

    def _alone(self, sight: Sight, instances: Sequence[Instance]) -> Pair | None:
        """One of these for all of it."""
        pairs = [
            (fullness(sight, each), Pair(each, each, *foresee(sight, each)))
            for each in instances
            if self.room(each, each.decode if each.decode.share else each.prefill, sight)
        ]
        return min(pairs, key=lambda each: (each[1].first or 0.0, each[0], each[1].p.id))[1] if pairs else None


def _short(sight: Sight, d: Instance, pair: Pair) -> bool:
    """Does the prompt cost D less than handing it over would?

    On D it stands in the way of each stream there, and of one more that may come; where it is apart it waits for P and
    is moved. Without measurements of both nothing is called short.
    """
    trend = d.prefill.pace if d.prefill.pace.seen else pair.p.prefill.pace
    computed = trend.predict(sight.asked(d).tokens)
    queue = trend.predict(sight.asked(d).tokens + d.prefill.tokens)
    moved = pair.d.decode.pace.predict(sight.asked(pair.d).tokens)
    if computed is None or queue is None or moved is None:
        return False
    return (queue - computed) + computed * (1 + d.decode.tasks) <= pair.wait + moved


def foresee(sight: Sight, instance: Instance) -> tuple[float | None, float]:
    """Seconds to the first token there, and how many of them behind others; None if nobody measured anything yet.

    One that is new is judged by what it says of its speed, or else as if it were like one of the others.
    """
    side, own = instance.prefill, max(1, sight.asked(instance).tokens)
    trend, rate = side.pace, instance.prefill_rate
    if not trend.seen and rate > 0:
        return (own + side.tokens) / rate, side.tokens / rate
    if not trend.seen:
        trend = next((each.prefill.pace for each in sight.usable if each.prefill.pace.seen), trend)
    if not trend.seen:
        return None, 0.0
    a, b = trend.fit()
    return a + b * (own + side.tokens), b * side.tokens


def crowded(pair: Pair, slo: float) -> tuple[bool, float]:
    """Would D's tokens take longer than ``slo`` seconds each with this request, by the requests that will be there when
    its prefill ends? And in how many seconds one of them has probably ended.

    Of those that are there now a part has left by then, as long as requests stay on average.
    """
    side = pair.d.decode
    left = min(1.0, (pair.first or 0.0) / side.stay) if side.stay else 0.0
    there = side.tasks * (1.0 - left)
    each = side.rhythm.predict(there + 1)
    return each is not None and there >= 1 and each > slo, side.stay / max(1, side.tasks)


def fullness(sight: Sight, instance: Instance) -> float:
    """The fuller of slots and blocks with the request there, 0 when empty, 1 when full; by what is known here and what
    it says itself, whichever is more."""
    side = instance.decode if instance.decode.share else instance.prefill
    asked, share = sight.asked(instance), side.share
    used = instance.slots - instance.avail_slots if instance.avail_slots is not None else 0
    slots = max(side.slots, used) + asked.slots
    blocks = max(side.blocks, instance.used) + asked.blocks
    return max(slots / max(1, instance.slots * share), blocks / max(1, instance.blocks * share))
