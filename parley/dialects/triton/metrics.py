"""The server's counts under the metric names of Triton and its TensorRT-LLM backend. Knows no other names.

Metrics without a counterpart on this server (GPU power, a response cache) are left out rather than reported as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from parley.metrics.machine import cpu_utilization, memory_bytes
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.request_totals import RequestTotals
from parley.metrics.series import format_labels, metric_header, scalar_lines
from parley.types import EngineStats

SCALE = "triton"  # name of the scale of histograms
SeriesValues = Callable[[RequestTotals, EngineStats], Iterable[tuple[str, float]]]  # pairs of further labels and value


def _total_value(read_total: Callable[[RequestTotals], float]) -> SeriesValues:
    return lambda totals, stats: [("", read_total(totals))]


def _microseconds_value(read_seconds: Callable[[RequestTotals], float]) -> SeriesValues:
    return lambda totals, stats: [("", round(1e6 * read_seconds(totals)))]


def _values_by_label(label: str, readers: dict[str, Callable[[RequestTotals, EngineStats], float]]) -> SeriesValues:
    """Return a reader that yields one series for each value of a label."""
    return lambda totals, stats: [(f',{label}="{value}"', read(totals, stats)) for value, read in readers.items()]


# Kind, name, help, values.
TRITON_SCALARS: tuple[tuple[Literal["counter", "gauge"], str, str, SeriesValues], ...] = (
    ("counter", "nv_inference_request_success", "Requests answered.", _total_value(lambda totals: totals.succeeded)),
    (
        "counter",
        "nv_inference_request_failure",
        "Requests not answered, by reason.",
        _values_by_label(
            "reason",
            {
                "REJECTED": lambda totals, stats: totals.rejected,
                "CANCELED": lambda totals, stats: totals.cancelled,
                "BACKEND": lambda totals, stats: totals.failed,
                "OTHER": lambda totals, stats: 0,
            },
        ),
    ),
    ("counter", "nv_inference_count", "Inferences.", _total_value(lambda totals: totals.succeeded)),
    (
        "counter",
        "nv_inference_exec_count",
        "Executions, one per request.",
        _total_value(lambda totals: totals.succeeded),
    ),
    (
        "counter",
        "nv_inference_request_duration_us",
        "Microseconds from arrival to end, summed.",
        _microseconds_value(lambda totals: totals.total_seconds),
    ),
    (
        "counter",
        "nv_inference_queue_duration_us",
        "Microseconds of waiting for the engine, summed.",
        _microseconds_value(lambda totals: totals.queue_seconds),
    ),
    (
        "counter",
        "nv_inference_compute_input_duration_us",
        "Microseconds of preparing prompts, summed.",
        _microseconds_value(lambda totals: totals.prepare_seconds),
    ),
    (
        "counter",
        "nv_inference_compute_infer_duration_us",
        "Microseconds in the engine, summed.",
        _microseconds_value(lambda totals: totals.compute_seconds),
    ),
    (
        "counter",
        "nv_inference_compute_duration_us",
        "Microseconds in the engine, summed (old name).",
        _microseconds_value(lambda totals: totals.compute_seconds),
    ),
    (
        "counter",
        "nv_inference_compute_output_duration_us",
        "Always 0: outputs are written while the next step is computed.",
        _total_value(lambda totals: 0),
    ),
    (
        "gauge",
        "nv_inference_pending_request_count",
        "Sequences waiting to run.",
        lambda totals, stats: [("", stats.waiting)],
    ),
    (
        "gauge",
        "nv_trt_llm_request_metrics",
        "Sequences by their state.",
        _values_by_label(
            "request_type",
            {
                "active": lambda totals, stats: stats.running + stats.waiting,
                "scheduled": lambda totals, stats: stats.running,
                "waiting": lambda totals, stats: stats.waiting,
            },
        ),
    ),
    (
        "gauge",
        "nv_trt_llm_kv_cache_block_metrics",
        "Blocks of the KV cache.",
        _values_by_label(
            "kv_cache_block_type",
            {
                "max": lambda totals, stats: stats.total_pages,
                "used": lambda totals, stats: stats.used_pages,
                "free": lambda totals, stats: stats.total_pages - stats.used_pages,
                "fraction": lambda totals, stats: stats.used_pages / stats.total_pages if stats.total_pages else 0.0,
            },
        ),
    ),
    (
        "gauge",
        "nv_trt_llm_general_metrics",
        "Steps of the engine.",
        _values_by_label("general_type", {"iteration_counter": lambda totals, stats: stats.steps}),
    ),
)


LOAD_RATIO = "nv_inference_load_ratio"
LOAD_RATIO_BOUNDS = (1.05, 1.1, 1.25, 1.5, 2, 10, 50)
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BOUNDS = (0.1, 0.5, 2, 5)  # Triton's own, in seconds


def add_triton_buckets(metrics: ModelMetrics, context: int) -> None:
    """Add this API's buckets to the histograms of a model."""
    metrics.time_to_first_token.set_scale(SCALE, FIRST_RESPONSE_BOUNDS)
    metrics.load_ratio.set_scale(SCALE, LOAD_RATIO_BOUNDS)


def write_triton_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return the series of all models as text."""
    labelled_views = [(format_labels({"model": view.model, "version": "1"}), view) for view in views]
    parts = [
        scalar_lines(
            kind,
            name,
            help_text,
            [(common, values(view.metrics.totals, view.stats)) for common, view in labelled_views],
        )
        for kind, name, help_text, values in TRITON_SCALARS
    ]
    parts.append(metric_header("histogram", FIRST_RESPONSE, "Milliseconds from a request's arrival to a token."))
    for common, view in labelled_views:
        parts += view.metrics.time_to_first_token.histogram_lines(FIRST_RESPONSE, common, SCALE, factor=1000)
    parts.append(metric_header("histogram", LOAD_RATIO, "A request's time, divided by its time in the engine."))
    for common, view in labelled_views:
        parts += view.metrics.load_ratio.histogram_lines(LOAD_RATIO, common, SCALE)
    return "".join(parts) + _machine_lines()


def _machine_lines() -> str:
    """Return the gauges of the machine, which have no labels. Those of GPUs come from the GPU's own exporter."""
    gauges: list[tuple[str, str, float]] = []
    if (utilization := cpu_utilization()) is not None:
        gauges.append(("nv_cpu_utilization", "Share of the processors in use since the last scrape.", utilization))
    if (memory := memory_bytes()) is not None:
        gauges.append(("nv_cpu_memory_total_bytes", "Memory of the machine.", memory[0]))
        gauges.append(("nv_cpu_memory_used_bytes", "Memory in use.", memory[1]))
    return "".join(scalar_lines("gauge", name, text, [("", [("", value)])]) for name, text, value in gauges)
