"""The server's metrics under vLLM's names, for its dashboards, autoscalers and routers. Knows no other API's names.

Names that newer versions dropped are included, for older dashboards. Values that cannot occur here are reported as 0
where a dashboard would show a gap otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.series import (
    TPOT_BOUNDS,
    TTFT_BOUNDS,
    BucketHistogram,
    LabelledCounter,
    format_labels,
    metric_header,
    scalar_lines,
)

SCALE = "vllm"  # name of the scale of histograms

LabeledValues = Callable[[ModelSnapshot], Iterable[tuple[str, float]]]  # additional labels, value


def _single_value(read: Callable[[ModelSnapshot], float]) -> LabeledValues:
    return lambda view: [("", read(view))]


def _values_by_label(label: str, read: Callable[[ModelMetrics], LabelledCounter]) -> LabeledValues:
    return lambda view: [(format_labels({label: value}), count) for value, count in read(view.metrics).by_label.items()]


def _cache_usage(view: ModelSnapshot) -> float:
    return view.stats.used_pages / view.stats.total_pages if view.stats.total_pages else 0.0


def _waiting_by_reason(view: ModelSnapshot) -> list[tuple[str, float]]:
    return [('reason="capacity"', view.stats.waiting), ('reason="deferred"', 0)]


def _sleep_states(view: ModelSnapshot) -> list[tuple[str, float]]:
    return [(f'sleep_state="{state}"', state == "awake") for state in ("awake", "weights_offloaded", "discard_all")]


def _prompt_sources(view: ModelSnapshot) -> list[tuple[str, float]]:
    cached, repeated = view.metrics.cached_tokens.total_count, view.metrics.recomputed_tokens.total_count
    return [
        ('source="local_compute"', max(0.0, view.stats.prompt_tokens - cached) + repeated),
        ('source="local_cache_hit"', cached),
        ('source="external_kv_transfer"', view.metrics.external_tokens.total_count),
    ]


def _cache_config(view: ModelSnapshot) -> list[tuple[str, float]]:
    """Return the properties of the cache as labels; nothing before the model is loaded."""
    if view.info is None:
        return []
    tokens = view.info.kv_pages * view.info.page_tokens
    properties = {
        "block_size": str(view.info.page_tokens),
        "cache_dtype": view.info.kv_dtype,
        "enable_prefix_caching": str(view.prefix_cache),
        "kv_cache_max_concurrency": f"{tokens / view.info.max_model_len:.2f}",
        "kv_cache_size_tokens": str(tokens),
        "num_cpu_blocks": "0",
        "num_gpu_blocks": str(view.info.kv_pages),
    }
    return [(format_labels(properties), 1)]


def _accepted_by_position(view: ModelSnapshot) -> list[tuple[str, float]]:
    return [
        (format_labels({"position": str(position)}), count) for position, count in enumerate(view.stats.draft_accepted)
    ]


def _adapters_in_use(view: ModelSnapshot) -> list[tuple[str, float]]:
    """Return the adapters in use as labels, with the time as the value; nothing if adapters are not supported."""
    if not view.adapter_places:
        return []
    names = {
        waits: ",".join(sorted(name for name, waiting in view.active_adapters if waiting == waits))
        for waits in (True, False)
    }
    properties = {
        "max_lora": str(view.adapter_places),
        "waiting_lora_adapters": names[True],
        "running_lora_adapters": names[False],
    }
    return [(format_labels(properties), time.time())]


def _always_zero(view: ModelSnapshot) -> list[tuple[str, float]]:
    return [("", 0)]


CACHE_QUERIES = _single_value(lambda view: view.stats.prefix_queries)
CACHE_HITS = _single_value(lambda view: view.stats.prefix_hits)
CACHE_USAGE = _single_value(_cache_usage)

SCALARS: tuple[tuple[str, str, str, LabeledValues], ...] = (
    (
        "gauge",
        "num_requests_running",
        "Sequences in the running batch.",
        _single_value(lambda view: view.stats.running),
    ),
    ("gauge", "num_requests_waiting", "Sequences waiting to run.", _single_value(lambda view: view.stats.waiting)),
    ("gauge", "num_requests_waiting_by_reason", "The same, by reason.", _waiting_by_reason),
    ("gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", CACHE_USAGE),
    ("gauge", "engine_sleep_state", "1 for the engine's current state.", _sleep_states),
    ("gauge", "cache_config_info", "Properties of the KV cache.", _cache_config),
    (
        "gauge",
        "lora_requests_info",
        ("Adapters of running and waiting requests; the value is the time."),
        _adapters_in_use,
    ),
    (
        "counter",
        "prompt_tokens_total",
        "Prompt tokens of requests that began here.",
        _single_value(lambda view: view.stats.prompt_tokens),
    ),
    (
        "counter",
        "generation_tokens_total",
        "Tokens generated.",
        _single_value(lambda view: view.stats.generated_tokens),
    ),
    (
        "counter",
        "prompt_tokens_cached_total",
        "Prompt tokens found in the prefix cache.",
        _single_value(lambda view: view.metrics.cached_tokens.total_count),
    ),
    (
        "counter",
        "prompt_tokens_by_source_total",
        ("Prompt tokens by where their keys and values came from."),
        _prompt_sources,
    ),
    ("counter", "prefix_cache_queries_total", "Tokens looked up in the prefix cache.", CACHE_QUERIES),
    ("counter", "prefix_cache_hits_total", "Tokens found in the prefix cache.", CACHE_HITS),
    (
        "counter",
        "external_prefix_cache_queries_total",
        "Prompt tokens of requests that another instance began.",
        _single_value(
            lambda view: view.metrics.external_tokens.total_count + view.metrics.recomputed_tokens.total_count
        ),
    ),
    (
        "counter",
        "external_prefix_cache_hits_total",
        "Of those, tokens transferred or found here.",
        _single_value(lambda view: view.metrics.external_tokens.total_count),
    ),
    (
        "counter",
        "mm_cache_queries_total",
        "Media items whose embeddings were looked up.",
        _single_value(lambda view: view.stats.media_cache_queries),
    ),
    (
        "counter",
        "mm_cache_hits_total",
        "Media items found, or encoded for another request at the time.",
        _single_value(lambda view: view.stats.media_cache_hits),
    ),
    ("counter", "num_preemptions_total", "Sequences preempted.", _single_value(lambda view: view.stats.preemptions)),
    (
        "counter",
        "request_success_total",
        "Finished choices, by reason.",
        _values_by_label("finished_reason", lambda metrics: metrics.finished_choices),
    ),
    (
        "counter",
        "admission_rejections_total",
        "Requests rejected, by reason.",
        _values_by_label("reason", lambda metrics: metrics.rejected_requests),
    ),
    ("counter", "spec_decode_num_drafts_total", "Drafts verified.", _single_value(lambda view: view.stats.drafts)),
    (
        "counter",
        "spec_decode_num_draft_tokens_total",
        "Draft tokens verified.",
        _single_value(lambda view: view.stats.draft_tokens),
    ),
    (
        "counter",
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens accepted.",
        _single_value(lambda view: sum(view.stats.draft_accepted)),
    ),
    (
        "counter",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "The same, by position in the draft.",
        _accepted_by_position,
    ),
    # names of older versions
    ("gauge", "gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1 (old name).", CACHE_USAGE),
    ("gauge", "cpu_cache_usage_perc", "Always 0: nothing is swapped (old name).", _always_zero),
    ("gauge", "num_requests_swapped", "Always 0: nothing is swapped (old name).", _always_zero),
    ("counter", "gpu_prefix_cache_queries_total", "Tokens looked up in the prefix cache (old name).", CACHE_QUERIES),
    ("counter", "gpu_prefix_cache_hits_total", "Tokens found in the prefix cache (old name).", CACHE_HITS),
)

# Bounds of histograms of seconds, and of histograms of counts.
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
CHOICE_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTION_BOUNDS = (0, *CHOICE_BOUNDS)
STEP_TOKEN_BOUNDS = (1, *(2**k for k in range(3, 15)))

# name, description, histogram, and bucket bounds; None: lengths up to the model's context
HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], BucketHistogram], Sequence[float] | None], ...] = (
    (
        "time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda metrics: metrics.time_to_first_token,
        TTFT_BOUNDS,
    ),
    ("inter_token_latency_seconds", "Between two tokens.", lambda metrics: metrics.inter_token_seconds, TPOT_BOUNDS),
    (
        "time_per_output_token_seconds",
        "Between two tokens (old name).",
        lambda metrics: metrics.inter_token_seconds,
        TPOT_BOUNDS,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time per token after the first.",
        lambda metrics: metrics.time_per_output_token,
        TPOT_BOUNDS,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's arrival to its last token.",
        lambda metrics: metrics.request_seconds,
        LATENCY_BOUNDS,
    ),
    (
        "request_queue_time_seconds",
        "From a request's arrival to its first step.",
        lambda metrics: metrics.queue_seconds,
        LATENCY_BOUNDS,
    ),
    (
        "request_prefill_time_seconds",
        "From a request's first step to its first token.",
        lambda metrics: metrics.request_prefill_seconds,
        LATENCY_BOUNDS,
    ),
    (
        "request_decode_time_seconds",
        "From the first token to the last.",
        lambda metrics: metrics.request_decode_seconds,
        LATENCY_BOUNDS,
    ),
    (
        "request_inference_time_seconds",
        "From a request's first step to its end.",
        lambda metrics: metrics.inference_seconds,
        LATENCY_BOUNDS,
    ),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda metrics: metrics.prompt_length, None),
    (
        "request_prefill_kv_computed_tokens",
        "Of those, computed rather than found.",
        lambda metrics: metrics.computed_length,
        None,
    ),
    ("request_generation_tokens", "Output tokens of a request.", lambda metrics: metrics.output_length, None),
    (
        "request_max_num_generation_tokens",
        "Output tokens of its longest choice.",
        lambda metrics: metrics.longest_output,
        None,
    ),
    (
        "request_num_preemptions",
        "Preemptions of a request.",
        lambda metrics: metrics.preemption_counts,
        PREEMPTION_BOUNDS,
    ),
    ("request_params_n", "n of a request.", lambda metrics: metrics.choice_counts, CHOICE_BOUNDS),
    ("request_params_max_tokens", "max_tokens of a request.", lambda metrics: metrics.max_tokens, None),
    (
        "iteration_tokens_total",
        "Tokens of a step of the engine.",
        lambda metrics: metrics.step_tokens,
        STEP_TOKEN_BOUNDS,
    ),
)


def add_vllm_buckets(metrics: ModelMetrics, context: int) -> None:
    """Add this API's buckets to the histograms of a model with a context of this length in tokens."""
    powers = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    lengths = [bound for bound in powers if bound <= context]
    for _, _, read, bounds in HISTOGRAMS:
        read(metrics).set_scale(SCALE, lengths if bounds is None else bounds)


def write_vllm_metrics(views: Sequence[ModelSnapshot]) -> str:
    """Return these series in Prometheus' text format."""
    labeled_views = [(format_labels({"model_name": view.model, "engine": "0"}), view) for view in views]
    parts = [
        scalar_lines(kind, f"vllm:{name}", description, [(common, values(view)) for common, view in labeled_views])
        for kind, name, description, values in SCALARS
    ]
    for name, description, read_histogram, _ in HISTOGRAMS:
        parts.append(metric_header("histogram", f"vllm:{name}", description))
        for common, view in labeled_views:
            parts += read_histogram(view.metrics).histogram_lines(f"vllm:{name}", common, SCALE)
    return "".join(parts)
