"""The predictive policy: pick the P with the earliest first token, by prefix cache, queue and measured speed, then the
emptiest D.

A prompt with few tokens to compute stays on one D if that delays D's streams for less time than a handover takes. No
threshold is a constant: without measurements nothing is predicted, and every request is separated.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.coordinator.config import Options
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.load import prefill_load
from parley.coordinator.routing.policies import Base, Pair, Sight, followers

TRIAL = 32  # one of this number of short prompts is handed over anyway, so that handovers stay measured


class Predicted(Base):
    """Picks instances by predicted time to first token."""

    def __init__(self, options: Options):
        super().__init__(options)
        self._short = 0  # number of short prompts so far

    def pick(self, sight: Sight) -> Pair | None:
        """Pick by prediction; None if there is no room."""
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
        """Return the P with the earliest first token, and the D with the most room."""
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
        """Return one of these instances for the whole request; None if none has room."""
        pairs = [
            (fullness(sight, each), Pair(each, each, *foresee(sight, each)))
            for each in instances
            if self.room(each, each.decode if each.decode.share else each.prefill, sight)
        ]
        return min(pairs, key=lambda each: (each[1].first or 0.0, each[0], each[1].p.id))[1] if pairs else None


def _short(sight: Sight, d: Instance, pair: Pair) -> bool:
    """Whether prefilling the prompt on D costs less than a handover to it.

    On D it delays each stream there, and one more that may arrive; when separated it waits for P and is transferred.
    Unless both are measured, nothing counts as short.
    """
    trend = d.prefill.pace if d.prefill.pace.seen else pair.p.prefill.pace
    computed = trend.predict(sight.asked(d).tokens)
    queue = trend.predict(sight.asked(d).tokens + d.prefill.tokens)
    moved = pair.d.decode.pace.predict(sight.asked(pair.d).tokens)
    if computed is None or queue is None or moved is None:
        return False
    return (queue - computed) + computed * (1 + d.decode.tasks) <= pair.wait + moved


def foresee(sight: Sight, instance: Instance) -> tuple[float | None, float]:
    """Predict the seconds to the first token on an instance, and the part spent waiting; None without measurements.

    A new instance is judged by its reported speed, or else by the measurements of another one.
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
    """Predict whether D's tokens would take longer than ``slo`` seconds each with this request, and when that may end.

    Counts the requests that will be on D when the request's prefill ends: part of the present ones have left by then,
    given the mean time that requests stay. The second value is the expected number of seconds until one of them ends.
    """
    side = pair.d.decode
    left = min(1.0, (pair.first or 0.0) / side.stay) if side.stay else 0.0
    there = side.tasks * (1.0 - left)
    each = side.rhythm.predict(there + 1)
    return each is not None and there >= 1 and each > slo, side.stay / max(1, side.tasks)


def fullness(sight: Sight, instance: Instance) -> float:
    """Return the higher utilisation of slots and blocks with the request on the instance: 0 is empty, 1 full.

    The coordinator's count or the instance's report is used, whichever is higher.
    """
    side = instance.decode if instance.decode.share else instance.prefill
    asked, share = sight.asked(instance), side.share
    used = instance.slots - instance.avail_slots if instance.avail_slots is not None else 0
    slots = max(side.slots, used) + asked.slots
    blocks = max(side.blocks, instance.used) + asked.blocks
    return max(slots / max(1, instance.slots * share), blocks / max(1, instance.blocks * share))
