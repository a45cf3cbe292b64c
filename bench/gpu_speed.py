"""Measures parley's engine on one GPU: bits, times over the machine's limits, and the tokens per second of a server.

    python bench/gpu_speed.py [--shapes 0.5b,8b] [--skip server]

Takes about ten minutes; needs a GPU of compute capability 8.0 or newer. Weights are random. Parts, each a table in
Markdown, which is printed when the part ends. A part that fails prints its error, and the others go on; the exit status
is then 1:

linears    Rows of a linear layer alone and in batches: whether the bits are equal, and time over that of the bytes.
attention  One token after contexts of several lengths: the same, and the error against float64.
experts    A mixture of experts of 128, of which a row has 8: the same as for linears, over the bytes of experts used.
latents    One token of latent attention (MLA) after contexts of several lengths: bits, error and time.
steps      Decode steps with graphs and without: time over that of all weights and of the keys and values read.
server     Requests at once: tokens per second over HTTP, and the first token of a prompt.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import uvloop
from contestant import Contestant, ContestantFailed
from install_peers import ROOT
from peer_servers import parley_peer
from random_model import SHAPES, Shape, write_model

from parley import native
from parley.cli.apis import BENCHED_APIS
from parley.cli.load.generator import LoadGenerator
from parley.core.sequence import PAGE_SIZE
from parley.dialects.bench import LoadShape
from parley.model.load.loader import load_runner
from parley.model.networks.network import PackedBatch
from parley.model.runner import DecoderRunner
from parley.native.layout import LayerKV, RowSpan
from parley.types import ParleySettings

GPU_SHAPES = {"0.5b": SHAPES["0.5b"], "8b": Shape(4096, 14336, 32, 32, 8, 128256)}
DEVICE = torch.device("cuda")
COPIED = 4 << 30  # bytes of the copy that measures the bandwidth
RUNS = 20
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 4096, 32768)
STEP_ROWS = (1, 8, 32, 64)
STEP_CONTEXT = 512
MIXTURE_SIZES = (2048, 768, 128, 8)  # hidden, width of an expert, experts, chosen
CLIENTS = (1, 8, 32, 64)
ANSWER = 128  # tokens
PROMPT = 64  # tokens
TIMEOUT = 300.0  # seconds for one request


def median_seconds(launch: Callable[[], object]) -> float:
    """Return the median time that the GPU takes for the work that a function starts."""
    for _ in range(3):
        launch()
    times = []
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_bandwidth() -> float:
    """Return the bytes that the GPU reads and writes per second when it copies."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPIED / median_seconds(lambda: target.copy_(source))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def random_rows(*shape: int) -> torch.Tensor:
    """Return random bfloat16 numbers on the GPU."""
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).bfloat16()


def compare_linears(shape: Shape, bandwidth: float) -> str:
    """Return the table of the linear layers of a decoder layer."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    rows = []
    for out_features, in_features in ((2 * width, hidden), (hidden, width), (hidden, hidden)):
        packed = native.pack_weight(random_rows(out_features, in_features))
        x = random_rows(max(LINEAR_ROWS), in_features)
        alone = torch.cat([native.linear(x[row : row + 1], packed) for row in range(len(x))])
        for count in LINEAR_ROWS:
            together = native.linear(x[:count], packed)
            seconds = median_seconds(partial(native.linear, x[:count], packed))
            least = 2 * (out_features * in_features + count * (out_features + in_features)) / bandwidth
            equal = torch.equal(together, alone[:count])
            rows.append(
                (f"{in_features} to {out_features}", count, equal, f"{seconds * 1e6:.0f}", f"{least / seconds:.2f}")
            )
    return markdown_table(("linear layer", "rows", "bits equal", "µs", "least time over it"), rows)


def attend_once(layer: LayerKV, contexts: Sequence[int]) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """Return a function that attends to random pages of these contexts, and the expected result in float64.

    Each sequence has one query of four times the layer's heads.
    """
    page_format = native.choose_page_format(layer, torch.bfloat16, DEVICE)
    table, spans = 0, []
    for row, length in enumerate(contexts):
        pages = -(-length // PAGE_SIZE)
        spans.append(RowSpan(row, 1, length, list(range(table, table + pages))))
        table += pages
    pool = native.LayerPages(
        torch.zeros((table + 1, *page_format.shape), dtype=page_format.dtype, device=DEVICE), page_format
    )
    keys, values = (random_rows(table * PAGE_SIZE, layer.heads, layer.dim) for _ in range(2))
    native.write_kv(
        keys, values, pool, native.write_indices(torch.arange(table * PAGE_SIZE, device=DEVICE), page_format)
    )
    queries, scale = random_rows(len(contexts), 4 * layer.heads, layer.dim), layer.dim**-0.5
    expected = []
    for row, span in enumerate(spans):
        seen = slice(span.table[0] * PAGE_SIZE, span.table[0] * PAGE_SIZE + span.length)
        k, v = (heads[seen].double().repeat_interleave(4, 1).transpose(0, 1) for heads in (keys, values))
        weights = (k @ queries[row].double()[:, :, None] * scale).softmax(1)
        expected.append((weights * v).sum(1))
    plan = native.plan_attention(
        spans,
        heads=queries.shape[1],
        page_format=page_format,
        window=None,
        chunk=None,
        visible_ends=None,
        zero_page=table,
        device=DEVICE,
        dtype=queries.dtype,
    )
    return lambda: native.attend(queries, pool, plan, scale=scale), torch.stack(expected)


def compare_attention(shape: Shape, bandwidth: float) -> str:
    """Return the table of attention in decode steps."""
    dim = shape.hidden_size // shape.num_attention_heads
    layer, rows = LayerKV(shape.num_key_value_heads, dim, dim), []
    for count in (1, 8):
        for context in CONTEXTS:
            torch.manual_seed(context)
            launch, expected = attend_once(layer, [context] * count)
            seconds, result = median_seconds(launch), launch()
            error = ((result.double() - expected).norm() / expected.norm()).item()
            least = count * context * 4 * layer.heads * dim / bandwidth
            equal = all(torch.equal(launch(), result) for _ in range(5))
            rows.append((count, context, equal, f"{error:.1e}", f"{seconds * 1e6:.0f}", f"{least / seconds:.2f}"))
    head = ("sequences", "context", "bits equal each time", "error", "µs", "least time over it")
    return markdown_table(head, rows)


def compare_experts(bandwidth: float) -> str:
    """Return the table of a mixture with the sizes of Qwen3-30B-A3B, in bf16 and in FP4 with scales for 32 numbers."""
    hidden, width, count, chosen = MIXTURE_SIZES
    rows = []
    for name, bits in (("bf16", 16.0), ("FP4", 4.5)):
        up, down = (stacked_weights(name, count, *sizes) for sizes in ((2 * width, hidden), (hidden, width)))
        experts = native.Experts(count, up, down)
        x = random_rows(max(STEP_ROWS), hidden)
        routing = native.Routing(count, chosen, normalized=True)
        ids, weights = native.route(torch.randn(len(x), count, device=DEVICE), None, routing)
        mix = partial(native.mix_experts, experts=experts)
        alone = torch.cat([mix(x[i : i + 1], ids=ids[i : i + 1], weights=weights[i : i + 1]) for i in range(len(x))])
        for size in STEP_ROWS:
            launch = partial(mix, x[:size], ids=ids[:size], weights=weights[:size])
            equal, seconds = torch.equal(launch(), alone[:size]), median_seconds(launch)
            least = len(ids[:size].unique()) * 3 * hidden * width * bits / 8 / bandwidth
            rows.append((name, size, equal, f"{seconds * 1e6:.0f}", f"{least / seconds:.2f}"))
    return markdown_table(("experts", "rows", "bits equal", "µs", "least time over it"), rows)


def stacked_weights(name: str, count: int, out_features: int, in_features: int) -> native.PackedWeight:
    """Return random weights [out, into] of so many experts, "bf16" or "FP4"."""

    def pack() -> native.PackedWeight:
        if name == "bf16":
            return native.pack_weight(random_rows(out_features, in_features) * in_features**-0.5)
        values = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device=DEVICE)
        scales = torch.full((out_features, in_features // 32), 2.0**-6, dtype=torch.bfloat16, device=DEVICE)
        return native.pack_grouped(native.GroupedWeight(values, scales, None, 32, code="e2m1"), None, torch.bfloat16)

    return native.stack_experts((pack() for _ in range(count)), count)


def compare_latents(bandwidth: float) -> str:
    """Return the table of latent attention in decode steps, with the sizes of DeepSeek-V2-Lite: 16 heads."""
    layer, heads, rows = LayerKV(1, 576, 512, has_latents=True), 16, []
    page_format = native.choose_page_format(layer, torch.bfloat16, DEVICE)
    for count in (1, 8):
        for context in CONTEXTS:
            pages = -(-context // PAGE_SIZE)
            numbers = random_rows(count * pages + 1, *page_format.shape)
            pool = native.LayerPages(numbers, page_format)
            spans = [RowSpan(i, 1, context, list(range(i * pages, (i + 1) * pages))) for i in range(count)]
            queries = random_rows(count, heads, layer.dim)
            options = {"heads": heads, "page_format": page_format, "window": None, "chunk": None, "ends": None}
            plan = native.plan_attention(spans, **options, zero_page=count * pages, device=DEVICE, dtype=queries.dtype)
            launch = partial(native.attend, queries, pool, plan, scale=layer.dim**-0.5)
            result, seconds = launch(), median_seconds(launch)
            keys = numbers[:pages].flatten(0, 3)[:context].double()
            weights = (queries[0].double() @ keys.t() * layer.dim**-0.5).softmax(-1)
            exact = weights @ keys[:, : layer.value_dim]
            error = ((result[0].double() - exact).norm() / exact.norm()).item()
            least = count * context * 2 * layer.dim / bandwidth
            equal = all(torch.equal(launch(), result) for _ in range(5))
            rows.append((count, context, equal, f"{error:.1e}", f"{seconds * 1e6:.0f}", f"{least / seconds:.2f}"))
    head = ("sequences", "context", "bits equal each time", "error", "µs", "least time over it")
    return markdown_table(head, rows)


def decode_batch(rows: int) -> PackedBatch:
    """Return one token for each of so many sequences."""
    pages = -(-STEP_CONTEXT // PAGE_SIZE)
    parts = [([5 + row], STEP_CONTEXT - 1, list(range(row * pages, (row + 1) * pages))) for row in range(rows)]
    return PackedBatch.pack_parts(parts, DEVICE)


def measure_steps(runner: DecoderRunner, shape: Shape, bandwidth: float) -> str:
    """Return the table of decode steps, logits included."""
    kv_bytes = 4 * shape.num_key_value_heads * shape.hidden_size // shape.num_attention_heads * shape.num_hidden_layers
    graphs, rows = runner.graphs, []
    assert graphs is not None, "the network has no graphs"
    alone = runner.network.compute_hidden(decode_batch(1), runner.pages)
    for count in STEP_ROWS:
        batch = decode_batch(count)

        def compute(is_graph: bool, batch: PackedBatch = batch) -> torch.Tensor:
            runner.graphs = graphs if is_graph else None
            return runner.network.compute_logits(runner.compute_hidden(batch))

        equal = torch.equal(compute(True), compute(False)) and torch.equal(runner.compute_hidden(batch)[:1], alone)
        with_graph, without = (median_seconds(partial(compute, uses_graph)) for uses_graph in (True, False))
        least = (runner.network.weights_bytes + count * STEP_CONTEXT * kv_bytes) / bandwidth
        times = (f"{seconds * 1e3:.2f}" for seconds in (with_graph, without))
        rows.append((count, equal, *times, f"{least / with_graph:.2f}"))
    runner.graphs = graphs
    return markdown_table(("rows", "bits equal", "ms with a graph", "ms without", "least time over it"), rows)


def measure_server(folder: Path) -> str:
    """Return the table of a server's tokens per second. Raises ContestantFailed."""
    server = Contestant(parley_peer("parley", str(folder), "bf16", (), "--device", "cuda"), ROOT / "log" / "gpu.log")
    rows = []
    try:
        for clients in CLIENTS:
            load = LoadGenerator(server.address, None, LoadShape("m", ANSWER, TIMEOUT), BENCHED_APIS["openai"])
            prompts = [[5 + (7 * i + j) % 900 for j in range(PROMPT)] for i in range(4 * clients)]
            samples, wall = uvloop.run(load.run_load(prompts, clients))
            if errors := [sample.error for sample in samples if sample.error]:
                raise ContestantFailed(f"a request failed: {errors[0]}")
            tokens = sum(sample.tokens for sample in samples)
            first = statistics.median(sample.arrivals[0] - sample.start for sample in samples)
            rows.append((clients, f"{tokens / wall:.0f}", f"{first * 1e3:.0f}"))
    finally:
        server.stop()
    return markdown_table(("clients", "tokens/s", "ms until the first token, median"), rows)


class Report:
    """Prints the table of each part when it ends, or why it failed. ``failed``: the parts that did."""

    def __init__(self, skipped: Sequence[str]):
        self._skipped = skipped
        self.failed: list[str] = []

    def run_part(self, title: str, part: str, measure: Callable[[], str]) -> None:
        """Measure a part unless it is skipped. Memory of a part that failed is free for the next."""
        if part in self._skipped:
            return
        try:
            print(f"\n### {title}, {part}\n\n{measure()}", flush=True)
        except Exception:
            self.failed.append(f"{title}, {part}")
            print(f"\n### {title}, {part}: failed\n\n```\n{traceback.format_exc()}```", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def measure_loaded_steps(folder: Path, shape: Shape, bandwidth: float) -> str:
    """Load a model, and return the table of its decode steps."""
    settings = ParleySettings(model=str(folder), device="cuda", dtype="bfloat16", max_model_len=2 * STEP_CONTEXT)
    runner, _ = load_runner(settings, lambda stage, fraction: None)
    assert isinstance(runner, DecoderRunner)
    runner.pages.clear_pages(list(range(max(STEP_ROWS) * -(-STEP_CONTEXT // PAGE_SIZE))))
    return measure_steps(runner, shape, bandwidth)


@torch.inference_mode()
def measure_shape(name: str, report: Report, bandwidth: float) -> None:
    """Print the tables of one shape."""
    shape = GPU_SHAPES[name]
    report.run_part(name, "linears", lambda: compare_linears(shape, bandwidth))
    report.run_part(name, "attention", lambda: compare_attention(shape, bandwidth))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        is_written = False

        def write_once() -> Path:
            nonlocal is_written
            if not is_written:
                write_model(folder, shape)
                is_written = True
            return folder

        report.run_part(name, "steps", lambda: measure_loaded_steps(write_once(), shape, bandwidth))
        report.run_part(name, "server", lambda: measure_server(write_once()))


@torch.inference_mode()
def measure_kernels(report: Report, bandwidth: float) -> None:
    """Print the tables of kernels that the shapes do not use."""
    report.run_part("mixture", "experts", lambda: compare_experts(bandwidth))
    report.run_part("MLA", "latents", lambda: compare_latents(bandwidth))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(GPU_SHAPES), help=f"of {', '.join(GPU_SHAPES)}")
    parser.add_argument(
        "--skip", default="", help="parts to leave out: experts, latents, linears, attention, steps, server"
    )
    options = parser.parse_args()
    if unknown := set(options.shapes.split(",")) - set(GPU_SHAPES):
        parser.error(f"unknown shapes: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        hint = (
            "" if torch.version.cuda else " This torch is built without CUDA: install a CUDA build of the same version."
        )
        print(f"There is no GPU that torch {torch.__version__} can use.{hint}", file=sys.stderr)
        return 1
    bandwidth = measure_bandwidth()
    name, kernels = torch.cuda.get_device_name(), native.kernels_in_use(torch.bfloat16, DEVICE)
    print(f"{name}, torch {torch.__version__}, kernels: {kernels}. Copies: {bandwidth / 1e9:.0f} GB/s.", flush=True)
    report = Report(options.skip.split(","))
    measure_kernels(report, bandwidth)
    for shape in options.shapes.split(","):
        measure_shape(shape, report, bandwidth)
    if report.failed:
        print(f"Failed: {'; '.join(report.failed)}.", file=sys.stderr)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
