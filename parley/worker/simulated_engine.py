"""A simulated engine for measuring the code around engines: its steps take as long as a model's, but compute nothing.

Only the model runner is simulated. Queue, chunked prefill, pages, prefix cache, leases, reservations and the process
are real. The runner waits for the time that a cost model gives for the step, and generates the prompt's own tokens in
order. Pages have no content, so pages from other instances arrive when a link of a given bandwidth would have delivered
them. This module uses no tensors. Requests for other features than ``SIMULATED_FEATURES`` are refused by name.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

import msgspec

from parley.core.engine_loop import EngineLoop
from parley.core.sequence import (
    PAGE_SIZE,
    DraftProposer,
    LoadedAdapter,
    MediaEncoder,
    RowResult,
    Sequence,
    Step,
    StepRow,
    StepStarter,
)
from parley.engine.messages import (
    CancelRequest,
    EngineFatal,
    EngineReady,
    FinishBeamSearch,
    FreeReservation,
    PagesComputed,
    PagesReceived,
    ReleaseLease,
    StepOutputs,
    SubmitRequest,
)
from parley.heartbeat import BEAT_SECONDS, beat
from parley.types import Arena, EngineFeature, EngineRequest, ModelInfo, ParleySettings, PoolingTask
from parley.worker.messages_loop import EngineInbox, SendMessage, serve_messages

# Two steps with at most this many seconds between them count as back to back, since a busy machine adds delays.
BACK_TO_BACK_SECONDS = 0.005


# Minimum lengths are work of the engine's loop. No other feature that changes tokens is offered, because no token is
# drawn.
SIMULATED_FEATURES: frozenset[EngineFeature] = frozenset({"min_tokens", "cache_salt", "page_transfer"})


class SimulatedCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost model of a simulated engine, in seconds. A TOML file has the same names. Raises ValueError.

    The time of a step of n tokens is interpolated linearly in ``rows``, a list of (tokens, seconds), and extrapolated
    above the last one. Each context token of a decode adds ``context``, each pair of a prompt token and an earlier
    token ``pair``. ``blocks``: pages of the KV cache; ``length``: longest sequence in tokens. The KV of a token has
    ``token_bytes``; ``bandwidth`` bytes arrive from other instances per second (0: unlimited), ``latency`` seconds
    after they were sent. ``speed``: simulated seconds per real second.
    """

    rows: list[tuple[int, float]]
    blocks: int
    length: int
    context: float = 0.0
    pair: float = 0.0
    token_bytes: int = 0
    bandwidth: float = 0.0
    latency: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        tokens, seconds = [row[0] for row in self.rows], [row[1] for row in self.rows]
        if len(tokens) < 2 or tokens != sorted(set(tokens)) or seconds != sorted(seconds) or seconds[0] < 0:
            raise ValueError("rows must have at least two items, with increasing tokens and no decreasing seconds")
        if min(self.context, self.pair, self.token_bytes, self.bandwidth, self.latency) < 0 or self.speed <= 0:
            raise ValueError("costs cannot be negative, and speed must be above 0")
        if self.blocks < 1 or self.length < 1:
            raise ValueError("blocks and length must be at least 1")

    def batch_seconds(self, tokens: int) -> float:
        """Return the seconds of a step of this number of tokens, without attention."""
        segment = min(max(1, bisect_right(self.rows, tokens, key=lambda row: row[0])), len(self.rows) - 1)
        (fewer_tokens, fewer_seconds), (more_tokens, more_seconds) = self.rows[segment - 1 : segment + 1]
        return fewer_seconds + (more_seconds - fewer_seconds) * max(0, tokens - fewer_tokens) / (
            more_tokens - fewer_tokens
        )

    def step_seconds(self, rows: list[StepRow]) -> float:
        """Return the seconds of a step with these rows."""
        decode_context = sum(row.start + 1 for row in rows if row.count == 1)
        pairs = sum(row.count * (row.start + (row.count + 1) / 2) for row in rows if row.count > 1)
        return (
            self.batch_seconds(sum(row.token_count for row in rows)) + self.context * decode_context + self.pair * pairs
        )

    def transfer_seconds(self, pages: int) -> float:
        """Return the seconds that these pages occupy a link."""
        return pages * PAGE_SIZE * self.token_bytes / self.bandwidth if self.bandwidth else 0.0


def read_costs(file: str) -> SimulatedCosts:
    """Read a cost model from a TOML file. Raises OSError, MsgspecError."""
    with open(file, "rb") as source:
        return msgspec.toml.decode(source.read(), type=SimulatedCosts)


class SimulatedRunner:
    """A ``core.sequence.ModelRunner`` that waits instead of computing. Logprobs and beams are errors."""

    vocab_size = 1 << 24  # large enough for any tokenizer
    generates = True
    dimensions = token_dimensions = 0
    pooling_tasks: frozenset[PoolingTask] = frozenset()
    long_rope_after = inf
    state_slots: int | None = None
    snapshot_slots = 0
    starter: StepStarter | None = None
    proposer: DraftProposer | None = None
    media_encoder: MediaEncoder | None = None

    def __init__(self, costs: SimulatedCosts):
        self.costs = costs
        self.page_count = costs.blocks
        self.max_model_len = costs.length
        self._step_ends_at = 0.0  # when the last step ended, or should have

    def load_adapter(self, folder: str) -> LoadedAdapter:
        """Raise ValueError: there are no adapters."""
        raise ValueError("A simulated engine has no adapters.")

    def prepare_request(self, request: EngineRequest) -> Callable[[], None] | None:
        """Prepare nothing."""
        return None

    def admit_sequence(self, sequence: Sequence) -> None:
        """Keep no state for the sequence."""

    def release_slot(self, sequence: Sequence) -> None:
        """Free nothing."""

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Copy nothing."""

    def copy_state(self, source: Sequence, target: Sequence) -> None:
        """Copy nothing."""

    def run_step(self, step: Step) -> list[RowResult]:
        """Wait until the step would have ended. It begins at the end of the previous one if that was just now."""
        now = time.perf_counter()
        self._step_ends_at = (
            self._step_ends_at if now - self._step_ends_at < BACK_TO_BACK_SECONDS else now
        ) + self.costs.step_seconds(step.rows) / self.costs.speed
        while (remaining := self._step_ends_at - time.perf_counter()) > 0:
            beat()
            time.sleep(min(BEAT_SECONDS, remaining))
        return [_row_result(row) for row in step.rows]


def _row_result(row: StepRow) -> RowResult:
    sequence, request = row.sequence, row.sequence.request
    if request.beam is not None or request.logprobs >= 0 or request.prompt_logprobs >= 0:
        return RowResult(error="A simulated engine returns tokens only, without logprobs or beam search.")
    return RowResult([sequence.tokens[sequence.output_length % sequence.prompt_len]] if row.sample else [])


class SimulatedLink:
    """Simulates the link from other instances: pages arrive one after the other, at the link's bandwidth.

    Later messages for the same key arrive no earlier than its pages. Times are those of a monotonic clock.
    """

    def __init__(self, costs: SimulatedCosts):
        self._costs = costs
        self._idle_at = 0.0  # when the link becomes idle
        self._arrivals: dict[str, tuple[int, float]] = {}  # by key: number of received pages, and their arrival

    def delivery_time(self, message: Any, now: float) -> float:
        """Return the time when the message has to be delivered."""
        match message:
            case PagesReceived(key, pages):
                costs, (received_count, _) = self._costs, self._arrivals.get(key, (0, now))
                self._idle_at = max(self._idle_at, now) + costs.transfer_seconds(pages - received_count) / costs.speed
                arrival = self._idle_at + costs.latency / costs.speed
                self._arrivals[key] = pages, arrival
                return arrival
            case FreeReservation(key):
                return self._arrivals.pop(key, (0, now))[1]
            case SubmitRequest(request):
                return self._arrivals.get(request.id, (0, now))[1]
            case CancelRequest(request_id) | FinishBeamSearch(request_id) | ReleaseLease(request_id):
                return self._arrivals.get(request_id, (0, now))[1]
        return now

    def deliver_messages(self, inbox: EngineInbox, outbox: EngineInbox) -> None:
        """Deliver messages for ever, each when it is due; runs in a thread."""
        scheduled: list[tuple[float, int, Any]] = []
        number = count()
        while True:
            now = time.monotonic()
            while scheduled and scheduled[0][0] <= now:
                outbox.put(heapq.heappop(scheduled)[2])
            try:
                message = inbox.get(timeout=scheduled[0][0] - now if scheduled else None)
            except queue.Empty:
                continue
            due_at = self.delivery_time(message, time.monotonic())
            if due_at <= time.monotonic() and not scheduled:
                outbox.put(message)
            else:
                heapq.heappush(scheduled, (due_at, next(number), message))


def run_simulated(settings: ParleySettings, inbox: EngineInbox, send: SendMessage) -> None:
    """Serve messages like ``process.run_engine``, with the cost model that the settings name."""
    try:
        costs = read_costs(settings.costs)
    except (OSError, msgspec.MsgspecError) as error:
        send(EngineFatal(f"The cost model {settings.costs} cannot be read: {error}"))
        return
    delivered_inbox: EngineInbox = queue.SimpleQueue()
    threading.Thread(
        target=SimulatedLink(costs).deliver_messages, args=(inbox, delivered_inbox), name="link", daemon=True
    ).start()
    loop = EngineLoop(
        SimulatedRunner(costs),
        settings,
        lambda outputs, stats: send(StepOutputs(outputs, stats)),
        on_pages_leased=lambda request_id, pages: send(PagesComputed(request_id, pages)),
    )
    send(EngineReady(_simulated_info(costs, loop)))
    serve_messages(loop, loop.pinned_pages, delivered_inbox, send)


def _simulated_info(costs: SimulatedCosts, loop: EngineLoop) -> ModelInfo:
    return ModelInfo(
        architecture="simulated",
        dtype="none",
        device="none",
        parameters=0,
        vocab_size=loop.runner.vocab_size,
        max_model_len=loop.max_context,
        weights_bytes=0,
        kv_bytes=0,
        kv_pages=costs.blocks,
        page_tokens=PAGE_SIZE,
        fused=False,
        arena=Arena(0, -1, costs.blocks, [], "simulated"),
        engine="simulated",
        features=SIMULATED_FEATURES,
    )
