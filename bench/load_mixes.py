"""The loads: numbers of clients and requests, prompt and output lengths; and a driver that sends them over HTTP.

Prompts are random ids of whole words, the same for all contestants in the same turn. ``openvino_worker.py`` runs the
same loads without HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from parley.cli.apis import BENCHED_APIS
from parley.cli.client import ServerAddress
from parley.cli.load.generator import LoadGenerator, RequestSample
from parley.cli.load.summary import percentile, summarize_load
from parley.dialects.bench import BenchApi, LoadShape

Prompts = list[list[int]]

TIMEOUT = 900.0  # seconds for one request


@dataclass(frozen=True)
class LoadMix:
    """One load. Prompts have ``shared`` common tokens, then ``own`` ones; ``output`` tokens are generated.

    ``warm`` requests with other prompts come first. ``visitor``: length of one more prompt, which arrives when all the
    others stream. ``seconds`` is a guess, for the estimate of a run.
    """

    title: str
    clients: int
    requests: int
    own: int
    output: int
    shared: int = 0
    stream: bool = True
    warm: int = 0
    visitor: int = 0
    seconds: float = 3


LOADS = {
    "c1": LoadMix("1 client, 256 tokens in, 64 out", 1, 6, 256, 64, seconds=18),
    "c8": LoadMix("8 clients, 256 in, 64 out", 8, 24, 256, 64, seconds=20),
    "c32": LoadMix("32 clients, 256 in, 64 out", 32, 64, 256, 64, seconds=45),
    "prefix": LoadMix("8 clients, 1,024 shared + 32 in, 16 out", 8, 32, 32, 16, shared=1024, seconds=10),
    "prefix32": LoadMix("32 clients, 1,024 shared + 32 in, 16 out", 32, 32, 32, 16, shared=1024, seconds=8),
    "prefill": LoadMix("1 client, 2,048 in, 1 out", 1, 3, 2048, 1, seconds=12),
    "stall": LoadMix("8 clients stream while a prompt of 4,000 arrives", 8, 8, 256, 128, visitor=4000, seconds=30),
    "long8k": LoadMix("1 client, 8,192 in, 64 out", 1, 3, 8192, 64, seconds=50),
    "long32k": LoadMix("1 client, 32,640 in, 64 out", 1, 1, 32640, 64, seconds=120),
    "api": LoadMix("64 clients, 8 in, 1 out, not streamed", 64, 3000, 8, 1, stream=False, warm=256),
    "stream": LoadMix("64 clients, 8 in, 64 out", 64, 256, 8, 64, warm=64, seconds=5),
}
START = LoadMix("after a start, not counted", 8, 8, 256, 16)


def word_tokens(model: Path) -> list[int]:
    """Return the ids of tokens that are a space and a word, in order."""
    tokens = json.loads((model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return sorted(token for text, token in tokens.items() if text[0] == "Ġ" and len(text) > 3 and text[1:].isalpha())


def draw_prompts(mix: LoadMix, pool: list[int], seed: str) -> tuple[Prompts, Prompts]:
    """Return the prompts that warm up, and those that count."""
    rng = random.Random(seed)
    warm = [rng.choices(pool, k=mix.shared + mix.own) for _ in range(mix.warm)]
    shared = rng.choices(pool, k=mix.shared)
    return warm, [shared + rng.choices(pool, k=mix.own) for _ in range(mix.requests)]


def _whole_body(shape: LoadShape, ids: Any) -> dict[str, Any]:
    body = {**BENCHED_APIS["openai"].build_body(shape, ids), "stream": False}
    del body["stream_options"]
    return body


def _whole_event(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    if pieces:
        yield pieces[-1][0], b"".join(piece for _, piece in pieces)
        yield pieces[-1][0], b"[DONE]"


WHOLE = BenchApi("/v1/completions", _whole_body, BENCHED_APIS["openai"].read_event, split_events=_whole_event)


class LoadDriver:
    """Sends loads to the server on a port."""

    def __init__(self, port: int):
        self.address = ServerAddress("http", "127.0.0.1", port, "")

    def _make_load(self, mix: LoadMix, output: int = 0) -> LoadGenerator:
        api = BENCHED_APIS["openai"] if mix.stream else WHOLE
        return LoadGenerator(
            self.address, None, LoadShape("m", output or mix.output, TIMEOUT), api, keep_alive=not mix.stream
        )

    def run_mix(self, mix: LoadMix, pool: list[int], seed: str) -> dict[str, Any]:
        """Run a load. Return its summary."""
        warm, counted = draw_prompts(mix, pool, seed)
        load = self._make_load(mix)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if warm:
                runner.run(load.run_load(warm, mix.clients))
            if mix.visitor:
                visitor = random.Random(f"{seed} visitor").choices(pool, k=mix.visitor)
                return runner.run(self._run_with_visitor(mix, counted, visitor))
            samples, wall = runner.run(load.run_load(counted, mix.clients))
        return summarize_load(samples, wall, mix.clients, load.shape)

    async def _run_with_visitor(self, mix: LoadMix, counted: Prompts, prompt: list[int]) -> dict[str, Any]:
        """Send one more prompt once all streams flow. Adds the streams' gaps until its first token to the summary."""
        streams: list[RequestSample] = []
        load, other = self._make_load(mix), self._make_load(mix, 1)
        running = asyncio.create_task(load.run_load(counted, mix.clients, streams))
        while len(streams) < mix.clients or not all(len(sample.pieces) > 2 for sample in streams):
            await asyncio.sleep(0.01)
            if running.done():
                break
        (visitor,), _ = await other.run_load([prompt], 1)
        samples, wall = await running
        first = visitor.arrivals[0] if visitor.arrivals else visitor.end
        gaps = [
            later - sooner
            for sample in samples
            for sooner, later in zip(sample.arrivals, sample.arrivals[1:], strict=False)
            if later > visitor.start and sooner < first
        ]
        result = summarize_load(samples, wall, mix.clients, load.shape)
        result["errors"] += bool(visitor.error)
        result["visitor"] = {
            "ttft_ms": (first - visitor.start) * 1e3,
            "tokens": visitor.prompt_tokens + visitor.tokens,
            "gaps": len(gaps),
            **{f"p{share * 100:g}_ms": (percentile(gaps, share) or 0) * 1e3 for share in (0.5, 0.99, 1)},
        }
        return result
