"""The predictive policy: pick the P with the earliest first token, by prefix cache, queue and measured speed, then the
emptiest D.

A prompt with few tokens to compute stays on one D if that delays D's streams for less time than a handover takes. No
threshold is a constant: without measurements nothing is predicted, and every request is separated.
"""

from __future__ import annotations

from collections.abc import Sequence

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.load import prefill_load
from parley.coordinator.routing.policies import CandidatePolicy, InstancePair, RequestView, linked_decoders

HANDOVER_TRIAL = 32  # one of this number of short prompts is handed over anyway, so that handovers stay measured


class PredictedTtftPolicy(CandidatePolicy):
    """Picks instances by predicted time to first token."""

    def __init__(self, options: CoordinatorOptions):
        super().__init__(options)
        self._short_prompts = 0  # number of short prompts so far

    def pick_pair(self, view: RequestView) -> InstancePair | None:
        """Pick by prediction; None if there is no room."""
        mode = self.options.separate
        ds = self.decode_candidates(view)
        pair = self._separate_pair(view, ds)
        if pair is not None and pair.prefill_instance.role == "mixed":
            return pair
        whole_capable = [instance for instance in view.usable if instance.native and instance.role != "mixed"]
        if mode == "never":
            return self._single_instance(view, whole_capable) or pair
        if pair is None:
            return (
                self._single_instance(view, whole_capable)
                if view.request.earlier_attempts > 0 or self.options.fallback
                else None
            )
        if mode == "always":
            return pair
        if pair.prefill_instance.handover_paused(pair.decode_instance, view.now):
            return self._single_instance(view, whole_capable) or pair
        short_decoders = [d for d in ds if d.native and _stays_on_decode(view, d, pair)]
        self._short_prompts += bool(short_decoders)
        return (
            pair if self._short_prompts % HANDOVER_TRIAL == 0 else self._single_instance(view, short_decoders) or pair
        )

    def _separate_pair(self, view: RequestView, ds: Sequence[ClusterInstance]) -> InstancePair | None:
        """Return the P with the earliest first token, and the D with the most room."""
        best: tuple[float, float, float, int] | None = None
        for candidate in self.prefill_candidates(view, ds):
            first, wait = predict_ttft(view, candidate)
            if best is not None and (first or 0.0) > best[0]:
                continue
            full = resource_fullness(view, candidate) if candidate.role == "mixed" else 0.0
            key = (
                first or 0.0,
                full,
                prefill_load(candidate.prefill, view.demand_on(candidate), (1.0, 1.0)),
                candidate.id,
            )
            if best is None or key < best:
                best, p, prediction = key, candidate, (first, wait)
        if best is None:
            return None
        if p.role == "mixed":
            return InstancePair(p, p, *prediction)
        d = min(
            linked_decoders(p, ds),
            key=lambda instance: (
                p.handover_paused(instance, view.now),
                resource_fullness(view, instance),
                -view.cached_prompt_tokens(instance),
                instance.id,
            ),
        )
        return InstancePair(p, d, *prediction)

    def _single_instance(self, view: RequestView, instances: Sequence[ClusterInstance]) -> InstancePair | None:
        """Return one of these instances for the whole request; None if none has room."""
        pairs = [
            (resource_fullness(view, instance), InstancePair(instance, instance, *predict_ttft(view, instance)))
            for instance in instances
            if self.has_room_on(instance, instance.decode if instance.decode.instance_share else instance.prefill, view)
        ]
        if not pairs:
            return None
        return min(pairs, key=lambda pair: (pair[1].predicted_ttft or 0.0, pair[0], pair[1].prefill_instance.id))[1]


def _stays_on_decode(view: RequestView, d: ClusterInstance, pair: InstancePair) -> bool:
    """Whether prefilling the prompt on D costs less than a handover to it.

    On D it delays each stream there, and one more that may arrive; when separated it waits for P and is transferred.
    Unless both are measured, nothing counts as short.
    """
    time_model = d.prefill.time_model if d.prefill.time_model.seen else pair.prefill_instance.prefill.time_model
    prefill_seconds = time_model.predict_cost(view.demand_on(d).tokens)
    queue_seconds = time_model.predict_cost(view.demand_on(d).tokens + d.prefill.tokens)
    handover_seconds = pair.decode_instance.decode.time_model.predict_cost(view.demand_on(pair.decode_instance).tokens)
    if prefill_seconds is None or queue_seconds is None or handover_seconds is None:
        return False
    return (queue_seconds - prefill_seconds) + prefill_seconds * (
        1 + d.decode.tasks
    ) <= pair.queue_seconds + handover_seconds


def predict_ttft(view: RequestView, instance: ClusterInstance) -> tuple[float | None, float]:
    """Predict the seconds to the first token on an instance, and the part spent waiting; None without measurements.

    A new instance is judged by its reported speed, or else by the measurements of another one.
    """
    side, prompt_tokens = instance.prefill, max(1, view.demand_on(instance).tokens)
    time_model, rate = side.time_model, instance.prefill_rate
    if not time_model.seen and rate > 0:
        return (prompt_tokens + side.tokens) / rate, side.tokens / rate
    if not time_model.seen:
        time_model = next(
            (other.prefill.time_model for other in view.usable if other.prefill.time_model.seen), time_model
        )
    if not time_model.seen:
        return None, 0.0
    a, b = time_model.fitted_line()
    return a + b * (prompt_tokens + side.tokens), b * side.tokens


def predict_crowding(pair: InstancePair, slo: float) -> tuple[bool, float]:
    """Predict whether D's tokens would take longer than ``slo`` seconds each with this request, and when that may end.

    Counts the requests that will be on D when the request's prefill ends: part of the present ones have left by then,
    given the mean time that requests stay. The second value is the expected number of seconds until one of them ends.
    """
    side = pair.decode_instance.decode
    left_share = min(1.0, (pair.predicted_ttft or 0.0) / side.stay_seconds) if side.stay_seconds else 0.0
    remaining_tasks = side.tasks * (1.0 - left_share)
    token_seconds = side.token_model.predict_cost(remaining_tasks + 1)
    return token_seconds is not None and remaining_tasks >= 1 and token_seconds > slo, side.stay_seconds / max(
        1, side.tasks
    )


def resource_fullness(view: RequestView, instance: ClusterInstance) -> float:
    """Return the higher utilization of slots and blocks with the request on the instance: 0 is empty, 1 full.

    The coordinator's count or the instance's report is used, whichever is higher.
    """
    side = instance.decode if instance.decode.instance_share else instance.prefill
    demand, share = view.demand_on(instance), side.instance_share
    used_slots = instance.slots - instance.avail_slots if instance.avail_slots is not None else 0
    slots = max(side.slots, used_slots) + demand.slots
    blocks = max(side.blocks, instance.used_blocks) + demand.blocks
    return max(slots / max(1, instance.slots * share), blocks / max(1, instance.blocks * share))
