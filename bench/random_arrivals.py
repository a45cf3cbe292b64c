"""Traffic on a cluster: random arrivals, with length medians of Azure's published traces.

Prompt and output lengths are log-normal around the medians of coding (1,500 in, 13 out) and chat (1,020 in, 129 out),
with spreads such that the means are 2,048 and 28, 1,155 and 211. Arrivals are a Poisson process. Everything is drawn
from a seed, so compared setups get the same requests, and every rate the same lengths. ``Traffic`` sends the requests
and measures them as clients do.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from parley.cli.client import ServerAddress
from parley.cli.load.generator import LoadConnection, LoadGenerator, RequestSample
from parley.dialects.bench import LoadShape
from parley.worker.simulated_engine import SimulatedCosts

TIMEOUT = 600.0
PATIENCE = 30.0  # seconds that a client waits at most for requests after the last has been sent
STALE = 8  # the first 1/8 of the requests do not count: the cluster has not settled yet


@dataclass(frozen=True)
class Trace:
    """Length distributions: medians, spreads, and the least and most tokens. Requests of ``groups`` groups begin with
    ``shared`` tokens common to their group."""

    name: str
    prompt: int
    spread: float
    output: int
    output_spread: float
    groups: int = 0
    shared: int = 0
    prompt_limits: tuple[int, int] = (4, 6000)
    output_limits: tuple[int, int] = (2, 1000)

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean prompt and output length, before the limits."""
        return self.prompt * math.exp(self.spread**2 / 2), self.output * math.exp(self.output_spread**2 / 2)


CODING = Trace("coding", 1500, 0.79, 13, 1.24)
CHAT = Trace("chat", 1020, 0.50, 129, 0.99)
SHARED = replace(CODING, name="shared", groups=40, shared=2048)


@dataclass(frozen=True)
class TimedRequest:
    """One request. ``at`` is its arrival time, in units of the mean interval between requests."""

    at: float
    prompt: list[int]
    output: int


def draw_requests(trace: Trace, count: int, pool: Sequence[int], seed: int, turn: int) -> Iterator[TimedRequest]:
    """Yield ``count`` requests of a trace. ``pool``: token ids for prompts. Turns share only the groups' prefixes."""
    rng, ids = random.Random(f"{trace.name} {seed}"), random.Random(f"{trace.name} {seed} {turn}")
    groups = [rng.choices(pool, k=trace.shared) for _ in range(trace.groups)]
    for at in accumulate(rng.expovariate(1.0) for _ in range(count)):
        prompt = _draw_length(rng, trace.prompt, trace.spread, trace.prompt_limits)
        output = _draw_length(rng, trace.output, trace.output_spread, trace.output_limits)
        begin = rng.choice(groups) if groups else []
        yield TimedRequest(at, begin + ids.choices(pool, k=prompt), output)


def _draw_length(rng: random.Random, middle: int, spread: float, limits: tuple[int, int]) -> int:
    least, most = limits
    return min(most, max(least, round(rng.lognormvariate(math.log(middle), spread))))


@dataclass(frozen=True)
class Slo:
    """Time limits: seconds to the first token, and mean seconds per token after it, on the cost model's clock."""

    ttft: float
    tpot: float

    @classmethod
    def from_idle_times(cls, trace: Trace, costs: SimulatedCosts, ttft: float, tpot: float) -> Slo:
        """Return multiples of the times that an idle instance takes for a request of median length."""
        length = trace.prompt + trace.shared
        alone = costs.batch_seconds(length) + costs.pair * length**2 / 2
        return cls(ttft * alone, tpot * (costs.batch_seconds(1) + costs.context * length))


@dataclass
class RateResult:
    """The clients' measurements at one rate, of the requests that count. Times are on the cost model's clock."""

    rate: float
    good: float  # share of requests within both limits
    ttft: list[float]
    tpot: list[float]
    tokens: int  # of all requests, one per event received
    cached: float  # share of prompt tokens
    errors: int


class Traffic:
    """Sends requests to a port and reuses its connections. ``patience``: seconds until late ones are given up."""

    def __init__(self, port: int, speed: float, patience: float = PATIENCE):
        self.speed, self._patience = speed, patience
        self._load = LoadGenerator(ServerAddress("http", "127.0.0.1", port, ""), None, LoadShape("m", 1, TIMEOUT))
        self._idle: list[LoadConnection] = []

    async def send_at_rate(self, requests: Sequence[TimedRequest], rate: float, slo: Slo) -> RateResult:
        """Send the requests at ``rate`` per second of the cost model. Late ones are cancelled at the end."""
        encoded_requests = self._encode_requests(requests)
        samples = [RequestSample(0.0) for _ in requests]
        begin = time.perf_counter()
        tasks = []
        for request, encoded_request, sample in zip(requests, encoded_requests, samples, strict=True):
            await asyncio.sleep(begin + request.at / rate / self.speed - time.perf_counter())
            tasks.append(asyncio.create_task(self._send_one(encoded_request, sample)))
        patience = (slo.ttft + slo.tpot * max(request.output for request in requests)) / self.speed
        await asyncio.wait(tasks, timeout=min(patience, self._patience))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sample in samples:
            sample.parse_events(self._load.api)
        return self._judge_samples(requests, samples, rate, slo)

    async def send_in_loop(self, requests: Sequence[TimedRequest], clients: int) -> float:
        """Send the requests with ``clients`` of them always open. Return the requests per second of wall time.

        Raises RuntimeError if one fails.
        """
        waiting = iter(zip(self._encode_requests(requests), requests, strict=True))

        async def send_next_requests() -> None:
            for encoded_request, request in waiting:
                sample = RequestSample(0.0)
                await self._send_one(encoded_request, sample)
                sample.parse_events(self._load.api)
                if sample.error or sample.tokens != request.output:
                    raise RuntimeError(f"a request failed: {sample.error or f'it has {sample.tokens} tokens'}")

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(send_next_requests())
        return len(requests) / (time.perf_counter() - began)

    def _encode_requests(self, requests: Sequence[TimedRequest]) -> list[bytes]:
        encoded_requests = []
        for request in requests:
            self._load.shape = replace(self._load.shape, output_tokens=request.output)
            encoded_requests.append(self._load.encode_request(request.prompt))
        return encoded_requests

    def _judge_samples(
        self, requests: Sequence[TimedRequest], samples: Sequence[RequestSample], rate: float, slo: Slo
    ) -> RateResult:
        counted = list(zip(requests, samples, strict=True))[len(requests) // STALE :]
        good, ttft, tpot = 0, [], []
        for request, sample in counted:
            if not sample.arrivals:
                continue
            first = (sample.arrivals[0] - sample.start) * self.speed
            further = (sample.arrivals[-1] - sample.arrivals[0]) * self.speed / max(1, sample.tokens - 1)
            ttft.append(first)
            if sample.tokens > 1:
                tpot.append(further)
            good += not sample.error and sample.tokens == request.output and first <= slo.ttft and further <= slo.tpot
        whole = [sample for _, sample in counted if sample.prompt_tokens]
        prompts = sum(sample.prompt_tokens for sample in whole)
        return RateResult(
            rate,
            good / len(counted),
            ttft,
            tpot,
            sum(len(sample.arrivals) for sample in samples),
            sum(sample.cached_tokens for sample in whole) / max(1, prompts),
            sum(sample.status not in (0, 200) for sample in samples),
        )

    async def _send_one(self, request: bytes, sample: RequestSample) -> None:
        sample.start = time.perf_counter()
        connection: LoadConnection | None = None
        try:
            while self._idle and (connection is None or not connection.is_open):
                connection = self._idle.pop()
            if connection is None or not connection.is_open:
                connection = await self._load._open_connection()
            await connection.send_request(request, sample)
        except asyncio.CancelledError:
            sample.error = "late"
            if connection is not None:
                connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
