"""The API process's side of the main process: asks for admission, and relays messages to the engines.

One round trip admits a request: it gets slots and a place among the open requests, if its model serves. A key with
limits needs a round trip before, and another one for the tokens. The end of a request is one message without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from parley.dialects.reply import Reply
from parley.errors import NotReady, UnknownModel
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
    ReserveTokens,
    WithdrawRequest,
)
from parley.serving.api_processes.relayed_engine import RelayedMessage
from parley.serving.api_processes.relayed_error import restore_error
from parley.serving.generate_handler import begin_generation
from parley.serving.generation import Generation
from parley.serving.keys.accounts import RequestAccount
from parley.serving.media.request_media import request_media
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.types import NO_LIMITS, KeyLimitStates, Tenant, Usage
from parley.web.exchange import Exchange


class AnsweredByMain(Exception):
    """The main process has to answer this request, because of something in its body."""


def main_hangs_error() -> NotReady:
    """Return the error of a request that needs the main process while that hangs."""
    return NotReady("The server's main process does not answer.", retry_after=2)


class MainLink:
    """The connection to the main process. ``send`` sends a message without blocking. ``main_hangs``: the main process
    shows no sign of life; it gets no requests then."""

    def __init__(self, send: Callable[[FromApiProcess], None]):
        self.send = send
        self._request_ids = count()
        # Open ones, by the id of their request.
        self._questions: dict[int, asyncio.Future[AdmissionGranted | AdmissionRefused]] = {}
        self.generations: dict[int, Generation] = {}  # the open ones, by the id of their request
        self.main_hangs = False

    def next_id(self) -> int:
        """Return a new request's id."""
        return next(self._request_ids)

    def send_engine_message(self, model: str, message: RelayedMessage) -> None:
        """Send a message for a model's engine."""
        self.send(EngineMessage(model, message))

    async def ask_main(
        self, question: OpenAccount | AdmitRequest | ReserveTokens
    ) -> AdmissionGranted | AdmissionRefused:
        """Ask a question about a request, and return the answer. Raises NotReady."""
        if self.main_hangs:
            raise main_hangs_error()
        answer: asyncio.Future[AdmissionGranted | AdmissionRefused] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = answer
        self.send(question)
        try:
            return await answer
        finally:
            del self._questions[question.id]

    def take_answer(self, answer: AdmissionGranted | AdmissionRefused) -> None:
        """Pass an answer to the request that asked, unless that has ended meanwhile."""
        question = self._questions.get(answer.id)
        if question is not None and not question.done():
            question.set_result(answer)

    def fail_open_requests(self) -> None:
        """Fail all requests that wait for the main process. It gets a message, which it reads when it continues."""
        for question in self._questions.values():
            if not question.done():
                question.set_exception(main_hangs_error())
        for generation in list(self.generations.values()):
            generation.fail_request(main_hangs_error())

    def end_early(self, message: CancelOpen | FailOpen) -> None:
        """Cancel an open request, or fail it, a little later: if it has just been granted, the next step of its task
        lists it."""
        asyncio.get_running_loop().call_soon(self._end_listed, message)

    def _end_listed(self, message: CancelOpen | FailOpen) -> None:
        generation = self.generations.get(message.id)
        match message:
            case CancelOpen(_, cancel_id) if generation is not None:
                generation.cancel_by_id(cancel_id)
            case FailOpen(_, error) if generation is not None:
                generation.fail_on_shutdown(restore_error(error))

    def send_snapshot(self, registry: ModelRegistry, question_id: int = -1) -> None:
        """Send the metrics since the last snapshot."""
        self.send(
            MetricsSnapshot(
                question_id,
                {model.name: model.metrics.take_delta() for model in registry.models},
                registry.http_requests.take_delta(),
                registry.http_responses.take_delta(),
                {number: generation.progress for number, generation in self.generations.items()},
            )
        )


class RelayedAccount(RequestAccount):
    """The account of request ``id``, which the main process keeps."""

    def __init__(self, link: MainLink, tenant: Tenant, key_name: str):
        super().__init__(tenant, key_name)
        self.id = link.next_id()
        self._link = link
        self._is_open = False  # the main process knows the request
        self._states: KeyLimitStates | None = None

    def limit_states(self) -> KeyLimitStates:
        """The limits of the key, as the main process named them last."""
        return self._states or KeyLimitStates()

    async def ask_main(self, question: OpenAccount | AdmitRequest | ReserveTokens) -> None:
        """Ask the main process, which knows the request from then on. Raises the ParleyError of a refusal."""
        self._is_open = True
        answer = await self._link.ask_main(question)
        self._states = answer.states
        if isinstance(answer, AdmissionRefused):
            raise restore_error(answer.error)

    async def reserve_tokens(self, prompt_tokens: int, output_tokens: int | None) -> None:
        """Reserve tokens, if the key has limits. Raises RateLimited."""
        if self.tenant.limits != NO_LIMITS:
            await self.ask_main(ReserveTokens(self.id, prompt_tokens, output_tokens))

    def settle(
        self, model: str, usage: Usage, output_tokens: int, *, was_submitted: bool, handed_over: bool = False
    ) -> None:
        """Charge the key for the request."""
        self._send_end(EndRequest(self.id, usage.prompt_tokens, usage.cached_tokens, output_tokens, was_submitted))

    def cancel(self) -> None:
        """End the account of a request that has used nothing."""
        self._send_end(EndRequest(self.id))

    def _send_end(self, message: EndRequest) -> None:
        self._link.generations.pop(self.id, None)
        if self._is_open:
            self._is_open = False
            self._link.send(message)


class RelayedAdmission:
    """Has requests admitted by the main process."""

    def __init__(self, link: MainLink):
        self._link = link

    async def open_account(self, registry: ModelRegistry, exchange: Exchange) -> RelayedAccount:
        """Count a request for the client's key, and return its account. Raises RateLimited."""
        tenant = exchange.tenant
        account = RelayedAccount(self._link, tenant, exchange.log_entry.key)
        if tenant.limits != NO_LIMITS:
            exchange.limit_states = account.limit_states
            try:
                await account.ask_main(OpenAccount(account.id, tenant, account.key_name))
            except BaseException:  # the request may have been counted, and no other part knows the account
                account.cancel()
                raise
        return account

    async def admit_generation(
        self, registry: ModelRegistry, model: ServedModel, exchange: Exchange, reply: Reply, account: RequestAccount
    ) -> Generation:
        """Have a request admitted. Raises the ParleyError of a refusal, AnsweredByMain."""
        assert isinstance(account, RelayedAccount)
        request = reply.request
        name = model.answer_name(request.model)
        adapter = name if request.adapter is None and name in model.adapters else request.adapter
        if (
            reply.background_name
            or request_media(request)
            or (adapter is not None and adapter not in model.adapters)  # it may have been loaded just now
        ):
            raise AnsweredByMain
        await account.ask_main(
            AdmitRequest(
                account.id,
                exchange.tenant,
                account.key_name,
                model=model.name,
                answer_name=name,
                adapter=adapter,
                choices=request.sequences,
                exclusive_id=request.exclusive_id or "",
                cancel_ids=(request.id, *request.cancel_ids),
                api=exchange.log_entry.api,
                arrived_at=exchange.arrived_at,
            )
        )
        generation = begin_generation(model, exchange, reply, account)
        self._link.generations[account.id] = generation
        exchange.take_kept_body()
        return generation


def is_answered_by_main(error: Exception) -> bool:
    """Whether a request that ended with this error has to be passed to the main process."""
    return isinstance(error, AnsweredByMain | UnknownModel)


def withdraw_request(link: MainLink, exchange: Exchange) -> None:
    """Stop counting a request for the limits of its key, because the main process counts it itself."""
    if exchange.tenant.limits != NO_LIMITS:
        exchange.limit_states = None
        link.send(WithdrawRequest(exchange.tenant))
