"""Profiles an engine's step by batch size. Runs the loop and the runner as the worker process does.

    python bench/profile_engine.py MODEL [--batches 1,8,32,64] [--steps 50] [--context 64] [--threads 1] [--kernels]

Times are CPU time of the loop's thread, so use one thread. The columns are decode steps; the last is a step of 64
requests of 8 prompt tokens that end with their first token. Prints Markdown.

The compiled kernels compute the embedding and all layers in one call, which cannot be broken down from outside.
``--kernels`` calls them one by one instead: this shows their shares, at the cost of the Python between them.
"""

from __future__ import annotations

import argparse
import gc
import random
import socket
import threading
from pathlib import Path

from cpu_meter import Meter, cost_table

from parley import native, wire
from parley.core.engine_loop import EngineLoop
from parley.core.scheduler import Scheduler
from parley.engine.messages import StepOutputs
from parley.model.load.loader import load_runner
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import DecoderRunner
from parley.model.sampling.sampler import Sampler
from parley.types import EngineRequest, ParleySettings, SamplingOptions

KERNELS = {
    "embed_tokens": "embedding",
    "linear": "linear layers",
    "lm_head_logits": "head",
    "attend": "attention",
    "plan_attention": "plan of attention",
}
SHORT = 8  # prompt tokens of a request that ends with its first token


class BenchEngine:
    """A loop whose output goes through a socket, as in the worker process."""

    def __init__(self, settings: ParleySettings):
        self.runner, _ = load_runner(settings, lambda stage, fraction: None)
        gc.freeze()  # as the worker process does
        near, far = socket.socketpair()
        threading.Thread(target=_discard_output, args=(far,), daemon=True).start()
        self.loop = EngineLoop(
            self.runner, settings, lambda outputs, stats: near.sendall(wire.encode_frame(StepOutputs(outputs, stats)))
        )
        self._random = random.Random(0)
        self._added = 0

    def add_request(self, prompt: int, output: int) -> None:
        """Add a request with ``prompt`` random tokens and ``output`` tokens to generate."""
        top = min(self.runner.vocab_size, 8000)
        ids = [self._random.randrange(top) for _ in range(prompt)]
        self._added += 1
        self.loop.add_request(
            EngineRequest(f"request-{self._added:032x}-0", ids, output, SamplingOptions(temperature=0.0))
        )

    def run_all(self) -> None:
        """Run steps until all requests have ended."""
        while self.loop.step():
            pass


def _discard_output(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


def instrument_engine(meter: Meter) -> None:
    """Charge the engine's functions to the meter's names."""
    for name in native.__all__:
        if callable(getattr(native, name)) and name.islower():
            meter.wrap_attribute(native, name, KERNELS.get(name, "small kernels"))
    meter.wrap_attribute(native.Stack, "run_layers", "embedding, layers")
    meter.wrap_attribute(Scheduler, "schedule", "schedule")
    meter.wrap_attribute(PagedKV, "clear_pages", "clear pages")
    meter.wrap_attribute(DecoderRunner, "_pack_rows", "build tensors")
    meter.wrap_attribute(DecoderRunner, "run_step", "runner, decoder")
    meter.wrap_attribute(DecoderRunner, "admit_sequence", "admit")
    meter.wrap_attribute(Sampler, "draw_tokens", "sample")
    meter.wrap_attribute(EngineLoop, "_process_result", "finish")
    meter.wrap_attribute(EngineLoop, "add_request", "add")
    meter.wrap_attribute(EngineLoop, "step", "loop")
    meter.wrap_attribute(wire, "encode_frame", "encode")


def measure_decoding(engine: BenchEngine, meter: Meter, batch: int, context: int, steps: int) -> dict[str, float]:
    """Return the microseconds of one decode step, by name."""
    for _ in range(batch):
        engine.add_request(context, 4 * steps + 8 * batch)  # the first must outlast the prompts of the last
    while engine.loop.collect_stats().waiting or any(s.output_length < 3 for s in engine.loop.scheduler.running):
        engine.loop.step()
    meter.clear()
    for _ in range(steps):
        engine.loop.step()
    costs = {name: own / steps / 1e3 for name, own in meter.own.items()}
    engine.run_all()
    return costs


def measure_short_requests(engine: BenchEngine, meter: Meter, batch: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step that starts and ends requests, by name."""
    meter.clear()
    for _ in range(steps):
        for _ in range(batch):
            engine.add_request(SHORT, 1)
        engine.run_all()
    return {name: own / steps / 1e3 for name, own in meter.own.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", action="store_true", help="run the layers kernel by kernel")
    options = parser.parse_args()
    engine = BenchEngine(ParleySettings(model=str(options.model), kv_memory=512 << 20, threads=options.threads))
    if options.kernels:
        engine.runner.network.stack = None
    for _ in range(64):  # warm up: the step budget learns, libraries initialize
        engine.add_request(options.context, 4)
    engine.run_all()
    meter = Meter()
    instrument_engine(meter)
    columns = []
    for batch in map(int, options.batches.split(",")):
        columns.append((f"batch {batch}", measure_decoding(engine, meter, batch, options.context, options.steps)))
    columns.append(("64 short requests", measure_short_requests(engine, meter, 64, options.steps)))
    print(cost_table(columns, "µs per step, kernel by kernel" if options.kernels else "µs per step"))


if __name__ == "__main__":
    main()
