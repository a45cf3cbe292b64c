"""The server's counts under MindIE's metric names, which have no prefix. Knows no other names.

The original's accelerator cache is the KV cache here, on any device. Nothing is ever swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parley.metrics.recorded import ModelMetrics, ModelSnapshot
from parley.metrics.series import BucketHistogram, format_labels, metric_header, scalar_lines

ValueReader = Callable[[ModelSnapshot], float]


def _requests_received(view: ModelSnapshot) -> float:
    totals = view.metrics.totals
    ended = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return ended + view.metrics.invalid_requests.total_count + view.open_requests


def _requests_failed(view: ModelSnapshot) -> float:
    totals = view.metrics.totals
    return totals.failed + totals.cancelled + totals.rejected + view.metrics.invalid_requests.total_count


def _ratio_or_zero(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


MINDIE_SCALARS: tuple[tuple[str, str, str, ValueReader], ...] = (
    ("counter", "request_received_total", "Requests received.", _requests_received),
    ("counter", "request_success_total", "Requests answered.", lambda v: v.metrics.totals.succeeded),
    ("counter", "request_failed_total", "Requests not answered.", _requests_failed),
    ("counter", "num_preemptions_total", "Sequences preempted.", lambda v: v.stats.preemptions),
    ("gauge", "num_requests_running", "Sequences in the running batch.", lambda v: v.stats.running),
    ("gauge", "num_requests_waiting", "Sequences waiting to run.", lambda v: v.stats.waiting),
    ("gauge", "num_requests_swapped", "Always 0: nothing is swapped.", lambda v: 0),
    ("counter", "prompt_tokens_total", "Prompt tokens of requests that began here.", lambda v: v.stats.prompt_tokens),
    ("counter", "generation_tokens_total", "Tokens generated.", lambda v: v.stats.generated_tokens),
    ("gauge", "avg_prompt_throughput_toks_per_s", "Prompt tokens per second, over the last ten seconds.",
     lambda v: v.metrics.prompt_rate.mean_rate),
    ("gauge", "avg_generation_throughput_toks_per_s", "Tokens generated per second, over the last ten seconds.",
     lambda v: v.metrics.output_rate.mean_rate),
    ("gauge", "failed_request_perc", "Share of received requests that failed, 0 to 1.",
     lambda v: _ratio_or_zero(_requests_failed(v), _requests_received(v))),
    ("gauge", "npu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
     lambda v: _ratio_or_zero(v.stats.blocks_used, v.stats.blocks_total)),
    ("gauge", "cpu_cache_usage_perc", "Always 0: nothing is swapped.", lambda v: 0),
    ("gauge", "npu_prefix_cache_hit_rate", "Share of looked-up tokens found in the prefix cache, 0 to 1.",
     lambda v: _ratio_or_zero(v.stats.prefix_hits, v.stats.prefix_queries)),
    ("gauge", "all_radix_match_num", "Tokens looked up in the prefix cache.", lambda v: v.stats.prefix_queries),
    ("gauge", "npu_radix_match_hit_num", "Tokens found in the prefix cache.", lambda v: v.stats.prefix_hits),
)  # fmt: skip

MINDIE_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], BucketHistogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token.",
        lambda m: m.time_to_first_token,
    ),
    ("time_per_output_token_seconds", "Seconds between two tokens.", lambda m: m.inter_token_seconds),
    ("e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.", lambda m: m.request_seconds),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.prompt_length),
    ("request_generation_tokens", "Output tokens of a request.", lambda m: m.output_length),
)


def write_mindie_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return the series of all models as text."""
    labelled_views = [(format_labels({"model_name": view.model}), view) for view in views]
    parts = [
        scalar_lines(kind, name, help_text, [(common, [("", value(view))]) for common, view in labelled_views])
        for kind, name, help_text, value in MINDIE_SCALARS
    ]
    for name, help_text, get_distribution in MINDIE_HISTOGRAMS:
        parts.append(metric_header("histogram", name, help_text))
        for common, view in labelled_views:
            parts += get_distribution(view.metrics).histogram_lines(name, common, "mindie")
    return "".join(parts)
