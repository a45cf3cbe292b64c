"""Part of ``make bench``: linear layers compared with the machine's limits, and steps on quantized weights.

Linear layers of the 0.5B shape, with weights too large for any cache, by number of rows: the share that they reach of
max(bytes / bandwidth, operations / rate), both measured just before. Then a linear layer on types of GGUF that kernels
read packed, and whole steps on int8 and int4, compared with bf16, in CPU time of one thread, taking turns in one
process. The tables go to ``.peers/kernels.md`` for ``performance_page.py``; ``--types`` prints the second one alone.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from install_peers import MODELS, ROOT
from machine_limits import Limits, measure_limits
from performance_page import markdown_table

from parley import native
from parley.gguf.header import BLOCK_TYPES
from parley.model.checkpoint.weights import GgufBlockWeight
from parley.model.load.loader import load_runner
from parley.model.networks.network import PackedBatch
from parley.model.runner import DecoderRunner
from parley.native.layout import RowSpan
from parley.types import ParleySettings

ROWS = (1, 4, 8, 16, 32, 64, 100, 128, 256, 512)
LAYERS = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  # out, in: the linear layers of one decoder layer
COPIES = 8  # of a decoder layer: 240 MB in bf16
CONTEXT = 320
PAGE = 16
RUNS = 9
GGUF_TYPES = ("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
GGUF_SHAPE = 4096, 2048  # out, in: 16 MiB in bf16
GGUF_ROWS = (1, 8, 32, 512)


def random_layers(kind: str) -> list[native.PackedWeight]:
    """Return packed random weights of COPIES decoder layers."""
    packed = []
    for _ in range(COPIES):
        for out_features, in_features in LAYERS:
            if kind == "bf16":
                packed.append(native.pack_weight(torch.randn(out_features, in_features).bfloat16()))
            else:
                values = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
                packed.append(native.pack_int8(values, torch.full((out_features,), 1e-3), None, torch.bfloat16))
    return packed


def measure_shares(kind: str) -> list[float]:
    """Return, for each number of rows, the least possible time over the time taken."""
    packed = random_layers(kind)
    numbers = COPIES * sum(out_features * in_features for out_features, in_features in LAYERS)
    shares = []
    for rows in ROWS:
        inputs = {in_features: torch.randn(rows, in_features).bfloat16() for _, in_features in LAYERS}
        rows_by_width = {
            in_features: x if kind == "bf16" else native.quantize_rows(x) for in_features, x in inputs.items()
        }
        limits: Limits = measure_limits()
        rate = limits.bf16 if kind == "bf16" else limits.int8
        least = max(numbers * (2 if kind == "bf16" else 1) / limits.bandwidth, 2 * rows * numbers / rate)

        def run(rows_by_width: dict[int, native.QuantizedRows | torch.Tensor] = rows_by_width) -> None:
            for i, weight in enumerate(packed):
                native.linear(rows_by_width[LAYERS[i % len(LAYERS)][1]], weight)

        shares.append(least / median_seconds(run, time.perf_counter))
    return shares


def median_seconds(action: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the median seconds of an action."""
    times = []
    for _ in range(RUNS):
        began = clock()
        action()
        times.append(clock() - began)
    return statistics.median(times)


def random_gguf_layer(name: str) -> native.PackedWeight:
    """Return a layer of random blocks of a type of GGUF."""
    out_features, in_features = GGUF_SHAPE
    blocks = next(block_type for block_type in BLOCK_TYPES.values() if block_type.name == name)
    rows = torch.randint(
        0, 32, (out_features, in_features // blocks.numbers * blocks.size), dtype=torch.uint8
    )  # no scale is infinite
    cpu = torch.device("cpu")
    return GgufBlockWeight.pack_merged([GgufBlockWeight(rows, blocks)], None, torch.bfloat16, cpu)


def compare_gguf_types() -> str:
    """Return a table of CPU times of one thread over that of bf16, by type of GGUF and number of rows."""
    torch.set_num_threads(1)
    layers = {"bf16": native.pack_weight(torch.randn(GGUF_SHAPE).bfloat16())}
    layers |= {name: random_gguf_layer(name) for name in GGUF_TYPES}
    ratios: dict[str, list[str]] = {name: [] for name in GGUF_TYPES}
    for rows in GGUF_ROWS:
        x = torch.randn(rows, GGUF_SHAPE[1]).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(RUNS):
            for name, layer in layers.items():
                began = time.thread_time()
                native.linear(x, layer)
                times[name].append(time.thread_time() - began)
        for name in GGUF_TYPES:
            ratios[name].append(f"{statistics.median(times[name]) / statistics.median(times['bf16']):.2f}")
    return markdown_table(["rows", *map(str, GGUF_ROWS)], [[name, *cells] for name, cells in ratios.items()])


def decode_batch(rows: int) -> PackedBatch:
    """Return a decode batch of this many sequences."""
    pages = CONTEXT // PAGE
    spans = [RowSpan(i, 1, CONTEXT, list(range(i * pages, (i + 1) * pages))) for i in range(rows)]
    slots = torch.tensor([span.table[-1] * PAGE + PAGE - 1 for span in spans])
    return PackedBatch(torch.arange(rows) + 5, torch.full((rows,), CONTEXT - 1), slots, spans)


def prefill_batch(tokens: int) -> PackedBatch:
    """Return a prefill batch of one prompt."""
    places = torch.arange(tokens)
    return PackedBatch(places + 5, places, places, [RowSpan(0, tokens, tokens, list(range(tokens // PAGE)))])


def run_step(runner: DecoderRunner, batch: PackedBatch) -> None:
    """Compute one step."""
    hidden = runner.network.compute_hidden(batch, runner.pages)
    runner.network.compute_logits(hidden if len(batch.spans) > 1 else hidden[-1:])


@torch.inference_mode()
def main() -> int:
    if sys.argv[1:] == ["--types"]:
        print(compare_gguf_types())
        return 0
    reached = []
    for kind in ("bf16", "int8"):
        reached.append([kind, *(f"{share:.2f}" for share in measure_shares(kind))])
        gc.collect()
    text = "Linear layers of the 0.5B shape by number of rows: share of what the machine allows just then.\n\n"
    text += markdown_table(["rows", *map(str, ROWS)], reached)

    text += "\n\nA linear layer on types of GGUF, CPU time of one thread, of that in bf16.\n\n" + compare_gguf_types()
    loads = {f"batch {rows}": decode_batch(rows) for rows in (1, 8, 32)} | {"prefill of 256": prefill_batch(256)}
    kinds = ("none", "int8", "int4")
    model = str(MODELS / "0.5b")
    runners = [
        load_runner(ParleySettings(model=model, quantization=kind, kv_memory=512 << 20, threads=1), ignore_progress)[0]
        for kind in kinds
    ]
    times: dict[tuple[str, str], list[float]] = {}
    for name, batch in loads.items():
        for _ in range(RUNS):
            for kind, runner in zip(kinds, runners, strict=True):
                began = time.thread_time()
                run_step(runner, batch)
                times.setdefault((name, kind), []).append(time.thread_time() - began)
    ratios = [
        [
            kind,
            *(f"{statistics.median(times[name, kind]) / statistics.median(times[name, 'none']):.2f}" for name in loads),
        ]
        for kind in kinds[1:]
    ]
    text += f"\n\nA step of the 0.5B model at a context of {CONTEXT}, CPU time of one thread, of that in bf16.\n\n"
    text += markdown_table(["", *loads], ratios)
    print(text)
    (ROOT / "kernels.md").write_text(text + "\n", "utf-8")
    return 0


def ignore_progress(stage: str, fraction: float) -> None:
    """Ignore loading progress."""


if __name__ == "__main__":
    sys.exit(main())
