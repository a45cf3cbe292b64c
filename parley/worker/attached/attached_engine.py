"""A running vLLM server as the engine of a model.

This engine runs in the API process, because it computes nothing. It asks the server for its version, model and limits
when the server first answers and whenever it comes back; until then the model is not ready. While the server serves, it
is asked every ``POLL_SECONDS`` whether it is healthy and serves the same model, and for its metrics. A server that does
not answer for the time of ``--engine-timeout`` counts as away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from parley.engine.messages import (
    AdapterResult,
    CancelRequest,
    FinishBeamSearch,
    LoadAdapter,
    LoadProgress,
    ReservePages,
    ResetDone,
    ResetPrefixCache,
    SubmitRequest,
    ToEngine,
    UnloadAdapter,
)
from parley.engine.page_transfer import MessagePageTransfer
from parley.types import AttachedSettings
from parley.worker.attached.server_calls import ServerAway, ServerCalls
from parley.worker.attached.server_facts import (
    AttachedServerFacts,
    AttachRefused,
    ask_metrics,
    check_server_health,
    choose_card,
    describe_attached_model,
    list_adapters,
    read_cards,
    read_facts,
)
from parley.worker.attached.server_totals import ServerTotals
from parley.worker.attached.token_client import TokenClient
from parley.worker.vllm.host_loop import HostLoop, compare_adapter

log = logging.getLogger("parley.engine")

POLL_SECONDS = 2.0
RETRY_SECONDS = 1.0  # between attempts to reach a server that is away
AWAY = "The server that computes for this model is away."  # the text for clients, who need not know the address
NO_ADAPTERS = "The engine's server loads its own adapters."


class AttachedEngine(MessagePageTransfer):
    """Computes with the vLLM server at ``settings.url``. ``name``: the model's main name."""

    needs_weights = False

    def __init__(self, settings: AttachedSettings, *, name: str = "model"):
        super().__init__()
        self.settings = settings
        self.name = name
        self._calls = ServerCalls(settings)
        self._supervisor: asyncio.Task[None] | None = None
        self._poll_now = asyncio.Event()
        # By choice: why its answer broke off, until the next poll shows whether the server is away
        self._lost_choices: dict[str, str] = {}
        self._away_reason = ""
        self._facts: AttachedServerFacts
        self._client: TokenClient
        self._loop: HostLoop
        self._totals: ServerTotals

    async def start(self) -> None:
        """Start to connect to the server."""
        self._begin_loading()
        self.progress = LoadProgress("connecting to the server that computes", 0.0)
        self._supervisor = asyncio.create_task(self._supervise_server())
        self._supervisor.add_done_callback(self._on_supervisor_done)

    async def close(self) -> None:
        """End all requests and connections."""
        if self.state == "closed":
            return
        was_ready, self.state = self.state == "ready", "closed"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if was_ready:
            self._client.cancel_all()
        self._calls.close()
        self._release_waiters("The server is shutting down.")

    def _send_to_engine(self, message: ToEngine) -> None:
        match message:
            case SubmitRequest(request):
                self._loop.add_request(request)
            case CancelRequest(request_id, index):
                self._loop.cancel_request(request_id, index)
            case FinishBeamSearch(request_id, reason):
                self._loop.finish_beam_search(request_id, reason)
            case ResetPrefixCache(number):  # other clients of vLLM use the cache as well
                self._handle_message(ResetDone(number, done=False))
            case LoadAdapter(number) | UnloadAdapter(number):
                self._handle_message(AdapterResult(number, NO_ADAPTERS))
            case ReservePages(number, _, prefix):  # the server fetches pages itself
                self._handle_message(compare_adapter(number, prefix, self._client.digest_adapter))

    # -- the server's life

    async def _supervise_server(self) -> None:
        """Reach the server, serve until it is away, and begin again."""
        while True:
            try:
                self._attach_server(await read_facts(self._calls, self.settings, self.name))
                await self._poll_server()
            except AttachRefused as error:
                if self.info is None:
                    self._fail_for_good(str(error))
                    return
                self._detach_server(str(error))
            except ServerAway as error:
                self._detach_server(f"The vLLM server at {self.settings.url} is away: {error}.")
            await asyncio.sleep(RETRY_SECONDS)

    def _attach_server(self, facts: AttachedServerFacts) -> None:
        """Serve with the server."""
        self._facts = facts
        self._totals = ServerTotals(facts.kv_pages)
        self._client = TokenClient(
            self._calls,
            facts,
            self.settings.max_batch,
            lambda step: self._loop.handle_step(step),
            lambda choice_id, reason: self._loop.reject_choice(choice_id, reason),
            self._lose_choice,
        )
        self._loop = HostLoop(self._client, self._handle_message, self._totals)
        log.log(
            logging.WARNING if self.info is not None else logging.INFO,
            "%s: %s answers: vLLM %s with %s.", self.name, self.settings.url, facts.version, facts.card.id,
        )  # fmt: skip
        self._become_ready(describe_attached_model(facts, self.settings))

    def _detach_server(self, reason: str) -> None:
        """Fail all requests because the server is away, or has changed. The log says it once."""
        is_news, self._away_reason = self._away_reason != reason, reason
        self.progress = LoadProgress("waiting for the server that computes", 0.0)
        if self.state != "ready":
            if is_news:
                log.warning("%s: %s It is tried again.", self.name, reason)
            return
        self.state, self.failure = "restarting", AWAY
        self._client.cancel_all()
        self._lost_choices.clear()
        self._fail_all_streams(AWAY)
        log.error("%s: %s Requests that were running got an error.", self.name, reason)

    async def _poll_server(self) -> None:
        """Ask the server until it is away. Raises ServerAway, AttachRefused."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._poll_now.wait()
            self._poll_now.clear()
            lost, self._lost_choices = self._lost_choices, {}
            await self._check_server()
            for choice_id, reason in lost.items():
                self._client.reject(choice_id, f"The engine's server broke off: {reason}.")

    async def _check_server(self) -> None:
        """Check that the server is healthy and serves the same model, and take its metrics.

        Raises ServerAway, AttachRefused.
        """
        await check_server_health(self._calls)
        cards = await read_cards(self._calls, self.settings)
        card = choose_card(cards, self.settings, self.name)
        if card != self._facts.card:
            raise AttachRefused(f"{self.settings.url} serves another model than before: {card.id}.")
        if (adapters := list_adapters(cards, card)) != self._facts.adapters:
            self._facts = self._client.facts = replace(self._facts, adapters=adapters)
            self._publish_info(describe_attached_model(self._facts, self.settings))
        self._totals.record_server(await ask_metrics(self._calls))
        self._loop.report_statistics()

    def _lose_choice(self, choice_id: str, reason: str) -> None:
        """Keep a choice whose answer broke off until it is known whether the server is away."""
        self._lost_choices[choice_id] = reason
        self._poll_now.set()

    def _on_supervisor_done(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if the supervisor ended by an exception: a defect, but no stream may wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            log.error("the engine's supervisor failed", exc_info=task.exception())
            self._fail_for_good("The connection to the engine failed.")
