"""The server's counts under the metric names of Triton and its TensorRT-LLM backend. Knows no other names.

Metrics without a counterpart on this server (GPU power, a response cache) are left out rather than reported as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from parley.metrics.recorded import View
from parley.metrics.series import labels, scalar
from parley.metrics.totals import Totals
from parley.types import Stats

Values = Callable[[Totals, Stats], Iterable[tuple[str, float]]]  # pairs of further labels and value


def _count(read: Callable[[Totals], float]) -> Values:
    return lambda totals, stats: [("", read(totals))]


def _micro(read: Callable[[Totals], float]) -> Values:
    return lambda totals, stats: [("", round(1e6 * read(totals)))]


def _by(label: str, reads: dict[str, Callable[[Totals, Stats], float]]) -> Values:
    """Return a reader that yields one series for each value of a label."""
    return lambda totals, stats: [(f',{label}="{value}"', read(totals, stats)) for value, read in reads.items()]


# Kind, name, help, values.
SCALARS: tuple[tuple[Literal["counter", "gauge"], str, str, Values], ...] = (
    ("counter", "nv_inference_request_success", "Requests answered.", _count(lambda t: t.succeeded)),
    (
        "counter",
        "nv_inference_request_failure",
        "Requests not answered, by reason.",
        _by(
            "reason",
            {
                "REJECTED": lambda t, s: t.rejected,
                "CANCELED": lambda t, s: t.cancelled,
                "BACKEND": lambda t, s: t.failed,
                "OTHER": lambda t, s: 0,
            },
        ),
    ),
    ("counter", "nv_inference_count", "Inferences.", _count(lambda t: t.succeeded)),
    ("counter", "nv_inference_exec_count", "Executions, one per request.", _count(lambda t: t.succeeded)),
    (
        "counter",
        "nv_inference_request_duration_us",
        "Microseconds from arrival to end, summed.",
        _micro(lambda t: t.whole),
    ),
    (
        "counter",
        "nv_inference_queue_duration_us",
        "Microseconds of waiting for the engine, summed.",
        _micro(lambda t: t.queued),
    ),
    (
        "counter",
        "nv_inference_compute_input_duration_us",
        "Microseconds of preparing prompts, summed.",
        _micro(lambda t: t.prepared),
    ),
    (
        "counter",
        "nv_inference_compute_infer_duration_us",
        "Microseconds in the engine, summed.",
        _micro(lambda t: t.computed),
    ),
    (
        "counter",
        "nv_inference_compute_output_duration_us",
        "Always 0: outputs are written while the next step is computed.",
        _count(lambda t: 0),
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
        _by(
            "request_type",
            {
                "active": lambda t, s: s.running + s.waiting,
                "scheduled": lambda t, s: s.running,
                "waiting": lambda t, s: s.waiting,
            },
        ),
    ),
    (
        "gauge",
        "nv_trt_llm_kv_cache_block_metrics",
        "Blocks of the KV cache.",
        _by(
            "kv_cache_block_type",
            {
                "max": lambda t, s: s.blocks_total,
                "used": lambda t, s: s.blocks_used,
                "free": lambda t, s: s.blocks_total - s.blocks_used,
                "fraction": lambda t, s: s.blocks_used / s.blocks_total if s.blocks_total else 0.0,
            },
        ),
    ),
    (
        "gauge",
        "nv_trt_llm_general_metrics",
        "Steps of the engine.",
        _by("general_type", {"iteration_counter": lambda t, s: s.steps}),
    ),
)


def told(views: Sequence[View]) -> str:
    """Return the series of all models as text."""
    each = [(labels({"model": view.model, "version": "1"}), view) for view in views]
    return "".join(
        scalar(kind, name, help, [(common, values(view.metrics.totals, view.stats)) for common, view in each])
        for kind, name, help, values in SCALARS
    )
