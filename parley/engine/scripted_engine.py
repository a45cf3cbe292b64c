"""A scripted engine without a model, for testing the whole server; its cost per token is nearly zero.

To clients it behaves like a real one: choices wait for one of ``max_batch`` slots, each step generates one token for
every running choice, and cancelled requests generate nothing more. The tokens are a function of the request. KV pages
have numbers but no content: leases and reservations hold them, and there are never prefix hits. For the prefill share,
each token counts as a millisecond.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from parley.core.prefill_share import PrefillShare
from parley.engine.messages import (
    AdapterResult,
    CancelRequest,
    FinishBeamSearch,
    FreeReservation,
    LoadAdapter,
    LoadProgress,
    PagesComputed,
    ReleaseLease,
    ReservePages,
    ReserveResponse,
    ResetDone,
    ResetPrefixCache,
    SetPrefillShare,
    StepOutputs,
    SubmitRequest,
    ToEngine,
    UnloadAdapter,
)
from parley.engine.page_transfer import MessagePageTransfer
from parley.types import (
    TOKEN_TASKS,
    EngineFinishReason,
    EngineOutput,
    EngineRequest,
    EngineStats,
    ModelInfo,
    TokenCost,
    TokenScore,
)

ScriptedReply = Callable[[EngineRequest, int], list[int]]


class ScriptedFailure(Exception):
    """Raised by a reply: all choices of the request end with this error."""


SCRIPTED_MODEL = ModelInfo(
    architecture="scripted",
    dtype="none",
    device="none",
    parameters=0,
    vocab_size=512,
    max_model_len=4096,
    weights_bytes=0,
    kv_bytes=0,
    kv_pages=4096,
    page_tokens=16,
    fused=False,
    dimensions=8,
)


def echo_prompt(request: EngineRequest, index: int) -> list[int]:
    """Return the default reply: the prompt's own tokens, repeated up to ``max_tokens``."""
    return [request.token_ids[i % len(request.token_ids)] for i in range(request.max_tokens)]


@dataclass
class _ScriptedChoice:
    request: EngineRequest
    index: int
    reply: list[int]
    output_count: int = 0
    awaits_prefill: bool = True  # its prefill has not run yet
    last_token_at: float = field(default_factory=perf_counter)


class ScriptedEngine(MessagePageTransfer):
    """An engine whose answers come from a function: ``reply(request, index)`` returns the tokens of a choice, or raises
    ScriptedFailure.

    A choice finishes early at a stop id, or with "stop" where the list ends.

    * ``step_seconds``: time between steps (0: as fast as the event loop turns).
    * ``step_gate``: no step runs while it is cleared, so that a test can hold requests in the queue or between tokens.
    * ``load_seconds``: time that loading takes.
    * ``load_failure``: error that loading ends with.
    """

    scripted = True

    def __init__(
        self,
        reply: ScriptedReply = echo_prompt,
        *,
        info: ModelInfo = SCRIPTED_MODEL,
        max_batch: int = 256,
        step_seconds: float = 0.0,
        load_seconds: float = 0.0,
        load_failure: str | None = None,
    ):
        super().__init__()
        self.step_gate = asyncio.Event()
        self.step_gate.set()
        self._reply = reply
        self._model_info = info
        self._max_batch = max_batch
        self._step_seconds = step_seconds
        self._load_seconds = load_seconds
        self._load_failure = load_failure
        self._waiting: list[_ScriptedChoice] = []
        self._running: list[_ScriptedChoice] = []
        self._prefill_share = PrefillShare()
        self._engine_stats = EngineStats(total_pages=info.kv_pages)
        self._free_pages = list(range(info.kv_pages))
        self._leases: dict[str, list[int]] = {}
        self._reservations: dict[str, list[int]] = {}
        self._hangs = False
        self._wakeup = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def lease_count(self) -> int:
        """Number of requests whose pages are leased."""
        return len(self._leases)

    @property
    def reservation_count(self) -> int:
        """Number of reservations that are not freed."""
        return len(self._reservations)

    async def start(self) -> None:
        """Start the task that loads and then runs steps."""
        self._begin_loading()
        self._tasks = [asyncio.create_task(self._run_steps())]

    async def close(self) -> None:
        """Stop the task; open streams end with an error."""
        self.state = "closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._release_waiters("The engine was closed.")

    def crash_engine(self, reason: str = "The engine process was killed.") -> None:
        """Lose all requests, as if an engine process had died and was not restarted."""
        self._waiting, self._running = [], []
        self._leases, self._reservations, self._free_pages = {}, {}, list(range(self._model_info.kv_pages))
        self._fail_for_good(reason)

    def hang_engine(self) -> None:
        """Ignore all messages from now on, as an engine process does that hangs."""
        self._hangs = True

    def fail_choice(self, index: int, error: str) -> None:
        """End choice ``index`` of every open request with an error, as after a step whose logits are not numbers."""
        failing = [choice for choice in self._waiting + self._running if choice.index == index]
        for queue in (self._waiting, self._running):
            queue[:] = [choice for choice in queue if choice not in failing]
        outputs = [EngineOutput(choice.request.id, index, finish_reason="error", error=error) for choice in failing]
        self._deliver_outputs(StepOutputs(outputs, self._update_stats()))

    def _send_to_engine(self, message: ToEngine) -> None:
        """Handle a message at once, as an engine process would. Pages received from other instances have no effect."""
        if self._hangs:
            return
        if isinstance(message, SubmitRequest):
            self._queue_request(message.request)
        elif isinstance(message, CancelRequest):
            for queue in (self._waiting, self._running):
                queue[:] = [c for c in queue if c.request.id != message.id or message.index not in (-1, c.index)]
        elif isinstance(message, FinishBeamSearch):
            finished = [c for c in self._waiting + self._running if c.request.id == message.id]
            self._send_to_engine(CancelRequest(message.id))
            final_outputs = [
                EngineOutput(message.id, choice.index, finish_reason=message.reason) for choice in finished
            ]
            self._deliver_outputs(StepOutputs(final_outputs, self._update_stats()))
        elif isinstance(message, ResetPrefixCache):
            self._deliver_answer(ResetDone(message.id, message.running or not self._running))
        elif isinstance(message, LoadAdapter):
            adapter_exists = (Path(message.folder) / "adapter_config.json").is_file()
            self._deliver_answer(
                AdapterResult(message.id, "" if adapter_exists else "There is no adapter in this folder.")
            )
        elif isinstance(message, UnloadAdapter):
            self._deliver_answer(AdapterResult(message.id))
        elif isinstance(message, ReservePages):
            self._deliver_answer(self._reserve_pages(message))
            self._wakeup.set()
        elif isinstance(message, FreeReservation):
            self._free_pages += self._reservations.pop(message.key, [])
            self._wakeup.set()
        elif isinstance(message, SetPrefillShare):
            self._prefill_share.set_share(message.percent / 100)
        elif isinstance(message, ReleaseLease):
            self._free_pages += self._leases.pop(message.id, [])
            self._wakeup.set()

    def _queue_request(self, request: EngineRequest) -> None:
        """Queue the choices of a request, or end them with the error that the script raises."""
        prior_counts = [len(tokens) for tokens in request.prior_tokens] or [0] * request.n
        try:
            self._waiting += [
                _ScriptedChoice(request, k, self._reply(request, k), prior_counts[k]) for k in range(request.n)
            ]
        except ScriptedFailure as failure:
            outputs = [EngineOutput(request.id, k, finish_reason="error", error=str(failure)) for k in range(request.n)]
            self._deliver_outputs(StepOutputs(outputs, self._update_stats()))
        self._wakeup.set()

    def _reserve_pages(self, message: ReservePages) -> ReserveResponse:
        if message.key in self._reservations:
            return ReserveResponse(message.id, error="Something is reserved under this key already.")
        count = len(message.prefix.token_ids) // self._model_info.page_tokens
        if count > len(self._free_pages):
            return ReserveResponse(message.id, error="There is no capacity for this number of pages.")
        pages = self._reservations[message.key] = [self._free_pages.pop(0) for _ in range(count)]
        return ReserveResponse(message.id, 0, pages)

    def _report_leased_pages(self, request: EngineRequest) -> None:
        """Report the full pages of a request with a lease, whose whole prompt is computed in one step."""
        count = (
            len([*request.token_ids, *(request.prior_tokens[0] if request.prior_tokens else [])])
            // self._model_info.page_tokens
        )
        if count and count <= len(self._free_pages) and request.id not in self._leases:
            pages = self._leases[request.id] = [self._free_pages.pop(0) for _ in range(count)]
            self._deliver_pages(PagesComputed(request.id, pages))

    async def _run_steps(self) -> None:
        """Load, then run a step every ``step_seconds`` while there are requests."""
        if self._load_seconds:
            for part in range(1, 11):
                await asyncio.sleep(self._load_seconds / 10)
                self.progress = LoadProgress("loading", part / 10)
        if self._load_failure is not None:
            self._fail_for_good(self._load_failure)
            return
        self._become_ready(self._model_info)
        while True:
            if not self._waiting and not self._running:
                self._engine_stats.step_tokens = 0
                self._deliver_outputs(StepOutputs([], self._update_stats()))
                self._wakeup.clear()
                await self._wakeup.wait()
            await asyncio.sleep(self._step_seconds)
            await self.step_gate.wait()
            self._run_step()

    def _run_step(self) -> None:
        """Run one step: admit choices, count the prompts as computed, and emit one token of each reply."""
        self._prefill_share.begin_step(len(self._running))
        while self._waiting and len(self._running) < self._max_batch and self._may_run(self._waiting[0]):
            self._running.append(self._waiting.pop(0))
        prefilling = [choice for choice in self._running if choice.awaits_prefill]
        for choice in prefilling:
            if choice.request.lease and choice.index == 0:
                self._report_leased_pages(choice.request)
        prompt_tokens = sum(len(choice.request.token_ids) for choice in prefilling)
        self._engine_stats.step_rows, self._engine_stats.step_prompt_tokens = len(self._running), prompt_tokens
        self._engine_stats.step_tokens = prompt_tokens + len(self._running) - len(prefilling)
        self._prefill_share.charge_prefill(
            sum(len(choice.request.token_ids) for choice in prefilling if not choice.output_count)
        )
        self._prefill_share.observe_step(self._engine_stats.step_tokens / 1000, max(1, self._engine_stats.step_tokens))
        rows = len(self._running)
        outputs = [self._advance_choice(choice, rows) for choice in self._running]
        self._running = [c for c, output in zip(self._running, outputs, strict=True) if output.finish_reason is None]
        self._engine_stats.steps += 1
        self._deliver_outputs(StepOutputs(outputs, self._update_stats()))

    def _may_run(self, choice: _ScriptedChoice) -> bool:
        """Whether the current step may run this choice: decodes always, prefills within the prefill share."""
        return self._prefill_share.allows_prefill or choice.output_count > 0

    def _advance_choice(self, choice: _ScriptedChoice, rows: int) -> EngineOutput:
        """Return the output of a choice in a step with ``rows`` rows: the next token of its reply, or its vector."""
        request, is_first = choice.request, choice.awaits_prefill
        choice.awaits_prefill = False
        ids: list[int] = []
        finish: EngineFinishReason | None = None
        stop_id: int | None = None
        vector: bytes | None = None
        if request.pooling is not None:
            finish, vector = "stop", self._make_vector(request)
        elif request.max_tokens == 0:
            finish = "length"
        elif choice.output_count < len(choice.reply):
            token = choice.reply[choice.output_count]
            choice.output_count += 1
            ids = [token]
            if token in request.stop_ids and choice.output_count > request.min_tokens:
                finish, stop_id = "stop", token
            elif choice.output_count >= request.max_tokens:
                finish = "length"
        else:
            finish = "stop"
        self._engine_stats.generated_tokens += len(ids)
        if is_first and choice.index == 0 and not request.resumed:
            self._engine_stats.prompt_tokens += len(request.token_ids)
        scored = is_first and choice.index == 0 and request.prompt_logprobs >= 0 and not any(request.prior_tokens[:1])
        return EngineOutput(
            request.id,
            choice.index,
            ids,
            scores=[self._token_score(token, request.logprobs, request.logprob_ids) for token in ids]
            if request.logprobs >= 0
            else None,
            finish_reason=finish,
            stop_id=stop_id,
            prompt_scores=[None, *(self._token_score(t, request.prompt_logprobs) for t in request.token_ids[1:])]
            if scored
            else None,
            token_costs=[self._token_cost(choice, rows)] if request.token_costs and ids else None,
            vector=vector,
        )

    def _make_vector(self, request: EngineRequest) -> bytes:
        """Return a vector that depends on the prompt: the counts of its tokens by their id modulo the length of the
        vector, or a vector for each token. In a sparse vector, the weight of a token is its count."""
        assert request.pooling is not None
        if request.pooling.task == "embed_sparse":
            counted = sorted(Counter(request.token_ids).items())
            return b"".join(struct.pack("<If", token, count) for token, count in counted)
        by_token = request.pooling.task in TOKEN_TASKS
        size = self._model_info.dimensions
        if request.pooling.task in ("classify", "token_classify"):
            size = len(self._model_info.labels)
        elif by_token:
            size = self._model_info.token_dimensions or size
        numbers: list[float] = []
        for tokens in ([token] for token in request.token_ids) if by_token else [request.token_ids]:
            counts = [0.0] * size
            for token in tokens:
                counts[token % size] += 1 / len(tokens)
            numbers += counts[: request.pooling.dimensions]
        return struct.pack(f"<{len(numbers)}f", *numbers)

    def _token_cost(self, choice: _ScriptedChoice, rows: int) -> TokenCost:
        """Return the cost of a token. Steps take no time, so all of it was spent waiting."""
        previous, choice.last_token_at = choice.last_token_at, perf_counter()
        return TokenCost(rows, choice.last_token_at - previous, 0.0)

    def _token_score(self, token: int, top: int, token_ids: list[int] | None = None) -> TokenScore:
        """Return invented log-probabilities: the token itself is the most probable, then the ids after it."""
        ids = token_ids or [(token + k) % self._model_info.vocab_size for k in range(top)]
        return TokenScore(-0.5, 1, ids, [-0.5 - k for k in range(len(ids))])

    def _update_stats(self) -> EngineStats:
        """Return the statistics with their gauges brought up to date."""
        self._engine_stats.running = len(self._running)
        self._engine_stats.waiting = len(self._waiting)
        self._engine_stats.pinned_pages = sum(map(len, self._leases.values()))
        self._engine_stats.reserved_pages = sum(map(len, self._reservations.values()))
        self._engine_stats.used_pages = (
            self._engine_stats.pinned_pages
            + self._engine_stats.reserved_pages
            + sum(
                -(-(len(c.request.token_ids) + c.output_count) // self._model_info.page_tokens) for c in self._running
            )
        )
        return self._engine_stats
