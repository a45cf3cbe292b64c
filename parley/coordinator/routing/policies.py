"""Scheduling policies: pick the instances that prefill and decode a request, from its requirements and their state.

This module has the parts that all policies share, and the policies that follow the documented schemes exactly; parley's
own policy is in ``predicted_ttft``. Policies neither queue nor count, which is left to the scheduler. The load formulas
are in ``load``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.routing.implied_model import ModelRequirement
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.load import JobSide, ResourceDemand, decode_load, prefill_load
from parley.disagg.wire.prompt_hash import ConversationHashes, PrefixMark


class SchedulingRequest(msgspec.Struct, frozen=True):
    """The scheduling requirements of a request.

    * ``prompt_tokens``: the (estimated) length of its prompt.
    * ``prefix_marks``: hashes of the prompt's prefixes, shortest first.
    * ``deadline``: seconds from now until the first token is due.
    * ``model``: any name of it that instances report; empty for any model.
    * ``failed_instances``: ids of instances that failed it.
    * ``earlier_attempts``: number of attempts before this one.
    * ``layout``: KV layout of the instances that computed the part the client has, empty if there is no such part or
      the layout is not reported.
    * ``tenant``: the id of its owner, empty where instances have no API keys.
    * ``conversation``: hashes of its messages, if it has any.
    * ``requirement``: set if it names no model.
    """

    prompt_tokens: int
    prefix_marks: Sequence[PrefixMark] = ()
    deadline: float | None = None
    model: str = ""
    conversation: ConversationHashes | None = None
    failed_instances: frozenset[int] = frozenset()
    earlier_attempts: int = 0
    layout: str = ""
    tenant: str = ""
    requirement: ModelRequirement | None = None


class InstancePair(NamedTuple):
    """The instances for prefill and decode, which may be one.

    ``predicted_ttft``: predicted seconds to the first token, None without measurements; ``queue_seconds``: the part of
    them spent waiting for other requests.
    """

    prefill_instance: ClusterInstance
    decode_instance: ClusterInstance
    predicted_ttft: float | None = None
    queue_seconds: float = 0.0


class SchedulingPolicy(Protocol):
    """Picks instances for requests."""

    def pick_pair(self, view: RequestView) -> InstancePair | None:
        """Pick among the usable instances; None if none has room."""


class RequestView:
    """The instances as one request sees them; its demand and cache hits on each instance are computed once."""

    def __init__(self, request: SchedulingRequest, usable: Sequence[ClusterInstance], now: float):
        self.request, self.usable = request, usable
        self.now = now
        self._demands: dict[int, ResourceDemand] = {}

    def cached_prompt_tokens(self, instance: ClusterInstance) -> int:
        """Return the number of prompt tokens cached on the instance."""
        return self.request.prompt_tokens - self.demand_on(instance).tokens

    def demand_on(self, instance: ClusterInstance) -> ResourceDemand:
        """Return the demand: 1 slot, ⌈length / block size⌉ blocks, and the tokens that are not cached."""
        demand = self._demands.get(instance.id)
        if demand is None:
            length = self.request.prompt_tokens
            cached = instance.cached_tokens(self.request.prefix_marks, self.now) if self.request.prefix_marks else 0
            blocks = -(-length // max(1, instance.block_size))
            demand = self._demands[instance.id] = ResourceDemand(1, blocks, length, max(0, length - cached))
        return demand


class CandidatePolicy:
    """Selects the candidate instances, in the way common to all policies."""

    def __init__(self, options: CoordinatorOptions):
        self.options = options

    def has_room_on(self, instance: ClusterInstance, side: JobSide, view: RequestView) -> bool:
        """Whether the limits allow the request on this side of the instance."""
        if instance.tasks >= self.options.single_node_max_requests:
            return False
        return self.options.select_type == 1 or side.has_room(view.demand_on(instance), self.options.res_limit_rate)

    def decode_candidates(self, view: RequestView) -> list[ClusterInstance]:
        """Return the instances that can decode after another one prefilled."""
        return [
            instance
            for instance in view.usable
            if instance.role != "mixed"
            and instance.decode.instance_share > 0
            and self.has_room_on(instance, instance.decode, view)
        ]

    def prefill_candidates(self, view: RequestView, ds: Sequence[ClusterInstance]) -> list[ClusterInstance]:
        """Return the instances that can prefill and have a decoder: one of ``ds``, or themselves if mixed."""
        return [
            instance
            for instance in view.usable
            if instance.prefill.instance_share > 0
            and self.has_room_on(instance, instance.prefill, view)
            and (instance.role == "mixed" or any(instance.is_linked(d) for d in ds))
        ]


class LoadBalancePolicy(CandidatePolicy):
    """Picks the least loaded P, then the least loaded D linked with it; the lower id wins ties."""

    def pick_pair(self, view: RequestView) -> InstancePair | None:
        """Pick by load; None if there is no room."""
        values, coefficient = self.options.load_cost_values, self.options.load_cost_coefficient
        ds = self.decode_candidates(view)
        ps = self.prefill_candidates(view, ds)
        if not ps:
            return None
        p = min(
            ps, key=lambda instance: (prefill_load(instance.prefill, view.demand_on(instance), values), instance.id)
        )
        d = min(
            linked_decoders(p, ds),
            key=lambda instance: (decode_load(instance.decode, view.demand_on(instance), coefficient), instance.id),
        )
        return InstancePair(p, d)


def linked_decoders(p: ClusterInstance, ds: Sequence[ClusterInstance]) -> list[ClusterInstance]:
    """Return the instances of ``ds`` that can decode after ``p``. A mixed instance decodes itself."""
    return [p] if p.role == "mixed" else [d for d in ds if p.is_linked(d)]


class RoundRobinPolicy(CandidatePolicy):
    """Round-robin, separately for P and D."""

    def __init__(self, options: CoordinatorOptions):
        super().__init__(options)
        self._p = self._d = -1  # ids of the last picks

    def pick_pair(self, view: RequestView) -> InstancePair | None:
        """Pick the next instances; None if there is no room."""
        ds = self.decode_candidates(view)
        ps = self.prefill_candidates(view, ds)
        if not ps:
            return None
        p = _next_by_id(ps, self._p)
        d = _next_by_id(linked_decoders(p, ds), self._d)
        self._p, self._d = p.id, d.id
        return InstancePair(p, d)


def _next_by_id(instances: Iterable[ClusterInstance], last: int) -> ClusterInstance:
    """Return the instance with the next higher id after ``last``, wrapping around."""
    return min(instances, key=lambda instance: (instance.id <= last, instance.id))


class CacheAffinityPolicy(CandidatePolicy):
    """Picks the mixed instance that answered the previous turn of the conversation, or else round-robin."""

    def __init__(self, options: CoordinatorOptions):
        super().__init__(options)
        self._round_robin = RoundRobinPolicy(options)
        self._conversations: OrderedDict[int, int] = OrderedDict()  # history -> instance

    def pick_pair(self, view: RequestView) -> InstancePair | None:
        """Pick by conversation; None if there is no room."""
        mixed = RequestView(view.request, [instance for instance in view.usable if instance.role == "mixed"], view.now)
        turns = view.request.conversation
        if turns is None:
            return self._round_robin.pick_pair(mixed)
        pair: InstancePair | None = None
        if turns.message_count > 2 and turns.earlier_hash in self._conversations:
            instance_id = self._conversations[turns.earlier_hash]
            previous = next((instance for instance in mixed.usable if instance.id == instance_id), None)
            if (
                previous is not None
                and self._has_free_resources(previous)
                and self.has_room_on(previous, previous.decode, mixed)
            ):
                del self._conversations[turns.earlier_hash]
                pair = InstancePair(previous, previous)
        pair = pair or self._round_robin.pick_pair(mixed)
        if pair is not None:
            self._conversations[turns.full_hash] = pair.prefill_instance.id
            self._conversations.move_to_end(turns.full_hash)
            while len(self._conversations) > self.options.cache_size:
                self._conversations.popitem(last=False)
        return pair

    def _has_free_resources(self, instance: ClusterInstance) -> bool:
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
