"""The server's counts under MindIE's metric names, which have no prefix. Knows no other names.

The original's accelerator cache is the KV cache here, on any device. Nothing is ever swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.series import BucketHistogram, format_labels, metric_header, scalar_lines

SCALE = "mindie"  # name of the scale of histograms
ValueReader = Callable[[ModelSnapshot], float]


def _requests_received(view: ModelSnapshot) -> float:
    totals = view.metrics.totals
    ended_requests = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return ended_requests + view.metrics.invalid_requests.total_count + view.open_requests


def _requests_failed(view: ModelSnapshot) -> float:
    totals = view.metrics.totals
    return totals.failed + totals.cancelled + totals.rejected + view.metrics.invalid_requests.total_count


def _ratio_or_zero(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


MINDIE_SCALARS: tuple[tuple[str, str, str, ValueReader], ...] = (
    ("counter", "request_received_total", "Requests received.", _requests_received),
    ("counter", "request_success_total", "Requests answered.", lambda view: view.metrics.totals.succeeded),
    ("counter", "request_failed_total", "Requests not answered.", _requests_failed),
    ("counter", "num_preemptions_total", "Sequences preempted.", lambda view: view.stats.preemptions),
    ("gauge", "num_requests_running", "Sequences in the running batch.", lambda view: view.stats.running),
    ("gauge", "num_requests_waiting", "Sequences waiting to run.", lambda view: view.stats.waiting),
    ("gauge", "num_requests_swapped", "Always 0: nothing is swapped.", lambda view: 0),
    ("counter", "prompt_tokens_total", "Prompt tokens of requests that began here.",
     lambda view: view.stats.prompt_tokens),
    ("counter", "generation_tokens_total", "Tokens generated.", lambda view: view.stats.generated_tokens),
    ("gauge", "avg_prompt_throughput_toks_per_s", "Prompt tokens per second, over the last ten seconds.",
     lambda view: view.metrics.prompt_rate.mean_rate),
    ("gauge", "avg_generation_throughput_toks_per_s", "Tokens generated per second, over the last ten seconds.",
     lambda view: view.metrics.output_rate.mean_rate),
    ("gauge", "failed_request_perc", "Share of received requests that failed, 0 to 1.",
     lambda view: _ratio_or_zero(_requests_failed(view), _requests_received(view))),
    ("gauge", "npu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
     lambda view: _ratio_or_zero(view.stats.used_pages, view.stats.total_pages)),
    ("gauge", "cpu_cache_usage_perc", "Always 0: nothing is swapped.", lambda view: 0),
    ("gauge", "npu_prefix_cache_hit_rate", "Share of looked-up tokens found in the prefix cache, 0 to 1.",
     lambda view: _ratio_or_zero(view.stats.prefix_hits, view.stats.prefix_queries)),
    ("gauge", "all_radix_match_num", "Tokens looked up in the prefix cache.", lambda view: view.stats.prefix_queries),
    ("gauge", "npu_radix_match_hit_num", "Tokens found in the prefix cache.", lambda view: view.stats.prefix_hits),
)  # fmt: skip

# Bounds of histograms of seconds, and of lengths in tokens.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
GAP_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
LATENCY_BOUNDS = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
LENGTH_BOUNDS = (
    10,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10_000,
    16_000,
    20_000,
    32_000,
    50_000,
    64_000,
    128_000,
)

# name, description, histogram, and bucket bounds
MINDIE_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], BucketHistogram], Sequence[float]], ...] = (
    (
        "time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        lambda metrics: metrics.time_to_first_token,
        TTFT_BOUNDS,
    ),
    (
        "time_per_output_token_seconds",
        "Seconds between two tokens.",
        lambda metrics: metrics.inter_token_seconds,
        GAP_BOUNDS,
    ),
    (
        "e2e_request_latency_seconds",
        "Seconds from a request's arrival to its last token.",
        lambda metrics: metrics.request_seconds,
        LATENCY_BOUNDS,
    ),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda metrics: metrics.prompt_length, LENGTH_BOUNDS),
    ("request_generation_tokens", "Output tokens of a request.", lambda metrics: metrics.output_length, LENGTH_BOUNDS),
)


def add_mindie_buckets(metrics: ModelMetrics, context: int) -> None:
    """Add this API's buckets to the histograms of a model; they are the same for every context."""
    for _, _, get_distribution, bounds in MINDIE_HISTOGRAMS:
        get_distribution(metrics).set_scale(SCALE, bounds)


def write_mindie_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return the series of all models as text."""
    labelled_views = [(format_labels({"model_name": view.model}), view) for view in views]
    parts = [
        scalar_lines(kind, name, help_text, [(common, [("", value(view))]) for common, view in labelled_views])
        for kind, name, help_text, value in MINDIE_SCALARS
    ]
    for name, help_text, get_distribution, _ in MINDIE_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        for common, view in labelled_views:
            parts += get_distribution(view.metrics).histogram_lines(name, common, SCALE)
    return "".join(parts)
