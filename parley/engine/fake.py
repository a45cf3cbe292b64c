"""A scripted engine without a model, for testing the whole server; its cost per token is nearly zero.

Clients cannot tell it from a real one: requests wait for one of ``max_batch`` slots, each step generates one token for
every running choice, cancelled requests generate nothing more. The tokens are a function of the request. KV pages are
mere numbers: leases and reservations hold some of them, and there are never prefix hits. For the prefill share, a token
counts as a millisecond.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from parley.core.prefill_share import Quota
from parley.engine.messages import (
    Cancel,
    Changed,
    Conclude,
    Divide,
    Filled,
    Free,
    LoadAdapter,
    Outputs,
    Progress,
    Release,
    Reserve,
    Reserved,
    Reset,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wiped,
)
from parley.engine.protocol import Engine
from parley.types import Cost, Finish, ModelInfo, Output, Score, Stats, Work

Reply = Callable[[Work, int], list[int]]

FAKE = ModelInfo(
    architecture="fake",
    dtype="none",
    device="none",
    parameters=0,
    vocab_size=512,
    max_model_len=4096,
    weights_bytes=0,
    kv_bytes=0,
    kv_blocks=4096,
    block_size=16,
    lowered=False,
    dimensions=8,
)


def echo(work: Work, index: int) -> list[int]:
    """Return the default reply: the prompt's own tokens, repeated up to ``max_tokens``."""
    return [work.token_ids[i % len(work.token_ids)] for i in range(work.max_tokens)]


@dataclass
class _Choice:
    work: Work
    index: int
    reply: list[int]
    drawn: int = 0
    fresh: bool = True  # its prefill has not run yet
    since: float = field(default_factory=perf_counter)


class FakeEngine(Engine):
    """``reply(request, index)`` returns the tokens of a choice.

    A choice finishes early at a stop id, or with "stop" where the list ends. ``step_seconds``: time
    between steps (0: as fast as the event loop turns). ``step_gate``: no step runs while it is cleared, so that a test
    can hold requests in the queue or between tokens. ``load_seconds``: time that loading takes. ``load_failure``: error
    that loading ends with.
    """

    scripted = True

    def __init__(
        self,
        reply: Reply = echo,
        *,
        info: ModelInfo = FAKE,
        max_batch: int = 256,
        tick: float = 0.0,
        load: float = 0.0,
        failure: str | None = None,
    ):
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self._reply = reply
        self._model = info
        self._max_batch = max_batch
        self._tick = tick
        self._load = load
        self._load_failure = failure
        self._waiting: list[_Choice] = []
        self._running: list[_Choice] = []
        self._quota = Quota()
        self._counts = Stats(blocks_total=info.kv_blocks)
        self._pages = list(range(info.kv_blocks))  # free pages
        self._leases: dict[str, list[int]] = {}
        self._reservations: dict[str, list[int]] = {}
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the task that loads and then runs steps."""
        self._begin()
        self._tasks = [asyncio.create_task(self._run())]

    async def close(self) -> None:
        """Stop the task; open streams end with an error."""
        self.state = "closed"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._closed("The engine was closed.")

    def crash(self, reason: str = "The engine process was killed.") -> None:
        """Lose all requests, as if an engine process had died and was not restarted."""
        self._waiting, self._running = [], []
        self._leases, self._reservations, self._pages = {}, {}, list(range(self._model.kv_blocks))
        self._give_up(reason)

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            work = message.work
            given = [len(tokens) for tokens in work.given] or [0] * work.n
            self._waiting += [_Choice(work, k, self._reply(work, k), given[k]) for k in range(work.n)]
            self._work.set()
        elif isinstance(message, Cancel):
            for queue in (self._waiting, self._running):
                queue[:] = [c for c in queue if c.work.id != message.id or message.index not in (-1, c.index)]
        elif isinstance(message, Conclude):
            ended = [c for c in self._waiting + self._running if c.work.id == message.id]
            self._send(Cancel(message.id))
            last = [Output(message.id, choice.index, finish=message.reason) for choice in ended]
            self._deliver(Outputs(last, self._stats()))
        elif isinstance(message, Reset):
            self._answered(Wiped(message.id, message.running or not self._running))
        elif isinstance(message, LoadAdapter):
            there = (Path(message.folder) / "adapter_config.json").is_file()
            self._answered(Changed(message.id, "" if there else "There is no adapter in this folder."))
        elif isinstance(message, UnloadAdapter):
            self._answered(Changed(message.id))
        elif isinstance(message, Reserve):
            self._answered(self._reserve(message))
            self._work.set()
        elif isinstance(message, Free):
            self._pages += self._reservations.pop(message.key, [])
            self._work.set()
        elif isinstance(message, Divide):
            self._quota.divide(message.percent / 100)
        elif isinstance(message, Release):
            self._pages += self._leases.pop(message.id, [])
            self._work.set()

    def _reserve(self, message: Reserve) -> Reserved:
        if message.key in self._reservations:
            return Reserved(message.id, error="Something is reserved under this key already.")
        count = len(message.token_ids) // self._model.block_size
        if count > len(self._pages):
            return Reserved(message.id, error="There is no capacity for so many pages.")
        pages = self._reservations[message.key] = [self._pages.pop(0) for _ in range(count)]
        return Reserved(message.id, 0, pages)

    def _lease(self, work: Work) -> None:
        """Report the full pages of a request with a lease, whose whole prompt is computed in one step."""
        count = len([*work.token_ids, *(work.given[0] if work.given else [])]) // self._model.block_size
        if count and count <= len(self._pages) and work.id not in self._leases:
            pages = self._leases[work.id] = [self._pages.pop(0) for _ in range(count)]
            self._filled(Filled(work.id, pages))

    async def _run(self) -> None:
        if self._load:
            for part in range(1, 11):
                await asyncio.sleep(self._load / 10)
                self.progress = Progress("loading", part / 10)
        if self._load_failure is not None:
            self._give_up(self._load_failure)
            return
        self._serve(self._model)
        while True:
            if not self._waiting and not self._running:
                self._counts.step_tokens = 0
                self._deliver(Outputs([], self._stats()))
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self._tick)
            await self.gate.wait()
            self._step()

    def _step(self) -> None:
        self._quota.begin(len(self._running))
        while self._waiting and len(self._running) < self._max_batch and self._may(self._waiting[0]):
            self._running.append(self._waiting.pop(0))
        fresh = [choice for choice in self._running if choice.fresh]
        for choice in fresh:
            if choice.work.lease and choice.index == 0:
                self._lease(choice.work)
        read = sum(len(choice.work.token_ids) for choice in fresh)
        self._counts.step_rows, self._counts.step_prompt = len(self._running), read
        self._counts.step_tokens = read + len(self._running) - len(fresh)
        self._quota.take(sum(len(choice.work.token_ids) for choice in fresh if not choice.drawn))
        self._quota.observe(self._counts.step_tokens / 1000, max(1, self._counts.step_tokens))
        rows = len(self._running)
        outputs = [self._advance(choice, rows) for choice in self._running]
        self._running = [c for c, output in zip(self._running, outputs, strict=True) if output.finish is None]
        self._counts.steps += 1
        self._deliver(Outputs(outputs, self._stats()))

    def _may(self, choice: _Choice) -> bool:
        """Whether the current step may run this choice: decodes always, prefills within the prefill share."""
        return self._quota.open or choice.drawn > 0

    def _advance(self, choice: _Choice, rows: int) -> Output:
        work, first = choice.work, choice.fresh
        choice.fresh = False
        ids: list[int] = []
        finish: Finish | None = None
        stop_id: int | None = None
        vector: bytes | None = None
        if work.pooling is not None:
            finish, vector = "stop", self._vector(work)
        elif work.max_tokens == 0:
            finish = "length"
        elif choice.drawn < len(choice.reply):
            token = choice.reply[choice.drawn]
            choice.drawn += 1
            ids = [token]
            if token in work.stop_ids and choice.drawn > work.min_tokens:
                finish, stop_id = "stop", token
            elif choice.drawn >= work.max_tokens:
                finish = "length"
        else:
            finish = "stop"
        self._counts.generated_tokens += len(ids)
        if first and choice.index == 0 and not work.begun:
            self._counts.prompt_tokens += len(work.token_ids)
        scored = first and choice.index == 0 and work.prompt_logprobs >= 0 and not any(work.given[:1])
        return Output(
            work.id,
            choice.index,
            ids,
            scores=[self._score(token, work.logprobs, work.named) for token in ids] if work.logprobs >= 0 else None,
            finish=finish,
            stop_id=stop_id,
            prompt_scores=[None, *(self._score(t, work.prompt_logprobs) for t in work.token_ids[1:])]
            if scored
            else None,
            costs=[self._cost(choice, rows)] if work.costs and ids else None,
            vector=vector,
        )

    def _vector(self, work: Work) -> bytes:
        """Return made-up numbers that depend on the prompt: the frequency of its tokens by residue."""
        size = self._model.dimensions
        counts = [0.0] * size
        for token in work.token_ids:
            counts[token % size] += 1 / len(work.token_ids)
        assert work.pooling is not None
        counts = counts[: work.pooling.dimensions]
        return struct.pack(f"<{len(counts)}f", *counts)

    def _cost(self, choice: _Choice, rows: int) -> Cost:
        """Return the cost of a token. Steps take no time, so all of it was spent waiting."""
        before, choice.since = choice.since, perf_counter()
        return Cost(rows, choice.since - before, 0.0)

    def _score(self, token: int, top: int, named: list[int] | None = None) -> Score:
        """Return plausible made-up logprobs: the token itself is the most probable one, its successors follow."""
        ids = named or [(token + k) % self._model.vocab_size for k in range(top)]
        return Score(-0.5, 1, ids, [-0.5 - k for k in range(len(ids))])

    def _stats(self) -> Stats:
        self._counts.running = len(self._running)
        self._counts.waiting = len(self._waiting)
        self._counts.pinned = sum(map(len, self._leases.values()))
        self._counts.reserved = sum(map(len, self._reservations.values()))
        self._counts.blocks_used = (
            self._counts.pinned
            + self._counts.reserved
            + sum(-(-(len(c.work.token_ids) + c.drawn) // self._model.block_size) for c in self._running)
        )
        return self._counts
