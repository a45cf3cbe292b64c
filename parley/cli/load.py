"""The load generator: many concurrent streams over raw sockets with little work, measured as their clients see them.

Bytes are stamped with their time of arrival and parsed only after the last request has ended, so that the generator
uses little of the CPU that it measures. ``bench`` of each dialect knows its requests and events.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httptools

from parley.cli.apis import BENCHED_APIS
from parley.cli.client import ServerAddress
from parley.dialects.bench import BenchApi, LoadShape, error_message

CONNECTION_CLOSED = "the connection was closed before the answer was complete"


@dataclass
class RequestSample:
    """One request. Times are seconds of a monotonic clock; ``arrivals`` has those of events with output."""

    start: float
    end: float = 0.0
    status: int = 0
    error: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0

    def parse_events(self, api: BenchApi) -> None:
        """Turn the stamped bytes into times, token counts and, if the stream did not end well, an error."""
        complete = False
        for when, data in api.split_events(self.pieces):
            try:
                event = api.read_event(data)
            except (ValueError, AttributeError, TypeError):
                self.error = self.error or "an event that is not JSON"
                continue
            complete = complete or event.last
            self.error = self.error or event.error
            if event.output:
                self.arrivals.append(when)
            self.prompt_tokens = max(self.prompt_tokens, event.prompt_tokens)
            self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
            self.tokens += event.output_tokens
        if self.status and self.status != 200:
            self.error = f"status {self.status}: {self._refusal_message()}"
        elif not complete:
            self.error = self.error or CONNECTION_CLOSED
        elif not self.tokens:
            self.error = self.error or "a stream without tokens or without a usage record"
        self.pieces.clear()

    def _refusal_message(self) -> str:
        body = b"".join(piece for _, piece in self.pieces)[:2000]
        try:
            return error_message(json.loads(body)) or "no reason given"
        except ValueError:
            return "no reason given"


class LoadConnection(asyncio.Protocol):
    """One socket to the server, reused for requests as long as the server keeps it open."""

    def __init__(self) -> None:
        self.is_open = False
        self._sample: RequestSample | None = None
        self._done: asyncio.Future[None] | None = None
        self._has_headers = False
        self._transport: asyncio.Transport
        self._parser: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a response without a length as well. Its events tell whether it is complete."""
        self.is_open = False
        self._finish_sample("" if self._has_headers else CONNECTION_CLOSED)

    async def send_request(self, request: bytes, sample: RequestSample) -> None:
        """Send a request, and stamp the response into ``sample`` until it is complete."""
        self._sample = sample
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._has_headers = False
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        """Drop the connection. The current sample is left as it is."""
        self.is_open, self._sample = False, None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse data of a response, stamped with the present time. Bytes that are not HTTP end the connection."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish_sample(f"not an HTTP answer ({type(error).__name__})")
            self.close()

    def on_headers_complete(self) -> None:
        """Note that the response has headers, so that a closed connection may end it."""
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body to the sample, with its time of arrival."""
        if self._sample is not None:
            self._sample.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """End the sample, and close the connection unless the server keeps it open."""
        keep = self._parser.should_keep_alive()
        self._finish_sample("")
        if not keep:
            self.close()

    def _finish_sample(self, error: str) -> None:
        sample, self._sample = self._sample, None
        if sample is None or self._done is None or self._done.done():
            return
        sample.end = time.perf_counter()
        sample.error = error
        if not error:
            sample.status = self._parser.get_status_code()
        self._done.set_result(None)


class LoadGenerator:
    """A load on one server. ``keep_alive``: reuse connections, which some servers close after a stream."""

    def __init__(
        self,
        address: ServerAddress,
        key: str | None,
        shape: LoadShape,
        api: BenchApi = BENCHED_APIS["openai"],
        keep_alive: bool = True,
    ):
        self.address = address
        self.shape = shape
        self.keep_alive = keep_alive
        self.api = api
        path = address.path + self.api.path.format(model=quote(shape.model, safe=""))
        self._head = (f"POST {path} HTTP/1.1\r\nHost: {address.authority}\r\nContent-Type: application/json\r\n") + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    def encode_request(self, prompt: Any) -> bytes:
        """Return the bytes of one request. They are encoded before the measurement starts."""
        body = json.dumps(self.api.build_body(self.shape, prompt)).encode()
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def run_load(
        self, prompts: Sequence[Any], concurrency: int, samples: list[RequestSample] | None = None
    ) -> tuple[list[RequestSample], float]:
        """Send every prompt, ``concurrency`` at a time. Return the sample of each, and the seconds that all took.

        ``samples``: a list to fill, for a caller that watches the progress.
        """
        queue = deque(map(self.encode_request, prompts))
        samples = [] if samples is None else samples
        begin = time.perf_counter()
        await asyncio.gather(*(self._run_client(queue, samples) for _ in range(min(concurrency, len(prompts)))))
        wall = time.perf_counter() - begin
        for sample in samples:
            sample.parse_events(self.api)
        return samples, wall

    async def _run_client(self, queue: deque[bytes], samples: list[RequestSample]) -> None:
        connection: LoadConnection | None = None
        while queue:
            request = queue.popleft()
            samples.append(sample := RequestSample(time.perf_counter()))
            try:
                async with asyncio.timeout(self.shape.timeout):
                    if connection is None or not connection.is_open:
                        connection = await self._open_connection()
                    await connection.send_request(request, sample)
            except TimeoutError:
                sample.error = f"no complete answer within {self.shape.timeout:g} s"
            except OSError as error:
                sample.error = f"cannot connect ({type(error).__name__})"
            if connection is not None and (sample.error or not self.keep_alive):
                connection.close()
        if connection is not None and connection.is_open:
            connection.close()

    async def _open_connection(self) -> LoadConnection:
        secure = ssl.create_default_context() if self.address.scheme == "https" else None
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(LoadConnection, self.address.host, self.address.port, ssl=secure))[1]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values do not exceed, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]


def summarize_load(samples: Sequence[RequestSample], wall: float, concurrency: int, shape: LoadShape) -> dict[str, Any]:
    """Return the measurements of one load: times in ms, rates per second. Failed requests count only as errors.

    TTFT: from sending to the first output. ITL: between two events with output. TPOT: from first to last output, per
    token after the first. ``each``: a request's own tokens per second; 99 % of the requests reach its p99.
    """
    successes = [sample for sample in samples if not sample.error]
    times = {
        "ttft_ms": [s.arrivals[0] - s.start for s in successes if s.arrivals],
        "tpot_ms": [
            (s.arrivals[-1] - s.arrivals[0]) / (s.tokens - 1) for s in successes if s.arrivals and s.tokens > 1
        ],
        "itl_ms": [
            after - before for s in successes for before, after in zip(s.arrivals, s.arrivals[1:], strict=False)
        ],
        "latency_ms": [s.end - s.start for s in successes],
    }
    slowness = [(s.end - s.start) / s.tokens for s in successes]
    tokens, prompt = sum(s.tokens for s in successes), sum(s.prompt_tokens for s in successes)
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "errors": len(samples) - len(successes),
        "reasons": dict(Counter(s.error for s in samples if s.error).most_common()),
        "short": sum(s.tokens < shape.output_tokens for s in successes),
        "seconds": round(wall, 6),
        "prompt_tokens": prompt,
        "cached_tokens": sum(s.cached_tokens for s in successes),
        "output_tokens": tokens,
        **{name: _percentiles_ms(values) for name, values in times.items()},
        "each_tokens_per_second": {
            name: None if (value := percentile(slowness, share)) is None else round(1 / value, 2)
            for name, share in (("p50", 0.5), ("p99", 0.99))
        },
        "output_tokens_per_second": round(tokens / wall, 2),
        "tokens_per_second": round((prompt + tokens) / wall, 2),
        "requests_per_second": round(len(successes) / wall, 3),
    }


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    points = {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    points["mean"] = sum(seconds) / len(seconds) if seconds else None
    return {name: None if value is None else round(value * 1000, 3) for name, value in points.items()}
