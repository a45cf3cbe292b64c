"""The loads that ``compare_commits.py`` compares. Reads names of loads, and writes the costs of one turn of each.

A load is made by its first turn and kept. It runs the ``parley`` that PYTHONPATH names, with the bench of this
checkout. Costs are µs of processor time: of one thread, or of the coordinator's process. If this ``parley`` cannot run
a load, the answer is an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import parley

Turn = Callable[[], dict[str, float]]

KERNEL_ROWS = (1, 8, 32, 256)
KERNEL_SHAPE = (4864, 896)  # out, in
BATCHES = (1, 8, 32)
CONTEXT = 320
STEPS = 8
API_ROUNDS = 4
COORDINATOR_TOKENS = (2, 34)  # of the streams whose difference is the cost of a frame
COORDINATOR_STREAMS, COORDINATOR_REQUESTS = 100, 400


def kernels(cleanup: ExitStack) -> Turn:
    """Linear layers of one shape, with more weights than a cache holds."""
    import torch

    from parley import native

    torch.set_num_threads(1)
    out_features, in_features = KERNEL_SHAPE
    rows_by_kind: dict[str, Callable[[torch.Tensor], torch.Tensor | native.QuantizedRows]] = {
        "bf16": lambda x: x, "int8": native.quantize_rows
    }  # fmt: skip
    packed = {
        "bf16": [native.pack_weight(torch.randn(out_features, in_features).bfloat16()) for _ in range(4)],
        "int8": [
            native.pack_int8(
                torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8),
                torch.full((out_features,), 1e-3),
                None,
                torch.bfloat16,
            )
            for _ in range(8)
        ],
    }

    @torch.inference_mode()
    def turn() -> dict[str, float]:
        costs = {}
        for kind, weights in packed.items():
            for rows in KERNEL_ROWS:
                x = rows_by_kind[kind](torch.randn(rows, in_features).bfloat16())
                times = []
                for _ in range(3):
                    began = time.thread_time_ns()
                    for weight in weights:
                        native.linear(x, weight)
                    times.append((time.thread_time_ns() - began) / len(weights) / 1e3)
                costs[f"linear layer, {kind}, {rows} rows"] = min(times)
        return costs

    return turn


def engine(cleanup: ExitStack) -> Turn:
    """Steps of an engine with four layers of the 0.5B shape: decoding, and the prompts before it."""
    from dataclasses import replace

    from profile_engine import BenchEngine
    from random_model import SHAPES, write_model

    from parley.types import EngineRequest, ParleySettings, SamplingOptions

    folder = Path(cleanup.enter_context(TemporaryDirectory()))
    write_model(folder, replace(SHAPES["0.5b"], num_hidden_layers=4, vocab_size=16384))
    bench = BenchEngine(ParleySettings(model=str(folder), kv_memory=256 << 20, threads=1))

    rng = random.Random(0)
    contexts = [rng.choices(range(4000), k=CONTEXT) for _ in range(max(BATCHES))]
    numbers = count()

    def run_prompts(prompts: list[list[int]]) -> float:
        """Start these prompts, until each has two tokens. Return the seconds."""
        began = time.thread_time()
        for ids in prompts:
            request = EngineRequest(f"{next(numbers)}-0", ids, 200, SamplingOptions(temperature=0.0))
            bench.loop.add_request(request)
        while bench.loop.collect_stats().waiting or any(s.output_length < 2 for s in bench.loop.scheduler.running):
            bench.loop.step()
        return time.thread_time() - began

    def cancel_all() -> None:
        for sequence in list(bench.loop.scheduler.running):
            bench.loop.cancel_request(sequence.request_id, -1)
        bench.run_all()

    def turn() -> dict[str, float]:
        costs = {f"a prompt of {CONTEXT} tokens": 1e6 * run_prompts([rng.choices(range(4000), k=CONTEXT)])}
        cancel_all()
        for batch in BATCHES:
            run_prompts(contexts[:batch])  # in the prefix cache from the second turn on
            times = []
            for _ in range(STEPS):
                began = time.thread_time_ns()
                bench.loop.step()
                times.append((time.thread_time_ns() - began) / 1e3)
            costs[f"a decode step, batch {batch}"] = median(times)
            cancel_all()
        return costs

    return turn


def api(cleanup: ExitStack) -> Turn:
    """Requests and streamed tokens in the API process, without sockets and engine."""
    import uvloop
    from request_path import MemoryServer, measure_round

    from parley import hub

    runner = cleanup.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

    async def make_server() -> MemoryServer:
        server = MemoryServer(str(hub.resolve_model("")))
        await server.start()
        return server

    server = runner.run(make_server())

    def turn() -> dict[str, float]:
        costs = {}
        for name in ("chat", "responses", "messages"):
            rounds = [runner.run(measure_round(server, name)) for _ in range(API_ROUNDS)]
            costs[f"a request, {name}"], costs[f"a streamed token, {name}"] = map(min, zip(*rounds, strict=True))
        return costs

    return turn


def coordinator(cleanup: ExitStack) -> Turn:
    """Requests and frames of streams through a coordinator, between scripted clients and instances."""
    import uvloop
    from coordinator_cost import RunningCoordinator, run_streams

    running = cleanup.enter_context(RunningCoordinator())
    runner = cleanup.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

    def turn() -> dict[str, float]:
        seconds = [
            runner.run(
                run_streams(
                    running.port, running.pid, COORDINATOR_REQUESTS, COORDINATOR_STREAMS, tokens, running.instance
                )
            ).cpu
            for tokens in COORDINATOR_TOKENS
        ]
        short, long = COORDINATOR_TOKENS
        frame = 1e6 * (seconds[1] - seconds[0]) / COORDINATOR_REQUESTS / (long - short)
        return {
            "a request, coordinator": 1e6 * seconds[0] / COORDINATOR_REQUESTS - frame * short,
            "a frame, coordinator": frame,
        }

    return turn


LOADS: dict[str, Callable[[ExitStack], Turn]] = {
    "kernels": kernels, "engine": engine, "api": api, "coordinator": coordinator
}  # fmt: skip


def main() -> None:
    if not Path(parley.__file__).is_relative_to(os.environ["PYTHONPATH"]):
        raise SystemExit(f"{parley.__file__} is not what should be measured")
    answers = os.fdopen(os.dup(1), "w")  # what libraries print must not come between the answers
    os.dup2(2, 1)
    turns: dict[str, Turn] = {}
    with ExitStack() as cleanup:
        for line in sys.stdin:
            name = line.strip()
            try:
                if name not in turns:
                    turns[name] = LOADS[name](cleanup)
                answer: dict[str, float | str] = {**turns[name]()}
            except Exception as error:  # an older parley may lack what the load needs
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
