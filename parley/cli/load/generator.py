"""The load generator: many concurrent streams over raw sockets with little work, measured as their clients see them.

Bytes are stamped with their time of arrival and parsed only after the last request has ended, so that the generator
uses little of the CPU that it measures. ``bench`` of each dialect knows its requests and events.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any
from urllib.parse import quote

import httptools

from parley.cli.apis import BENCHED_APIS
from parley.cli.client import ServerAddress
from parley.dialects.bench import BenchApi, LoadShape, error_message
from parley.errors import failure_reason

PreparedRequest = tuple[bytes, int]  # the bytes to send, and the number of tokens that they ask for
CONNECTION_CLOSED = "the connection was closed before the answer was complete"


@dataclass(frozen=True)
class PromptRow:
    """A prompt with an output length of its own in tokens. ``messages``: a whole conversation, instead of ``text``."""

    output_tokens: int
    text: str = ""
    messages: list[dict[str, Any]] | None = None


@dataclass
class RequestSample:
    """One request. Times are seconds of a monotonic clock; ``arrivals`` has those of events with output.

    ``requested_tokens``: number of tokens that the answer should have.
    """

    start: float
    end: float = 0.0
    status: int = 0
    error: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    requested_tokens: int = 0

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


def _message_content(prompt: Any) -> Any:
    return prompt.text if isinstance(prompt, PromptRow) else prompt


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
            self._finish_sample(f"not an HTTP answer: {failure_reason(error)}")
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
        """Return the bytes of one request. They are encoded before the measurement starts.

        ``prompt``: in the API's form, or a ``PromptRow``, which has an output length of its own.
        """
        members = self.api.build_body(
            replace(self.shape, output_tokens=self._requested_tokens(prompt)), _message_content(prompt)
        )
        if isinstance(prompt, PromptRow) and prompt.messages is not None:
            members[self.api.messages_member] = prompt.messages
        body = json.dumps(members).encode()
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _requested_tokens(self, prompt: Any) -> int:
        return prompt.output_tokens if isinstance(prompt, PromptRow) else self.shape.output_tokens

    def _prepare_request(self, prompt: Any) -> PreparedRequest:
        return self.encode_request(prompt), self._requested_tokens(prompt)

    async def run_load(
        self, prompts: Sequence[Any], concurrency: int, samples: list[RequestSample] | None = None
    ) -> tuple[list[RequestSample], float]:
        """Send every prompt, ``concurrency`` at a time. Return the sample of each, and the seconds that all took.

        ``samples``: a list to fill, for a caller that watches the progress.
        """
        queue = deque(map(self._prepare_request, prompts))
        samples = [] if samples is None else samples
        begin = time.perf_counter()
        await asyncio.gather(*(self._run_client(queue, samples) for _ in range(min(concurrency, len(prompts)))))
        wall = time.perf_counter() - begin
        for sample in samples:
            sample.parse_events(self.api)
        return samples, wall

    async def run_arrivals(
        self, prompts: Sequence[Any], starts: Sequence[float], samples: list[RequestSample] | None = None
    ) -> tuple[list[RequestSample], float]:
        """Send every prompt at its time, in seconds from now, however many are under way: an open loop.

        Return the same as ``run_load``.
        """
        requests = list(map(self._prepare_request, prompts))
        samples = [] if samples is None else samples
        begin = time.perf_counter()

        async def send_at(start: float, request: PreparedRequest) -> None:
            await asyncio.sleep(max(0.0, begin + start - time.perf_counter()))
            await self._run_client(deque([request]), samples)

        await asyncio.gather(*(send_at(*send_arguments) for send_arguments in zip(starts, requests, strict=True)))
        wall = time.perf_counter() - begin
        for sample in samples:
            sample.parse_events(self.api)
        return samples, wall

    async def _run_client(self, queue: deque[PreparedRequest], samples: list[RequestSample]) -> None:
        connection: LoadConnection | None = None
        while queue:
            request, requested_tokens = queue.popleft()
            samples.append(sample := RequestSample(time.perf_counter(), requested_tokens=requested_tokens))
            try:
                async with asyncio.timeout(self.shape.timeout):
                    if connection is None or not connection.is_open:
                        connection = await self._open_connection()
                    await connection.send_request(request, sample)
            except TimeoutError:
                sample.error = f"no complete answer within {self.shape.timeout:g} s"
            except OSError as error:
                sample.error = f"cannot connect: {failure_reason(error)}"
            if connection is not None and (sample.error or not self.keep_alive):
                connection.close()
        if connection is not None and connection.is_open:
            connection.close()

    async def _open_connection(self) -> LoadConnection:
        secure = ssl.create_default_context() if self.address.scheme == "https" else None
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(LoadConnection, self.address.host, self.address.port, ssl=secure))[1]


def poisson_starts(count: int, rate: float, seed: str) -> list[float]:
    """Return the times of ``count`` requests that arrive independently, ``rate`` per second on average."""
    random_ = random.Random(seed)
    return list(accumulate(random_.expovariate(rate) for _ in range(count)))
