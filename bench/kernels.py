"""Part of ``make bench``: linear layers compared with the machine's limits, and steps on quantized weights.

Linear layers of the 0.5B shape, with weights too large for any cache, by number of rows: the share that they reach of
max(bytes / bandwidth, operations / rate), both measured just before. Then whole steps on int8 and int4 compared with
bf16, in CPU time of one thread, taking turns in one process. The tables go to ``.peers/kernels.md`` for ``report.py``.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from install import MODELS, ROOT
from limits import Limits, measure_limits

from parley import native
from parley.model.load.loader import load_runner
from parley.model.networks.network import PackedBatch
from parley.model.runner import DecoderRunner
from parley.native.layout import Span
from parley.types import Settings

ROWS = (1, 4, 8, 16, 32, 64, 100, 128, 256, 512)
LAYERS = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  # out, in: the linear layers of one decoder layer
COPIES = 8  # of a decoder layer: 240 MB in bf16
CONTEXT = 320
PAGE = 16
RUNS = 9


def random_layers(kind: str) -> list[native.PackedWeight]:
    """Return packed random weights of COPIES decoder layers."""
    packed = []
    for _ in range(COPIES):
        for out, into in LAYERS:
            if kind == "bf16":
                packed.append(native.pack_weight(torch.randn(out, into).bfloat16()))
            else:
                values = torch.randint(-127, 128, (out, into), dtype=torch.int8)
                packed.append(native.pack_int8(values, torch.full((out,), 1e-3), None, torch.bfloat16))
    return packed


def measure_shares(kind: str) -> list[float]:
    """Return, for each number of rows, the least possible time over the time taken."""
    packed = random_layers(kind)
    numbers = COPIES * sum(out * into for out, into in LAYERS)
    shares = []
    for rows in ROWS:
        inputs = {into: torch.randn(rows, into).bfloat16() for _, into in LAYERS}
        rows_by_width = {into: x if kind == "bf16" else native.quantize_rows(x) for into, x in inputs.items()}
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


def decode_batch(rows: int) -> PackedBatch:
    """Return a decode batch of this many sequences."""
    pages = CONTEXT // PAGE
    spans = [Span(i, 1, CONTEXT, list(range(i * pages, (i + 1) * pages))) for i in range(rows)]
    slots = torch.tensor([span.table[-1] * PAGE + PAGE - 1 for span in spans])
    return PackedBatch(torch.arange(rows) + 5, torch.full((rows,), CONTEXT - 1), slots, spans)


def prefill_batch(tokens: int) -> PackedBatch:
    """Return a prefill batch of one prompt."""
    places = torch.arange(tokens)
    return PackedBatch(places + 5, places, places, [Span(0, tokens, tokens, list(range(tokens // PAGE)))])


def run_step(runner: DecoderRunner, batch: PackedBatch) -> None:
    """Compute one step."""
    hidden = runner.network.compute_hidden(batch, runner.pages)
    runner.network.compute_logits(hidden if len(batch.spans) > 1 else hidden[-1:])


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@torch.inference_mode()
def main() -> int:
    reached = []
    for kind in ("bf16", "int8"):
        reached.append([kind, *(f"{share:.2f}" for share in measure_shares(kind))])
        gc.collect()
    text = "Linear layers of the 0.5B shape by number of rows: share of what the machine allows just then.\n\n"
    text += markdown_table(["rows", *map(str, ROWS)], reached)

    torch.set_num_threads(1)
    loads = {f"batch {rows}": decode_batch(rows) for rows in (1, 8, 32)} | {"prefill of 256": prefill_batch(256)}
    kinds = ("none", "int8", "int4")
    model = str(MODELS / "0.5b")
    runners = [
        load_runner(Settings(model=model, quantization=kind, kv_memory=512 << 20, threads=1), ignore_progress)[0]
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
