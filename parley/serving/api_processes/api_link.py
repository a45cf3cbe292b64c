"""The main process's side of an API process: admits its requests, and relays between them and the engines.

All outputs of a step for the process are one frame, which is written without looking into them. When the process ends,
for any reason, everything that it holds is given back: requests in the engines, slots, and leases of keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import chain, count

from parley.engine.messages import CancelRequest, FinishBeamSearch, SubmitRequest
from parley.engine.output_stream import OutputStream, StepArrivals, StreamGroup
from parley.errors import SERVER_ERROR, InUse, ParleyError, UnknownModel, excerpt
from parley.serving.api_processes.frame_link import FrameLink
from parley.serving.api_processes.messages import (
    AdmissionGranted,
    AdmissionRefused,
    AdmitRequest,
    CancelOpen,
    EndRequest,
    EngineMessage,
    FailOpen,
    FromApiProcess,
    MetricsSnapshot,
    OpenAccount,
    RelayedOutputs,
    ReserveTokens,
    TakeMetricsSnapshot,
    ToApiProcess,
    WithdrawRequest,
)
from parley.serving.api_processes.relayed_error import RelayedError, relay_error
from parley.serving.keys.accounts import RequestAccount
from parley.serving.model_registry import ModelRegistry
from parley.serving.open_requests import RequestProgress
from parley.serving.served_model import ServedModel
from parley.types import NO_LIMITS, NO_TENANT, EngineOutput, EngineRequest, KeyLimitStates, Tenant, Usage

log = logging.getLogger("parley.server")

SNAPSHOT_SECONDS = 1.0  # seconds in which a process must report its metrics
MAX_UNREAD = 256 << 20  # bytes that wait for a process; it hangs if there are more


class RelayGroup(StreamGroup):
    """Streams of one engine for one process. ``relay`` takes the outputs that have arrived."""

    def __init__(self, relay: Callable[[StepArrivals], None]):
        super().__init__()
        self._relay = relay

    def wake_reader(self) -> None:
        """Relay the outputs that have arrived."""
        if self.unread_outputs:
            arrived, self.unread_outputs = self.unread_outputs, {}
            self._relay(arrived)


class RelayedRequest:
    """An open request that an API process answers (``OpenRequest``). It holds slots of ``model`` until ``close``."""

    def __init__(self, link: ApiLink, order: AdmitRequest, model: ServedModel):
        self._link, self._order, self._model = link, order, model
        self.tenant = order.tenant
        self.reported: RequestProgress | None = None  # the last that the process has reported
        model.take_slots(order.choices, order.tenant.id)
        model.open_requests[self] = None

    @property
    def cancel_ids(self) -> tuple[str, ...]:
        """The ids by which a client can cancel the request."""
        return self._order.cancel_ids

    @property
    def adapter_state(self) -> tuple[str, bool] | None:
        """The request's adapter, if any, and whether it still waits for its first token."""
        return None if self._order.adapter is None else (self._order.adapter, not self.progress.started)

    @property
    def progress(self) -> RequestProgress:
        """The request's progress."""
        order = self._order
        return self.reported or RequestProgress(
            order.cancel_ids[0],
            order.api,
            order.key_name,
            order.answer_name,
            seconds=0.0,
            choices=order.choices,
            prompt_tokens=0,
            output_tokens=0,
            started=False,
        )

    @property
    def answer_name(self) -> str:
        """The model's name in the answer."""
        return self._order.answer_name

    def cancel_by_id(self, cancel_id: str) -> None:
        """Cancel the request for a client or an operator, who gave one of its cancel ids."""
        self._link.send(CancelOpen(self._order.id, cancel_id))

    def fail_on_shutdown(self, error: ParleyError) -> None:
        """Fail the request because the server shuts down."""
        self._link.send(FailOpen(self._order.id, relay_error(error)))

    def close(self) -> None:
        """Release the request's slots."""
        self._model.release_slots(self._order.choices, self.tenant.id)
        self._model.open_requests.pop(self, None)


class ApiLink:
    """The connection to one API process. ``frames``: over its socket; ``kill``: ends the process."""

    def __init__(self, registry: ModelRegistry, frames: FrameLink, kill: Callable[[], None]):
        self._registry, self._frames, self._kill = registry, frames, kill
        self._accounts: dict[int, RequestAccount] = {}
        self._reserved_prompts: dict[int, int] = {}  # prompt tokens that were reserved for a key with limits
        self._requests: dict[int, RelayedRequest] = {}
        self._streams: dict[str, OutputStream] = {}
        self._groups: dict[ServedModel, RelayGroup] = {}
        self._snapshots: dict[int, asyncio.Future[None]] = {}
        self._snapshot_ids = count()

    def send(self, message: ToApiProcess) -> None:
        """Send a message without blocking. A process that reads nothing is killed."""
        self._frames.send(message)
        if self._frames.unsent_bytes > MAX_UNREAD:
            self._kill()

    def handle_message(self, message: FromApiProcess) -> None:
        """Handle a message from the process. A defect ends one request at most, not all of the process."""
        try:
            self._handle_message(message)
        except Exception:
            log.exception("A message of an API process could not be handled.")

    def _handle_message(self, message: FromApiProcess) -> None:
        match message:
            case EngineMessage():
                self._handle_order(message)
            case AdmitRequest():
                self._answer_message(message.id, message.tenant, partial(self._admit_request, message))
            case OpenAccount():
                self._answer_message(message.id, message.tenant, partial(self._open_account, message))
            case ReserveTokens():
                account = self._accounts.get(message.id)
                tenant = NO_TENANT if account is None else account.tenant
                self._answer_message(message.id, tenant, partial(self._reserve_tokens, message))
            case EndRequest():
                self._end_request(message)
            case WithdrawRequest():
                self._registry.key_ledger.limiter.return_request(message.tenant)
            case MetricsSnapshot():
                self._take_snapshot(message)

    def _answer_message(self, request_id: int, tenant: Tenant, work: Callable[[], None]) -> None:
        """Do the work that a message asks for, and answer it."""
        refusal: RelayedError | None = None
        try:
            work()
        except ParleyError as error:
            refusal = relay_error(error)
        except Exception:
            log.exception("A question of an API process could not be answered.")
            refusal = relay_error(ParleyError(SERVER_ERROR))
        states: KeyLimitStates | None = None
        if tenant.limits != NO_LIMITS:
            states = self._registry.key_ledger.limiter.states_of(tenant)
        self.send(
            AdmissionGranted(request_id, states) if refusal is None else AdmissionRefused(request_id, refusal, states)
        )

    def _open_account(self, order: OpenAccount) -> None:
        """Raises RateLimited."""
        ledger = self._registry.key_ledger
        account = ledger.open_account(order.tenant, order.key_name)
        account.lease = ledger.limiter.admit_request(order.tenant)
        self._accounts[order.id] = account

    def _admit_request(self, order: AdmitRequest) -> None:
        """Raises NotReady, UnknownModel, InUse, Forbidden, Overloaded."""
        model = next((model for model in self._registry.models if model.name == order.model), None)
        if model is None or (order.adapter is not None and order.adapter not in model.adapters):
            raise UnknownModel("The model is no longer served.", name=order.answer_name)
        model.require_ready()
        if order.exclusive_id and model.find_open_request(order.exclusive_id, order.tenant):
            raise InUse(f"Another request is running under the id {excerpt(order.exclusive_id)}.")
        for name in (*model.names, order.adapter or ""):
            model.check_query(name, order.tenant)
        self._requests[order.id] = RelayedRequest(self, order, model)
        if order.id not in self._accounts:
            self._accounts[order.id] = self._registry.key_ledger.open_account(order.tenant, order.key_name)

    def _reserve_tokens(self, order: ReserveTokens) -> None:
        """Raises RateLimited."""
        account = self._accounts[order.id]
        if account.lease is not None:
            account.lease.reserve_tokens(order.prompt_tokens, order.output_tokens)
            self._reserved_prompts[order.id] = order.prompt_tokens

    def _end_request(self, end: EndRequest) -> None:
        request, account = self._requests.pop(end.id, None), self._accounts.pop(end.id, None)
        self._reserved_prompts.pop(end.id, None)
        if request is not None:
            request.close()
        if account is not None and request is not None:
            usage = Usage(prompt_tokens=end.prompt_tokens, cached_tokens=end.cached_tokens)
            account.settle(request.answer_name, usage, end.output_tokens, was_submitted=end.was_submitted)
        elif account is not None:
            account.cancel()

    def _handle_order(self, order: EngineMessage) -> None:
        """Pass a message to its engine."""
        match order.message:
            case SubmitRequest(request):
                model = next((model for model in self._registry.models if model.name == order.model), None)
                if model is None:
                    self._fail_submission(order.model, request, "The model is no longer served.")
                    return
                try:
                    self._submit_request(model, request)
                except Exception:
                    log.exception("A request of an API process could not be submitted.")
                    self._fail_submission(order.model, request, SERVER_ERROR)
            case CancelRequest(request_id, index):
                if request_id in self._streams:
                    self._streams[request_id].cancel_choice(index)
                    self._forget_ended(request_id)
            case FinishBeamSearch(request_id, reason):
                if request_id in self._streams:
                    self._streams[request_id].finish_beam_search(reason)

    def _submit_request(self, model: ServedModel, request: EngineRequest) -> None:
        group = self._groups.get(model)
        if group is None:
            group = self._groups[model] = RelayGroup(partial(self._relay_outputs, model))
        self._streams[request.id] = stream = model.engine.submit_request(request, group)
        if not stream.open_choices:
            del self._streams[request.id]

    def _fail_submission(self, model_name: str, request: EngineRequest, error: str) -> None:
        outputs = [EngineOutput(request.id, k, finish_reason="error", error=error) for k in range(request.n)]
        self.send(RelayedOutputs(model_name, False, outputs, self._registry.main_model.engine.stats))

    def _relay_outputs(self, model: ServedModel, arrived: StepArrivals) -> None:
        outputs = list(chain.from_iterable(arrived.values()))
        engine = model.engine
        self.send(RelayedOutputs(model.name, engine.state == "ready", outputs, engine.stats))
        for output in outputs:
            if output.finish_reason is not None:
                self._forget_ended(output.id)

    def _forget_ended(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.open_choices:
            del self._streams[request_id]

    async def refresh_metrics(self) -> None:
        """Ask the process for its metrics, and wait a limited time for them."""
        number = next(self._snapshot_ids)
        self._snapshots[number] = asyncio.get_running_loop().create_future()
        self.send(TakeMetricsSnapshot(number))
        try:
            await asyncio.wait([self._snapshots[number]], timeout=SNAPSHOT_SECONDS)
        finally:
            del self._snapshots[number]

    def _take_snapshot(self, snapshot: MetricsSnapshot) -> None:
        for model in self._registry.models:
            if (delta := snapshot.models.get(model.name)) is not None:
                model.metrics.add_delta(delta)
        self._registry.http_requests.add_delta(snapshot.requests)
        self._registry.http_responses.add_delta(snapshot.responses)
        for request_id, progress in snapshot.progress.items():
            if (request := self._requests.get(request_id)) is not None:
                request.reported = progress
        if (waiter := self._snapshots.get(snapshot.id)) is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Give back everything that the process held, because it has ended. Keys with limits are charged the prompts of
        requests that were cut off."""
        for waiter in self._snapshots.values():
            if not waiter.done():
                waiter.set_result(None)
        for stream in list(self._streams.values()):
            stream.cancel_choice()
        self._streams.clear()
        for request in self._requests.values():
            request.close()
        self._requests.clear()
        for request_id, account in self._accounts.items():
            if account.lease is not None:
                account.lease.settle_tokens(self._reserved_prompts.get(request_id, 0))
        self._accounts.clear()
