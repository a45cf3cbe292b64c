"""A simulated engine for measuring the code around engines: its steps last as long as a model's but compute nothing.

All but the model runner is real: queue, chunked prefill, pages, prefix cache, leases, reservations, and the process.
The runner waits for the time that a cost model gives for the step, and generates the prompt's own tokens in order.
Pages have no content, so pages from other instances arrive when a link of a given bandwidth would have delivered them.
This module uses no tensors.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from parley.core.loop import Loop
from parley.core.sequence import BLOCK_SIZE, Adapter, Proposer, Row, Sampled, Sequence, Step
from parley.engine.messages import Cancel, Conclude, Fatal, Filled, Free, Landed, Outputs, Ready, Release, Submit
from parley.types import Arena, ModelInfo, Settings, Work
from parley.worker.messages_loop import Inbox, Send, serve

LATE = 0.005  # seconds between two steps that still count as back to back, since a busy machine adds delays


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost model of a simulated engine, in seconds. A TOML file has the same names. Raises ValueError.

    The time of a step of n tokens is interpolated linearly in ``rows``, a list of (tokens, seconds), and extrapolated
    above the last one. Each context token of a decode adds ``context``, each pair of a prompt token and an earlier
    token ``pair``. ``blocks``: pages of the KV cache; ``length``: longest sequence in tokens. The KV of a token has
    ``token_bytes``; ``bandwidth`` of them arrive from other instances per second, ``latency`` after they were sent (0:
    unlimited). ``speed``: simulated seconds per real second.
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
        tokens, seconds = [each[0] for each in self.rows], [each[1] for each in self.rows]
        if len(tokens) < 2 or tokens != sorted(set(tokens)) or seconds != sorted(seconds) or seconds[0] < 0:
            raise ValueError("rows must have at least two items, with increasing tokens and no decreasing seconds")
        if min(self.context, self.pair, self.token_bytes, self.bandwidth, self.latency) < 0 or self.speed <= 0:
            raise ValueError("costs cannot be negative, and speed must be above 0")
        if self.blocks < 1 or self.length < 1:
            raise ValueError("blocks and length must be at least 1")

    def batch(self, tokens: int) -> float:
        """Return the seconds of a step of this number of tokens, without attention."""
        at = min(max(1, bisect_right(self.rows, tokens, key=lambda each: each[0])), len(self.rows) - 1)
        (fewer, less), (more, longer) = self.rows[at - 1 : at + 1]
        return less + (longer - less) * max(0, tokens - fewer) / (more - fewer)

    def step(self, rows: list[Row]) -> float:
        """Return the seconds of a step with these rows."""
        looked = sum(row.start + 1 for row in rows if row.count == 1)
        pairs = sum(row.count * (row.start + (row.count + 1) / 2) for row in rows if row.count > 1)
        return self.batch(sum(row.width for row in rows)) + self.context * looked + self.pair * pairs

    def transfer(self, pages: int) -> float:
        """Return the seconds that these pages occupy a link."""
        return pages * BLOCK_SIZE * self.token_bytes / self.bandwidth if self.bandwidth else 0.0


def read(file: str) -> Costs:
    """Read a cost model from a TOML file. Raises OSError, MsgspecError."""
    with open(file, "rb") as source:
        return msgspec.toml.decode(source.read(), type=Costs)


class Runner:
    """A ``core.sequence.ModelRunner`` that waits instead of computing. Logprobs and beams are errors."""

    vocab_size = 1 << 24  # large enough for any tokenizer
    generates = True
    dimensions = 0
    proposer: Proposer | None = None

    def __init__(self, costs: Costs):
        self.costs = costs
        self.blocks = costs.blocks
        self.max_model_len = costs.length
        self._due = 0.0  # when the last step ended, or should have

    def fetch(self, folder: str) -> Adapter:
        """Raise ValueError: there are no adapters."""
        raise ValueError("A simulated engine has no adapters.")

    def prepare(self, work: Work) -> Callable[[], None] | None:
        """Prepare nothing."""
        return None

    def admit(self, sequence: Sequence) -> None:
        """Keep no state for the sequence."""

    def release(self, sequence: Sequence) -> None:
        """Free nothing."""

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Copy nothing."""

    def run(self, step: Step) -> list[Sampled]:
        """Wait for the duration of the step, counted from the end of the previous one if that was just now."""
        now = time.perf_counter()
        self._due = (self._due if now - self._due < LATE else now) + self.costs.step(step.rows) / self.costs.speed
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return [_drawn(row) for row in step.rows]


def _drawn(row: Row) -> Sampled:
    sequence, work = row.sequence, row.sequence.work
    if work.beam is not None or work.logprobs >= 0 or work.prompt_logprobs >= 0:
        return Sampled(error="A simulated engine returns tokens only, without logprobs or beam search.")
    return Sampled([sequence.tokens[sequence.generated % sequence.prompt_len]] if row.sample else [])


class Link:
    """Simulates the link from other instances: pages arrive one after the other, at the link's bandwidth.

    Later messages for the same key arrive no earlier than its pages. Times are those of a monotonic clock.
    """

    def __init__(self, costs: Costs):
        self._costs = costs
        self._free = 0.0  # when the link becomes idle
        self._landed: dict[str, tuple[int, float]] = {}  # by key: number of received pages, and their arrival

    def due(self, message: Any, now: float) -> float:
        """Return the time at which the message has to be delivered."""
        match message:
            case Landed(key, pages):
                costs, (before, _) = self._costs, self._landed.get(key, (0, now))
                self._free = max(self._free, now) + costs.transfer(pages - before) / costs.speed
                when = self._free + costs.latency / costs.speed
                self._landed[key] = pages, when
                return when
            case Free(key):
                return self._landed.pop(key, (0, now))[1]
            case Submit(work):
                return self._landed.get(work.id, (0, now))[1]
            case Cancel(id) | Conclude(id) | Release(id):
                return self._landed.get(id, (0, now))[1]
        return now

    def pass_on(self, inbox: Inbox, outbox: Inbox) -> None:
        """Deliver messages for ever, each when it is due; runs in a thread."""
        late: list[tuple[float, int, Any]] = []
        number = count()
        while True:
            now = time.monotonic()
            while late and late[0][0] <= now:
                outbox.put(heapq.heappop(late)[2])
            try:
                message = inbox.get(timeout=late[0][0] - now if late else None)
            except queue.Empty:
                continue
            due = self.due(message, time.monotonic())
            if due <= time.monotonic() and not late:
                outbox.put(message)
            else:
                heapq.heappush(late, (due, next(number), message))


def work(settings: Settings, inbox: Inbox, send: Send) -> None:
    """Serve messages like ``process.run_engine``, with the cost model that the settings name."""
    try:
        costs = read(settings.costs)
    except (OSError, msgspec.MsgspecError) as error:
        send(Fatal(f"The cost model {settings.costs} cannot be read: {error}"))
        return
    delivered: Inbox = queue.SimpleQueue()
    threading.Thread(target=Link(costs).pass_on, args=(inbox, delivered), name="link", daemon=True).start()
    loop = Loop(
        Runner(costs),
        settings,
        lambda outputs, stats: send(Outputs(outputs, stats)),
        filled=lambda id, pages: send(Filled(id, pages)),
    )
    send(Ready(_info(costs, loop)))
    serve(loop, loop.holds, delivered, send)


def _info(costs: Costs, loop: Loop) -> ModelInfo:
    return ModelInfo(
        architecture="simulated",
        dtype="none",
        device="none",
        parameters=0,
        vocab_size=loop.runner.vocab_size,
        max_model_len=loop.context,
        weights_bytes=0,
        kv_bytes=0,
        kv_blocks=costs.blocks,
        block_size=BLOCK_SIZE,
        lowered=False,
        arena=Arena(0, -1, costs.blocks, [], "simulated"),
    )
