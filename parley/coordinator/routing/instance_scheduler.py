"""The instance scheduler: queueing, ordering, refusal and accounting of requests.

The resources that a request holds on its instances are always released exactly once: those of prefill at its first
token, all others at its end. A policy picks the instances; HTTP is left to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from parley.coordinator import refusals
from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.routing.cost_model import moving_average
from parley.coordinator.routing.counters import AttemptEnd, RequestCounters
from parley.coordinator.routing.implied_model import ModelRequirement
from parley.coordinator.routing.instance import ClusterInstance, least_loaded
from parley.coordinator.routing.instance_table import InstanceEvent, InstanceTable
from parley.coordinator.routing.policies import (
    CacheAffinityPolicy,
    InstancePair,
    LoadBalancePolicy,
    RequestView,
    RoundRobinPolicy,
    SchedulingPolicy,
    SchedulingRequest,
)
from parley.coordinator.routing.predicted_ttft import PredictedTtftPolicy, predict_crowding
from parley.coordinator.routing.request_queue import RequestQueue

log = logging.getLogger("parley.cluster")


class RequestRefused(Exception):
    """A request is refused: HTTP status, documented text and, if useful, the seconds before a retry."""

    def __init__(self, status: int, text: str, retry_after: float | None = None):
        super().__init__(text)
        self.status, self.text = status, text
        self.retry_after = None if retry_after is None else max(1, math.ceil(retry_after))


class Placement:
    """The instances of one attempt at a request, and the resources it holds there. One instance may do both parts.

    The caller reports its progress: ``report_first_token``, ``report_tokens``, ``close_placement``. Each may be called
    at any time and repeatedly. As a context manager it closes itself.
    """

    __slots__ = (
        "_decode_charge",
        "_failed",
        "_first_token_at",
        "_last_token_at",
        "_placed_at",
        "_prefill_charge",
        "_prefill_tokens",
        "_probed",
        "_scheduler",
        "_second_token_at",
        "decode_instance",
        "ok",
        "prefill_instance",
        "prompt_tokens",
        "separate",
        "tenant",
        "tokens",
    )

    def __init__(self, scheduler: InstanceScheduler, pair: InstancePair, view: RequestView):
        request, now = view.request, view.now
        self.prefill_instance, self.decode_instance = pair.prefill_instance, pair.decode_instance
        self.separate = pair.prefill_instance is not pair.decode_instance
        self.prompt_tokens = request.prompt_tokens
        self.tenant = request.tenant
        self.tokens = 0
        self.ok: bool | None = None  # None until the attempt has ended
        scheduler.open_requests += 1
        scheduler.counters.count_placement(self.separate)
        scheduler.queue.start_service(self.tenant, request.prompt_tokens)
        self._scheduler = scheduler
        prefill_demand = view.demand_on(self.prefill_instance)
        # the tokens that the instance computes before the first token of this request
        self._prefill_tokens = self.prefill_instance.prefill.tokens + prefill_demand.tokens
        self._prefill_charge = self.prefill_instance.prefill.add_demand(prefill_demand, self.separate)
        self._decode_charge = self.decode_instance.decode.add_demand(view.demand_on(self.decode_instance))
        self._failed = False  # one of its instances failed the request
        instances = (self.prefill_instance, self.decode_instance)
        self._probed = [instance for instance in instances if instance.breaker.begin_probe()]
        # by the table's clock; 0: not yet
        self._placed_at, self._first_token_at, self._second_token_at, self._last_token_at = now, 0.0, 0.0, 0.0
        self.prefill_instance.note_prompt(request.prefix_marks, now)
        if self.separate:
            self.decode_instance.note_prompt(request.prefix_marks, now)

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close_placement(kind is None)

    def report_first_token(self) -> None:
        """Report that the prefill instance has answered with the first token."""
        if self._first_token_at or self.ok is not None:
            return
        now = self._scheduler.table.clock()
        self._first_token_at = self._last_token_at = now
        self.tokens += 1
        self._prefill_charge.release_demand()
        if self.separate:
            self.prefill_instance.breaker.close_breaker()
        self.prefill_instance.prefill.time_model.add_observation(self._prefill_tokens, now - self._placed_at)
        self._scheduler.counters.record_ttft(now - self._placed_at)
        self._scheduler.queue.accept_tenant(self.tenant)
        self._scheduler.wake_queue()

    def report_failure(self, instance: ClusterInstance, reason: str) -> None:
        """Report that the attempt failed because of one of its instances."""
        self._failed = True
        pause = instance.breaker.record_failure(self._scheduler.table.clock())
        if pause:
            log.warning(
                "Instance %d at %s fails requests (%s). Others are preferred for %g s.",
                instance.id,
                instance.url,
                refusals.plain_sentence(reason).rstrip("."),
                pause,
            )

    def report_timeout(self, reason: str) -> None:
        """Report that the instance that had the request at this moment took too long."""
        self.report_failure(self.decode_instance if self._first_token_at else self.prefill_instance, reason)

    def report_handover_refused(self) -> None:
        """Report that the decode instance refused to take the request over."""
        self.prefill_instance.record_refusal(self.decode_instance, self._scheduler.table.clock())

    def report_tokens(self, count: int = 1, last_at: float | None = None) -> None:
        """Report ``count`` further tokens. ``last_at``: when the last of them came, by the table's clock; None: now."""
        if not self._second_token_at:
            self._record_decode_start()
        self._last_token_at = self._scheduler.table.clock() if last_at is None else last_at
        self.tokens += count

    def _record_decode_start(self) -> None:
        """Record the first token of the decode instance, the second of the request."""
        self.report_first_token()
        self._second_token_at = self._scheduler.table.clock()
        if self.separate:
            side = self.decode_instance.decode
            gap = self._second_token_at - self._first_token_at
            self.prefill_instance.handover_refusals.pop(self.decode_instance.id, None)
            side.time_model.add_observation(self._decode_charge.demand.tokens, max(0.0, gap - side.token_seconds))
            self._scheduler.counters.record_transfer(gap)

    def close_placement(self, ok: bool = True, *, cancelled: bool = False) -> None:
        """End the attempt, successfully or not, and release all it holds. ``cancelled``: the client has left."""
        if self.ok is not None:
            return
        self.ok = ok
        if ok and not self._failed:
            self.decode_instance.breaker.close_breaker()
        for instance in self._probed:
            instance.breaker.end_probe()
        decode_tasks = self.decode_instance.decode.tasks
        self._scheduler.open_requests -= 1
        self._prefill_charge.release_demand()
        self._decode_charge.release_demand()
        token_seconds = None
        if self.tokens > 2 and self._last_token_at > self._second_token_at:
            token_seconds = (self._last_token_at - self._second_token_at) / (self.tokens - 2)
            side = self.decode_instance.decode
            side.token_seconds = moving_average(side.token_seconds, token_seconds)
            side.token_model.add_observation(decode_tasks, token_seconds)
            side.stay_seconds = moving_average(side.stay_seconds, self._last_token_at - self._placed_at)
        ttft = self._first_token_at - self._placed_at if self._first_token_at else None
        outcome: AttemptEnd = "ok" if ok else "cancelled" if cancelled else "failed"
        self._scheduler.counters.record_end(outcome, ttft, token_seconds, self.prompt_tokens, self.tokens)
        self._scheduler.queue.record_service(self.tenant, self.tokens)
        self._scheduler.wake_queue()


class EndingPlacement(Placement):
    """The instance that renders the end of a request which its client has stopped. It computes nothing, so nothing is
    held there, and nothing is learned about its speed."""

    __slots__ = ()

    def __init__(self, scheduler: InstanceScheduler, instance: ClusterInstance):
        self.prefill_instance = self.decode_instance = instance
        self.separate, self.ok, self._scheduler, self._first_token_at = False, None, scheduler, 0.0

    def report_first_token(self) -> None:
        """Do nothing: no token is computed."""

    def report_tokens(self, count: int = 1, last_at: float | None = None) -> None:
        """Do nothing, as well."""

    def close_placement(self, ok: bool = True, *, cancelled: bool = False) -> None:
        """Do nothing: nothing is held."""


def create_policy(options: CoordinatorOptions) -> SchedulingPolicy:
    """Return the policy that the configuration names."""
    if options.algorithm_type == "cache_affinity":
        return CacheAffinityPolicy(options)
    if options.scheduler_type == "default_scheduler":
        return RoundRobinPolicy(options)
    return LoadBalancePolicy(options) if options.algorithm_type == "load_balance" else PredictedTtftPolicy(options)


class InstanceScheduler:
    """The scheduler of one cluster: places requests on instances, and queues those that find no room.

    ``check_unusable`` repeats the health check of the instances that failed their last one, and returns those that
    answered.
    """

    def __init__(
        self,
        table: InstanceTable,
        counters: RequestCounters | None = None,
        check_unusable: Callable[[], Awaitable[Collection[ClusterInstance]]] | None = None,
    ):
        self.table = table
        self._check_unusable = check_unusable
        self.counters = counters or RequestCounters(self.options.slo_ttft, self.options.slo_tpot)
        self._policy = create_policy(self.options)
        self.queue: RequestQueue[Placement] = RequestQueue(
            self.options.max_schedule_count, self.options.reordering_type
        )
        self.open_requests = 0  # requests that are placed on instances and have not ended
        self._wake_scheduled = False
        table.watchers.append(self._instance_changed)

    @property
    def options(self) -> CoordinatorOptions:
        """The coordinator's options, which a reload replaces."""
        return self.table.options

    @property
    def queued_requests(self) -> int:
        """Number of queued requests."""
        return len(self.queue)

    @property
    def goodput_share(self) -> float:
        """The share of finished requests, refused ones included, that met their objectives."""
        over = self.counters.requests - self.open_requests - self.queued_requests
        return min(1.0, self.counters.good / over) if over > 0 else 0.0

    async def place_request(self, request: SchedulingRequest) -> Placement:
        """Place a request on instances as soon as there is room. Raises RequestRefused.

        A request cancelled while it waits holds nothing. The caller must end the placement that is returned.
        """
        self.counters.count_request(request.earlier_attempts)
        usable = self.table.usable_instances()
        candidates = self._instances_with_model(request, usable)
        if not self._has_untried_instances(request, candidates):
            usable = await self.find_usable(
                lambda usable: self._has_untried_instances(request, self._instances_with_model(request, usable)),
                lambda usable: self._can_serve_with(self._instances_with_model(request, usable)),
            )
            candidates = self._instances_with_model(request, usable)
            if not request.earlier_attempts and not self._can_serve_with(candidates):
                raise self._refuse_request(503, refusals.TEXTS.cluster_not_ready, 1.0)
        placement = None if self.queue else self._try_placement(request, usable, candidates)
        if placement is not None:
            return placement
        if self.queue.is_full_for(request.tenant):
            raise self._refuse_request(429, refusals.TEXTS.too_many_requests, 1.0)
        return await self._wait_for_room(request)

    def place_ending(self, request: SchedulingRequest) -> Placement:
        """Place a request that its client has stopped on an instance that renders its end, whether or not it has room.
        Raises RequestRefused."""
        candidates = self._instances_with_model(request, self.table.usable_instances())
        native = [instance for instance in candidates if instance.native]
        preferred = [instance for instance in native if instance.id not in request.failed_instances] or native
        if not preferred:
            raise self._refuse_request(503, refusals.TEXTS.cluster_not_ready)
        return EndingPlacement(self, least_loaded(preferred)[0])

    async def _wait_for_room(self, request: SchedulingRequest) -> Placement:
        queued = self.queue.add_request(request)
        self.wake_queue()
        timeout = self.options.recovery_timeout if request.earlier_attempts else self.options.schedule_timeout
        by_deadline = request.deadline is not None and request.deadline < timeout
        try:
            async with asyncio.timeout(request.deadline if by_deadline else timeout):
                try:
                    return await queued.future
                except asyncio.CancelledError:
                    if queued.future.done() and not queued.future.cancelled() and queued.future.exception() is None:
                        queued.future.result().close_placement(False)
                    raise
        except TimeoutError:
            if by_deadline and not request.earlier_attempts:
                raise self._refuse_request(429, refusals.TEXTS.too_many_requests, 1.0) from None
            if by_deadline:
                raise self._refuse_request(408, refusals.TEXTS.inference_timeout) from None
            raise self._refuse_request(408, refusals.TEXTS.schedule_timeout, 1.0) from None
        finally:
            self.queue.remove_request(queued)

    async def find_usable(
        self, suffices: Callable[[list[ClusterInstance]], bool], *must_serve: Callable[[list[ClusterInstance]], bool]
    ) -> list[ClusterInstance]:
        """Return the usable instances. If they do not suffice, first ask those that may have become usable since their
        last health check.

        An instance that answers may be set aside because of a fault. Its fault ends only if that makes ``suffices``, or
        one of the weaker conditions ``must_serve``, true: faults of instances that are not needed remain.
        """
        usable = self.table.usable_instances()
        if suffices(usable) or self._check_unusable is None:
            return usable
        answering = await self._check_unusable()
        usable, now = self.table.usable_instances(), self.table.clock()
        faulty = [instance for instance in answering if not instance.is_usable(now) and instance.is_usable(math.inf)]
        if faulty and any(not meets(usable) and meets([*usable, *faulty]) for meets in (suffices, *must_serve)):
            for instance in faulty:
                self.table.end_fault(instance)
            usable = self.table.usable_instances()
        return usable

    def can_serve(self) -> bool:
        """Whether the cluster can serve requests at all, as far as known."""
        return self._can_serve_with(self.table.usable_instances())

    async def can_serve_now(self) -> bool:
        """Whether the cluster can serve requests at all; if it seems not to, its instances are asked again."""
        return self._can_serve_with(await self.find_usable(self._can_serve_with))

    def _has_untried_instances(self, request: SchedulingRequest, candidates: Sequence[ClusterInstance]) -> bool:
        """Whether the candidates that have not failed the request can serve it. ``candidates``: usable instances with
        its model."""
        failed_ids = request.failed_instances
        return self._can_serve_with(
            [instance for instance in candidates if instance.id not in failed_ids] if failed_ids else candidates
        )

    def _can_serve_with(self, usable: Sequence[ClusterInstance]) -> bool:
        return self.table.is_complete(usable) or (self.options.fallback and any(instance.native for instance in usable))

    def _try_placement(
        self, request: SchedulingRequest, usable: Sequence[ClusterInstance], candidates: Sequence[ClusterInstance]
    ) -> Placement | None:
        """Place a request now; None if there is no room. ``candidates``: the usable instances with its model. Raises
        RequestRefused."""
        now = self.table.clock()
        preferred = (
            [instance for instance in candidates if instance.id not in request.failed_instances]
            if request.failed_instances
            else candidates
        )
        trusted = [instance for instance in preferred if not instance.breaker.is_open(now)]
        if len(trusted) < len(preferred) and self._can_serve_with(trusted):
            preferred = trusted
        view = RequestView(request, preferred, now)
        pair = self._policy.pick_pair(view)
        if pair is None and request.failed_instances:  # an instance that failed the request once is better than none
            view = RequestView(request, candidates, now)
            pair = self._policy.pick_pair(view)
        if pair is None:
            if not candidates and request.layout and self._instances_with_model(request, usable, in_any_layout=True):
                raise self._refuse_request(500, refusals.TEXTS.schedule_failed)
            return None
        if request.earlier_attempts == 0:
            self._check_objectives(request, pair)
        return Placement(self, pair, view)

    def _check_objectives(self, request: SchedulingRequest, pair: InstancePair) -> None:
        """Refuse a request whose first or later tokens would be late because of others. Raises RequestRefused.

        A request that has received a part of its answer is never refused.
        """
        deadlines = [seconds for seconds in (request.deadline, self.options.slo_ttft) if seconds is not None]
        if deadlines and pair.predicted_ttft is not None:
            earliest = min(deadlines)
            own_seconds = pair.predicted_ttft - pair.queue_seconds
            if pair.queue_seconds > (earliest - own_seconds if own_seconds <= earliest else earliest):
                raise self._refuse_request(429, refusals.TEXTS.too_many_requests, pair.predicted_ttft - earliest)
        if self.options.slo_tpot is not None:
            slow, retry_after = predict_crowding(pair, self.options.slo_tpot)
            if slow:
                raise self._refuse_request(429, refusals.TEXTS.too_many_requests, retry_after)

    def _instances_with_model(
        self, request: SchedulingRequest, usable: Sequence[ClusterInstance], *, in_any_layout: bool = False
    ) -> Sequence[ClusterInstance]:
        """Return the usable instances that have the model of a request. If no instance has the model that it names,
        return all: any may report that.

        An answer that has begun can only continue on the same weights, so in the same layout.
        """
        if request.layout and not in_any_layout:
            usable = [instance for instance in usable if instance.layout in ("", request.layout)]
        return self.table.model_holders(request.model, request.requirement, usable)

    def _refuse_request(self, status: int, text: str, retry_after: float | None = None) -> RequestRefused:
        self.counters.count_refusal(status)
        return RequestRefused(status, text, retry_after)

    def _instance_changed(self, instance: ClusterInstance, event: InstanceEvent) -> None:
        self.wake_queue()

    def wake_queue(self) -> None:
        """Retry queued requests, once per event-loop iteration: resources were freed, or an instance became usable."""
        if self.queue and not self._wake_scheduled:
            self._wake_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_queue)

    def _serve_queue(self) -> None:
        self._wake_scheduled = False
        usable = self.table.usable_instances()
        # Models whose first queued request finds no room: later ones may not overtake it.
        full_models: set[tuple[str, ModelRequirement | None]] = set()
        for queued in self.queue.take_turns():
            model = queued.request.model, queued.request.requirement
            if queued.future.done() or model in full_models:
                continue
            try:
                candidates = self._instances_with_model(queued.request, usable)
                placement = self._try_placement(queued.request, usable, candidates)
            except RequestRefused as refusal:
                queued.future.set_exception(refusal)
                self.queue.remove_request(queued)
                continue
            if placement is None:
                full_models.add(model)
            else:
                queued.future.set_result(placement)
                self.queue.remove_request(queued)
