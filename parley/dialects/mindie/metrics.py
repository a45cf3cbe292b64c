"""The server's counts under MindIE's metric names, which have no prefix. Knows no other names.

The original's accelerator cache is the KV cache here, on any device. Nothing is ever swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parley.metrics.recorded import Metrics, View
from parley.metrics.series import Distribution, header, labels, scalar

Value = Callable[[View], float]


def _asked(view: View) -> float:
    totals = view.metrics.totals
    ended = totals.succeeded + totals.failed + totals.cancelled + totals.rejected
    return ended + view.metrics.refused.total + view.open


def _failed(view: View) -> float:
    totals = view.metrics.totals
    return totals.failed + totals.cancelled + totals.rejected + view.metrics.refused.total


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


SCALARS: tuple[tuple[str, str, str, Value], ...] = (
    ("counter", "request_received_total", "Requests received.", _asked),
    ("counter", "request_success_total", "Requests answered.", lambda v: v.metrics.totals.succeeded),
    ("counter", "request_failed_total", "Requests not answered.", _failed),
    ("counter", "num_preemptions_total", "Sequences preempted.", lambda v: v.stats.preemptions),
    ("gauge", "num_requests_running", "Sequences in the running batch.", lambda v: v.stats.running),
    ("gauge", "num_requests_waiting", "Sequences waiting to run.", lambda v: v.stats.waiting),
    ("gauge", "num_requests_swapped", "Always 0: nothing is swapped.", lambda v: 0),
    ("counter", "prompt_tokens_total", "Prompt tokens of requests that began here.", lambda v: v.stats.prompt_tokens),
    ("counter", "generation_tokens_total", "Tokens generated.", lambda v: v.stats.generated_tokens),
    ("gauge", "avg_prompt_throughput_toks_per_s", "Prompt tokens per second, over the last ten seconds.",
     lambda v: v.metrics.prompt_rate.mean),
    ("gauge", "avg_generation_throughput_toks_per_s", "Tokens generated per second, over the last ten seconds.",
     lambda v: v.metrics.output_rate.mean),
    ("gauge", "failed_request_perc", "Share of received requests that failed, 0 to 1.",
     lambda v: _share(_failed(v), _asked(v))),
    ("gauge", "npu_cache_usage_perc", "Share of KV blocks in use, 0 to 1.",
     lambda v: _share(v.stats.blocks_used, v.stats.blocks_total)),
    ("gauge", "cpu_cache_usage_perc", "Always 0: nothing is swapped.", lambda v: 0),
    ("gauge", "npu_prefix_cache_hit_rate", "Share of looked-up tokens found in the prefix cache, 0 to 1.",
     lambda v: _share(v.stats.prefix_hits, v.stats.prefix_queries)),
    ("gauge", "all_radix_match_num", "Tokens looked up in the prefix cache.", lambda v: v.stats.prefix_queries),
    ("gauge", "npu_radix_match_hit_num", "Tokens found in the prefix cache.", lambda v: v.stats.prefix_hits),
)  # fmt: skip

HISTOGRAMS: tuple[tuple[str, str, Callable[[Metrics], Distribution]], ...] = (
    ("time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", lambda m: m.first_token),
    ("time_per_output_token_seconds", "Seconds between two tokens.", lambda m: m.between_tokens),
    ("e2e_request_latency_seconds", "Seconds from a request's arrival to its last token.", lambda m: m.whole),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.prompt_length),
    ("request_generation_tokens", "Output tokens of a request.", lambda m: m.output_length),
)


def told(views: Sequence[View]) -> str:
    """Return the series of all models as text."""
    each = [(labels({"model_name": view.model}), view) for view in views]
    parts = [
        scalar(kind, name, help, [(common, [("", value(view))]) for common, view in each])
        for kind, name, help, value in SCALARS
    ]
    for name, help, read in HISTOGRAMS:
        parts.append(header("histogram", name, help))
        for common, view in each:
            parts += read(view.metrics).lines(name, common, "mindie")
    return "".join(parts)
