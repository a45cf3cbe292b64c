"""Runs one generating request on the cluster: schedules it, sends it to instances, and retries if they fail.

    schedule -> ask P -> merge P's answer with D's results -> end

A failed attempt is followed by another, which receives the outputs that the client already has. The answer therefore
continues where it broke, with the text that it would have had. Knows the wire format between coordinator and instances,
and no API; the two parts of an answer are combined in ``stream_merge``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import msgspec

from parley.coordinator import refusals
from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.downstream.client import DownstreamClient
from parley.coordinator.proxy.generation import prefill_answer
from parley.coordinator.proxy.generation.attempt_failure import AttemptFailed, classify_refusal
from parley.coordinator.proxy.generation.prefill_answer import BadPrefillAnswer, PrefillAnswer
from parley.coordinator.proxy.generation.stream_merge import RecomputeRequested, ResultsCut, StreamMerge
from parley.coordinator.proxy.upstream import forward
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler, Placement, RequestRefused
from parley.coordinator.routing.policies import SchedulingRequest
from parley.disagg.wire.headers import (
    CLIENT_ID_HEADER,
    CREATED_HEADER,
    ELAPSED_HEADER,
    PREFACE_HEADER,
    RESULTS_HEADER,
    STOPPED_HEADER,
    UUID_HEADER,
)
from parley.disagg.wire.vouched_client import UsedTokens
from parley.errors import ParleyError
from parley.tracing.encode_spans import Attributes
from parley.tracing.request_trace import RequestTrace
from parley.tracing.trace_context import TRACE_HEADERS
from parley.web.http_client import CollectedAnswer, ConnectionBroken, InstanceAnswer, InstanceUnreachable
from parley.web.random_ids import draw_id
from parley.web.request_body import ClientGone

# Seconds before the same instance is tried again: at first, doubled each time, and at most.
RETRY_DELAY, MAX_RETRY_DELAY = 0.05, 2.0
MAX_FRUITLESS_RECOMPUTES = 10  # in a row, without any output of D
RECOMPUTE_DELAY = 1.0  # seconds before a refused recompute is tried again


class AttemptSpan:
    """The span of one attempt, which begins now. ``error``: why the attempt failed, if it did."""

    def __init__(self, trace: RequestTrace, number: int):
        self.context = trace.new_context()
        self.error = ""
        self._trace, self._number, self._started_at = trace, number, time.perf_counter()

    def finish(self, placement: Placement) -> None:
        """Add the span."""
        attributes: Attributes = {
            "parley.attempt": self._number,
            "parley.prefill.instance": placement.prefill_instance.id,
            "parley.decode.instance": placement.decode_instance.id,
        }
        self._trace.add_span(
            "attempt",
            self._started_at,
            time.perf_counter(),
            attributes,
            kind="client",
            context=self.context,
            error=self.error,
        )


class RequestRunner:
    """One request of a client, with all its attempts.

    ``body``: as the client sent it; ``scheduling_request``: its requirements; ``render_error_end`` returns the last
    bytes of a stream that ends with an error, none if the API has no form for it.
    """

    def __init__(
        self,
        scheduler: InstanceScheduler,
        connections: InstanceConnections,
        client: DownstreamClient,
        body: bytes,
        scheduling_request: SchedulingRequest,
        render_error_end: Callable[[ParleyError], bytes],
    ):
        self.client = client
        self.options: CoordinatorOptions = scheduler.options
        self.attempts = 0
        self._scheduler, self._connections = scheduler, connections
        self._scheduling_request, self._render_error_end = scheduling_request, render_error_end
        self._body: Sequence[bytes] = (body,)
        self._request_target = client.request_target
        self._method = client.scope["method"].encode()
        self._headers = client.forwarded_headers()
        if client.client_request_id:
            self._headers.append((CLIENT_ID_HEADER, client.client_request_id))
        self._created = b"%d" % time.time()
        self._failed_instances: frozenset[int] = frozenset()
        self._last_refusal: InstanceAnswer | None = None  # the answer of the last P that refused the request
        self._timer: asyncio.Timeout  # expires for the first token until P answers, then for the whole request
        self._deadline = 0.0
        self._outside_error: ParleyError | None = None  # set by ``fail_request``
        self._stop_requested = False  # set by ``stop_request``
        self._stopping = False  # the next attempt only ends the answer
        self._first_token_due = inf  # when the first token is due; finite once P was asked
        self._recomputes = 0
        self._fruitless_recomputes = 0  # in a row
        self._recompute_size = inf  # bytes of the largest body that D has asked a recompute of
        self._merge = StreamMerge(client, scheduler.table.clock)
        self._layout = ""  # KV layout of the instances that computed the part the client has
        self._refused = False  # an instance has refused the request because of its content
        # the current attempt
        self._attempt_id = ""
        self._placement: Placement | None = None
        self._busy_instances: Sequence[ClusterInstance] = ()  # instances where the request may be running

    async def run_attempts(self) -> None:
        """Answer the client. Raises ParleyError only before anything was sent."""
        try:
            self._deadline = asyncio.get_running_loop().time() + self.options.infer_timeout
            while not await self._run_until_timer():
                pass
            if self.client.status >= 500 and not self._refused:  # an instance's answer
                self._scheduler.counters.count_failure()
        except ParleyError as error:
            if self._placement is not None or self.attempts:  # else the scheduler has counted a refusal
                self._scheduler.counters.count_failure()
            if not self._merge.sent:
                raise
            self._end_stream(error)
        finally:
            await self._merge.wait_for_client()

    async def _run_until_timer(self) -> bool:
        """Run attempts until the request is answered (True), or its client stops it (False). Raises ParleyError."""
        try:
            async with asyncio.timeout_at(self._deadline) as self._timer:
                while not await self._run_once():
                    pass
            return True
        except TimeoutError:
            if self._merge.answered:  # in the same iteration of the event loop
                return True
            if self._outside_error is not None:
                raise self._outside_error from None
            if self._stop_requested and not self._stopping:
                self._stopping = True
                return False
            first_is_late = self._timer.when() != self._deadline
            text = refusals.TEXTS.first_token_timeout if first_is_late else refusals.TEXTS.inference_timeout
            if self._placement is not None:
                self._placement.report_timeout(text)
            raise refusals.coordinator_error(408, text) from None

    @property
    def used_tokens(self) -> UsedTokens | None:
        """The request's token usage, if this coordinator counts it; None if no instance accepted the request."""
        return self._merge.used_tokens or self.client.forwarded_use()

    def fail_request(self, error: ParleyError) -> None:
        """Stop the request; the client receives this error."""
        self._outside_error = error
        with contextlib.suppress(RuntimeError):  # all attempts are over, and the client reads the rest
            self._timer.reschedule(0.0)

    def stop_request(self) -> bool:
        """End the request for its client: an instance adds the end to the outputs so far. False if none can."""
        if self._stop_requested:
            return True
        has_native = any(instance.native for instance in self._scheduler.table.usable_instances())
        answered_by_other = bool(self._recomputes) or (self.client.status != 0 and not self._merge.sent)
        if not has_native or answered_by_other or (self._merge.sent and not self._merge.resumable):
            return False  # only parley's instances know the outputs so far
        self._stop_requested = True
        with contextlib.suppress(RuntimeError):  # the answer is complete
            self._timer.reschedule(0.0)
        return True

    def runs_on(self, instances: Sequence[ClusterInstance]) -> bool:
        """Whether the request is running, on no other instances than these."""
        return bool(self._busy_instances) and all(instance in instances for instance in self._busy_instances)

    def _end_stream(self, error: ParleyError) -> None:
        """End a stream that has begun with an error."""
        last = self._render_error_end(error)
        if last:
            self._merge.finish_merge(last)
        else:
            self.client.abort_connection()

    # -- attempts

    async def _run_once(self) -> bool:
        """Run one attempt; True if the request is answered. Raises ParleyError when no other attempt may follow."""
        self._placement = None
        started_at = time.perf_counter()
        placement = self._placement = await self._place_attempt()
        attempt_span = self._begin_span(started_at)
        try:
            used_ids = (placement.prefill_instance.id, placement.decode_instance.id)
            if self.attempts and not self._failed_instances.isdisjoint(used_ids):  # none is left that did not fail
                failed_again = placement.prefill_instance.id in self._failed_instances
                if self._last_refusal is not None and not self._merge.sent and failed_again:
                    self.client.send_complete(*self._last_refusal)
                    return True
                await asyncio.sleep(min(MAX_RETRY_DELAY, RETRY_DELAY * 2**self.attempts))
            if placement.prefill_instance is placement.decode_instance and not placement.prefill_instance.native:
                await self._forward_unchanged(placement)
            else:
                await self._run_separated(placement)
            placement.close_placement()
            return True
        except RecomputeRequested as recompute:
            self._prepare_recompute(recompute.body)
            return False
        except AttemptFailed as failure:
            self._refused = failure.refused
            if attempt_span is not None:
                attempt_span.error = failure.text
            if failure.instance is not None and failure.status >= 500 and not self._refused:
                placement.report_failure(failure.instance, failure.text)
            return await self._handle_failure(failure)
        except (asyncio.CancelledError, ClientGone):
            placement.close_placement(False, cancelled=self._stop_requested or not self._timer.expired())
            raise
        finally:
            placement.close_placement(False)
            if attempt_span is not None:
                attempt_span.finish(placement)

    def _prepare_recompute(self, body: bytes) -> None:
        """Send the body that D has asked for from now on. Raises ParleyError if D makes no progress."""
        self._recomputes += 1
        # An answer in one piece arrives at its end, but the body contains the tokens so far
        has_outputs = self._merge.part_count > 0 or len(body) > self._recompute_size
        self._fruitless_recomputes = 0 if has_outputs else self._fruitless_recomputes + 1
        if self._fruitless_recomputes > MAX_FRUITLESS_RECOMPUTES:
            raise refusals.coordinator_error(500, refusals.TEXTS.retry_failed)
        self._recompute_size = len(body) if self._recomputes == 1 else max(self._recompute_size, len(body))
        self._body = (body,)

    def _begin_span(self, started_at: float) -> AttemptSpan | None:
        """Begin the span of an attempt that has been scheduled since ``started_at``; None if it is not traced."""
        trace = self.client.trace
        if trace is None:
            return None
        trace.add_span("schedule", started_at, time.perf_counter(), {"parley.attempt": self.attempts + 1})
        attempt_span = AttemptSpan(trace, self.attempts + 1)
        kept_headers = [header for header in self._headers if header[0] not in TRACE_HEADERS]
        self._headers = [*kept_headers, *attempt_span.context.headers()]
        return attempt_span

    async def _handle_failure(self, failure: AttemptFailed) -> bool:
        """Prepare for another attempt (False), or send the client P's answer (True). Raises ParleyError."""
        self.attempts += 1
        merge = self._merge
        if failure.instance is not None:
            self._failed_instances |= {failure.instance.id, *failure.equally_unfit}
        answer = self._last_refusal = failure.answer
        if self._recomputes:
            if self.attempts > self.options.max_retry:
                raise refusals.coordinator_error(500, refusals.TEXTS.retry_failed)
            await asyncio.sleep(RECOMPUTE_DELAY)
            return False
        # the original reports a lost instance at once; waiting for another to come is parley's addition
        hopeless = self.options.strict and not self._scheduler.can_serve()
        exhausted = failure.final or hopeless or self.attempts > self.options.max_retry
        if not exhausted and (merge.resumable or not merge.sent):
            return False
        if answer is None or merge.sent:
            raise refusals.coordinator_error(failure.status if failure.status >= 400 else 500, failure.text)
        self.client.send_complete(*answer)
        return True

    async def _place_attempt(self) -> Placement:
        """Schedule an attempt. Raises ParleyError."""
        request, attempt = self._scheduling_request, self.attempts + self._recomputes
        if attempt:
            self._set_first_token_timeout()
            remaining = None if request.deadline is None else max(0.0, request.deadline - self._elapsed_seconds())
            layout = self._layout if self._merge.sent else ""
            request = msgspec.structs.replace(
                request,
                failed_instances=self._failed_instances,
                earlier_attempts=attempt,
                deadline=remaining,
                layout=layout,
            )
        try:
            if self._stopping:
                return self._scheduler.place_ending(request)
            return await self._scheduler.place_request(request)
        except RequestRefused as refusal:
            raise refusals.coordinator_error(refusal.status, refusal.text, refusal.retry_after) from None

    def _set_first_token_timeout(self) -> None:
        """Set the timeout for the first token, unless the client has it."""
        self._set_timeout(self._deadline if self._merge.sent else min(self._deadline, self._first_token_due))

    def _set_timeout(self, due: float) -> None:
        # Mostly it is unchanged, and rescheduling is expensive.
        is_ending = self._outside_error is not None or self._stop_requested is not self._stopping
        if due != self._timer.when() and not is_ending:
            self._timer.reschedule(due)

    def _elapsed_seconds(self) -> float:
        """Return the seconds since the client's request arrived; its time limits cover all attempts together."""
        return time.perf_counter() - self.client.arrived_at

    async def _forward_unchanged(self, placement: Placement) -> None:
        """Send the request unchanged to a server that takes no prefill commands. Raises AttemptFailed, ParleyError."""
        instance = placement.prefill_instance
        if self._merge.sent:
            raise AttemptFailed(500, refusals.TEXTS.decode_failed, instance, final=True)
        try:
            await forward.forward_to_one(self._connections, self.client, [instance], b"".join(self._body))
        except ParleyError as error:
            placement.report_failure(instance, error.message)
            raise
        if self.client.status >= 500:
            placement.report_failure(instance, f"status {self.client.status}")

    async def _run_separated(self, placement: Placement) -> None:
        """Run one attempt on a prefill and a decode instance. Raises AttemptFailed, RecomputeRequested."""
        stream, merge = self._connections.result_stream(placement.decode_instance), self._merge
        if not self._recomputes:  # a recompute keeps the id
            self._attempt_id = str(int.from_bytes(draw_id()[:8]))
        if not merge.sent:
            # Read it now: a restarted instance may have another.
            self._layout = placement.decode_instance.layout or placement.prefill_instance.layout
        merge.begin_attempt(placement.report_tokens)
        if stream is None or not await stream.wait_until_ready():
            raise AttemptFailed(500, refusals.TEXTS.decode_failed, placement.decode_instance)
        stream.register_receiver(self._attempt_id, merge)
        try:
            prefill_answer = await self._ask_prefill(placement)
            if prefill_answer is None:
                self._busy_instances = ()
                return
            placement.report_first_token()
            if not merge.take_prefill_answer(
                prefill_answer,
                stream.native,
                partial(self._connections.set_results_paused, placement.decode_instance, self._attempt_id),
            ):
                self._busy_instances = (placement.decode_instance,)
                await merge.attempt_done
            self._busy_instances = ()
        except ResultsCut as cut:
            if cut.decode_stopped:
                self._busy_instances = ()
            raise AttemptFailed(500, cut.text, placement.decode_instance, final=cut.final) from None
        except RecomputeRequested:
            self._busy_instances = ()
            raise
        finally:
            stream.unregister_receiver(self._attempt_id)
            if merge.part_count > 1:  # the first was reported when it came
                placement.report_tokens(merge.part_count - 1, merge.last_part_at)
            self._abort_everywhere()

    def _abort_everywhere(self) -> None:
        """Abort the request on all instances where it may be running."""
        for instance in self._busy_instances:
            self._connections.abort_request(instance, self._attempt_id, self._scheduling_request.model)
        self._busy_instances = ()

    async def _ask_prefill(self, placement: Placement) -> PrefillAnswer | None:
        """Return P's answer; None if D has already sent a complete one. Raises AttemptFailed, ResultsCut,
        RecomputeRequested."""
        p, merge = placement.prefill_instance, self._merge
        prior_outputs = merge.prior_outputs()
        headers = self._prefill_headers(placement, prior_size=len(prior_outputs))
        body = (prior_outputs, *self._body) if prior_outputs else self._body
        self._busy_instances = (p, placement.decode_instance) if placement.separate else (p,)
        if self._first_token_due == inf:
            self._first_token_due = asyncio.get_running_loop().time() + self.options.first_token_timeout
        self._set_first_token_timeout()
        try:
            http_client = self._connections.http_client(p)
            answer = await http_client.request_answer(
                self._method, self._request_target, headers, body, resend=False, on_sent=self._note_pending_prefill
            )
            self._set_timeout(self._deadline)
        except InstanceUnreachable:
            self._busy_instances = ()
            text = refusals.TEXTS.prefill_connect_failed
            self._scheduler.table.mark_faulty(p, refusals.plain_sentence(text))
            raise AttemptFailed(500, text, p) from None
        except ConnectionBroken as broken:
            if merge.attempt_done.done():  # the request to P was dropped: D is lost, or has answered
                await merge.attempt_done
                return None
            raise AttemptFailed(500, _broken_connection_text(broken), p) from None
        if merge.decode_finished_first:
            await merge.attempt_done
            return None
        if answer.status != 200:
            self._busy_instances = ()
            raise classify_refusal(placement, answer, self._scheduler.table.usable_instances())
        try:
            return prefill_answer.parse_prefill_answer(answer.body)
        except BadPrefillAnswer:
            raise AttemptFailed(500, refusals.TEXTS.prefill_failed, p) from None

    def _prefill_headers(self, placement: Placement, *, prior_size: int) -> list[tuple[bytes, bytes]]:
        """Return the headers of the command to P. ``prior_size``: bytes of prior outputs before the client's body."""
        p = placement.prefill_instance
        headers = [
            *self._headers,
            *self._connections.secret_headers,
            *(self.client.vouched_headers if p.native else ()),
            (b"req-id", self._attempt_id.encode()),
            (b"req-type", b"prefill"),
            *_target_headers(p, placement.decode_instance, self._connections),
            (RESULTS_HEADER, self._connections.coordinator_name.encode()),
            (UUID_HEADER, self.client.request_uuid.encode()),
            (CREATED_HEADER, self._created),
            (ELAPSED_HEADER, b"%d" % (1000 * self._elapsed_seconds())),
        ]
        if prior_size:
            headers.append((PREFACE_HEADER, b"%d" % prior_size))
        if self._recomputes:
            headers.append((b"is-recompute", b"true"))
        if self._stopping:
            headers.append((STOPPED_HEADER, b"true"))
        return headers

    def _note_pending_prefill(self, pending_answer: CollectedAnswer) -> None:
        self._merge.pending_prefill = pending_answer


def _broken_connection_text(broken: ConnectionBroken) -> str:
    """Return the documented text for a connection to P that broke before its answer was complete."""
    if broken.abandoned:
        return refusals.TEXTS.prefill_failed
    return refusals.TEXTS.prefill_send_failed if broken.unsent else refusals.TEXTS.prefill_receive_failed


def _target_headers(
    p: ClusterInstance, d: ClusterInstance, connections: InstanceConnections
) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell P where D is."""
    if p is d and p.native:
        return [(b"d-target", b"self")]
    target = d.peer or connections.http_client(d).host
    port = target.partition(";")[2]
    return [(b"d-target", target.encode()), *([(b"d-port", port.encode())] if port else [])]
