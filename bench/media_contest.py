"""parley and vLLM with images: 8 clients, each with images of its own, in turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from contestant import Contestant, paused_contestants
from machine_usage import CpuClock
from peer_servers import parley_peer, vllm_peer

from parley.cli.apis import BENCHED_APIS
from parley.cli.load.generator import LoadGenerator
from parley.dialects.bench import LoadShape

CLIENTS = 8
REQUESTS = 2 * CLIENTS  # of a turn
OUTPUT = 16  # tokens of each answer

DrawPrompts = Callable[[str, int], Sequence[Any]]  # seed, count -> contents of messages with new images


@dataclass(frozen=True)
class TurnFigures:
    """Figures of a turn, or ratios of two. ``ttft``: the median, in seconds. ``processor``: seconds per request of the
    server and of the load generator."""

    requests_per_second: float
    ttft: float
    processor: float


def compare_with_vllm(folder: Path, draw_prompts: DrawPrompts, rounds: int) -> TurnFigures:
    """Return parley's figures over vLLM's with a model: medians over the pairs of turns. Raises ContestantFailed."""
    peers = (
        parley_peer("parley", str(folder), "bf16", ()),
        vllm_peer("vLLM", str(folder), "bf16", (), "--limit-mm-per-prompt", '{"image": 1, "video": 0}'),
    )
    with paused_contestants(peers, folder.with_name("servers.log")) as (ours, theirs):
        pairs = []
        for number in range(rounds):
            order = (ours, theirs) if number % 2 else (theirs, ours)
            turns = {contestant: _run_turn(contestant, draw_prompts, f"turn {number}") for contestant in order}
            pairs.append((turns[ours], turns[theirs]))
            print(f"parley: {turns[ours]}, vLLM: {turns[theirs]}", file=sys.stderr, flush=True)
    names = [figure.name for figure in fields(TurnFigures)]
    return TurnFigures(*(median(getattr(our, name) / getattr(their, name) for our, their in pairs) for name in names))


def _run_turn(contestant: Contestant, draw_prompts: DrawPrompts, seed: str) -> TurnFigures:
    """Run the load once, after a request that does not count."""
    load = LoadGenerator(contestant.address, None, LoadShape("m", OUTPUT, 900.0), BENCHED_APIS["chat"])
    warm, counted = draw_prompts(f"{seed} warm", 1), draw_prompts(seed, REQUESTS)
    contestant.resume()
    asyncio.run(load.run_load(warm, CLIENTS))
    before = CpuClock.read_clock(contestant.process.pid)
    samples, wall = asyncio.run(load.run_load(counted, CLIENTS))
    after = CpuClock.read_clock(contestant.process.pid)
    contestant.pause()
    if errors := [sample.error for sample in samples if sample.error]:
        raise SystemExit(f"a request to {contestant.peer.title} failed: {errors[0]}")
    ttft = median(sample.arrivals[0] - sample.start for sample in samples)
    return TurnFigures(REQUESTS / wall, ttft, (after.ours - before.ours) / REQUESTS)
