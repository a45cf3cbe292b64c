"""Profiles an engine's step by batch size. Runs the loop and the runner as the worker process does.

    python bench/engine.py MODEL [--batches 1,8,32,64] [--steps 50] [--context 64] [--threads 1] [--kernels]

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

from meter import Meter, table

from parley import native, wire
from parley.core.loop import Loop
from parley.core.scheduler import Scheduler
from parley.engine.messages import Outputs
from parley.model.load.loader import load
from parley.model.networks.paged_kv import PagedKV
from parley.model.runner import Runner
from parley.model.sampling.sampler import Sampler
from parley.types import Sampling, Settings, Work

KERNELS = {
    "embed": "embedding",
    "linear": "linear layers",
    "logits": "head",
    "attend": "attention",
    "plan": "plan of attention",
}
SHORT = 8  # prompt tokens of a request that ends with its first token


class Engine:
    """A loop whose output goes through a socket, as in the worker process."""

    def __init__(self, settings: Settings):
        self.runner, _ = load(settings, lambda stage, fraction: None)
        gc.freeze()  # as the worker process does
        near, far = socket.socketpair()
        threading.Thread(target=_swallow, args=(far,), daemon=True).start()
        self.loop = Loop(
            self.runner, settings, lambda outputs, stats: near.sendall(wire.frame(Outputs(outputs, stats)))
        )
        self._random = random.Random(0)
        self._added = 0

    def add(self, prompt: int, output: int) -> None:
        """Add a request with ``prompt`` random tokens and ``output`` tokens to generate."""
        top = min(self.runner.vocab_size, 8000)
        ids = [self._random.randrange(top) for _ in range(prompt)]
        self._added += 1
        self.loop.add(Work(f"request-{self._added:032x}-0", ids, output, Sampling(temperature=0.0)))

    def drain(self) -> None:
        """Run steps until all requests have ended."""
        while self.loop.step():
            pass


def _swallow(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass


def instrument(meter: Meter) -> None:
    """Charge the engine's functions to the meter's names."""
    for name in native.__all__:
        if callable(getattr(native, name)) and name.islower():
            meter.wrap(native, name, KERNELS.get(name, "small kernels"))
    meter.wrap(native.Stack, "run", "embedding, layers")
    meter.wrap(Scheduler, "schedule", "schedule")
    meter.wrap(PagedKV, "clear", "clear pages")
    meter.wrap(Runner, "_pack", "build tensors")
    meter.wrap(Runner, "run", "runner, decoder")
    meter.wrap(Runner, "admit", "admit")
    meter.wrap(Sampler, "sample", "sample")
    meter.wrap(Loop, "_finish", "finish")
    meter.wrap(Loop, "add", "add")
    meter.wrap(Loop, "step", "loop")
    meter.wrap(wire, "frame", "encode")


def decoding(engine: Engine, meter: Meter, batch: int, context: int, steps: int) -> dict[str, float]:
    """Return the microseconds of one decode step, by name."""
    for _ in range(batch):
        engine.add(context, 4 * steps + 8 * batch)  # the first must outlast the prompts of the last
    while engine.loop.stats().waiting or any(s.generated < 3 for s in engine.loop.scheduler.running):
        engine.loop.step()
    meter.clear()
    for _ in range(steps):
        engine.loop.step()
    costs = {name: own / steps / 1e3 for name, own in meter.own.items()}
    engine.drain()
    return costs


def answering(engine: Engine, meter: Meter, batch: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step that starts and ends requests, by name."""
    meter.clear()
    for _ in range(steps):
        for _ in range(batch):
            engine.add(SHORT, 1)
        engine.drain()
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
    engine = Engine(Settings(model=str(options.model), kv_memory=512 << 20, threads=options.threads))
    if options.kernels:
        engine.runner.network.stack = None
    for _ in range(64):  # warm up: the step budget learns, libraries initialise
        engine.add(options.context, 4)
    engine.drain()
    meter = Meter()
    instrument(meter)
    columns = []
    for batch in map(int, options.batches.split(",")):
        columns.append((f"batch {batch}", decoding(engine, meter, batch, options.context, options.steps)))
    columns.append(("64 short requests", answering(engine, meter, 64, options.steps)))
    print(table(columns, "µs per step, kernel by kernel" if options.kernels else "µs per step"))


if __name__ == "__main__":
    main()
