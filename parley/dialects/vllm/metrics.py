"""The server's metrics under vLLM's names, for its dashboards, autoscalers and routers. Knows no other API's names.

Names that newer versions dropped are included, for older dashboards. Values that cannot occur here are reported as 0
where a dashboard would show a gap otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from parley.metrics.recorded import Metrics, View
from parley.metrics.series import Count, Distribution, header, labels, scalar

Values = Callable[[View], Iterable[tuple[str, float]]]  # additional labels, value


def _one(read: Callable[[View], float]) -> Values:
    return lambda view: [("", read(view))]


def _by(label: str, read: Callable[[Metrics], Count]) -> Values:
    return lambda view: [(labels({label: value}), count) for value, count in read(view.metrics).counts.items()]


def _share(view: View) -> float:
    return view.stats.blocks_used / view.stats.blocks_total if view.stats.blocks_total else 0.0


def _waiting(view: View) -> list[tuple[str, float]]:
    return [('reason="capacity"', view.stats.waiting), ('reason="deferred"', 0)]


def _asleep(view: View) -> list[tuple[str, float]]:
    return [(f'sleep_state="{state}"', state == "awake") for state in ("awake", "weights_offloaded", "discard_all")]


def _sources(view: View) -> list[tuple[str, float]]:
    cached, repeated = view.metrics.cached.total, view.metrics.repeated.total
    return [
        ('source="local_compute"', max(0.0, view.stats.prompt_tokens - cached) + repeated),
        ('source="local_cache_hit"', cached),
        ('source="external_kv_transfer"', view.metrics.moved.total),
    ]


def _cache(view: View) -> list[tuple[str, float]]:
    """Return the properties of the cache as labels; nothing before the model is loaded."""
    if view.info is None:
        return []
    tokens = view.info.kv_blocks * view.info.block_size
    told = {
        "block_size": str(view.info.block_size),
        "cache_dtype": view.info.kv_dtype,
        "enable_prefix_caching": str(view.prefix_cache),
        "kv_cache_max_concurrency": f"{tokens / view.info.max_model_len:.2f}",
        "kv_cache_size_tokens": str(tokens),
        "num_cpu_blocks": "0",
        "num_gpu_blocks": str(view.info.kv_blocks),
    }
    return [(labels(told), 1)]


def _places(view: View) -> list[tuple[str, float]]:
    return [(labels({"position": str(place)}), count) for place, count in enumerate(view.stats.draft_accepted)]


def _adapters(view: View) -> list[tuple[str, float]]:
    """Return the adapters in use as labels, with the time as the value; nothing if adapters are not supported."""
    if not view.places:
        return []
    names = {waits: ",".join(sorted(name for name, each in view.adapters if each == waits)) for waits in (True, False)}
    told = {"max_lora": str(view.places), "waiting_lora_adapters": names[True], "running_lora_adapters": names[False]}
    return [(labels(told), time.time())]


def _zero(view: View) -> list[tuple[str, float]]:
    return [("", 0)]


QUERIES, HITS = _one(lambda v: v.stats.prefix_queries), _one(lambda v: v.stats.prefix_hits)
SHARE = _one(_share)

SCALARS: tuple[tuple[str, str, str, Values], ...] = (
    ("gauge", "num_requests_running", "Sequences in the running batch.", _one(lambda v: v.stats.running)),
    ("gauge", "num_requests_waiting", "Sequences waiting to run.", _one(lambda v: v.stats.waiting)),
    ("gauge", "num_requests_waiting_by_reason", "The same, by reason.", _waiting),
    ("gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", SHARE),
    ("gauge", "engine_sleep_state", "1 for the engine's current state.", _asleep),
    ("gauge", "cache_config_info", "Properties of the KV cache.", _cache),
    ("gauge", "lora_requests_info", "Adapters of running and waiting requests; the value is the time.", _adapters),
    ("counter", "prompt_tokens_total", "Prompt tokens of requests that began here.",
     _one(lambda v: v.stats.prompt_tokens)),
    ("counter", "generation_tokens_total", "Tokens generated.", _one(lambda v: v.stats.generated_tokens)),
    ("counter", "prompt_tokens_cached_total", "Prompt tokens found in the prefix cache.",
     _one(lambda v: v.metrics.cached.total)),
    ("counter", "prompt_tokens_by_source_total", "Prompt tokens by where their keys and values came from.", _sources),
    ("counter", "prefix_cache_queries_total", "Tokens looked up in the prefix cache.", QUERIES),
    ("counter", "prefix_cache_hits_total", "Tokens found in the prefix cache.", HITS),
    ("counter", "external_prefix_cache_queries_total", "Prompt tokens of requests that another instance began.",
     _one(lambda v: v.metrics.moved.total + v.metrics.repeated.total)),
    ("counter", "external_prefix_cache_hits_total", "Of those, tokens transferred or found here.",
     _one(lambda v: v.metrics.moved.total)),
    ("counter", "mm_cache_queries_total", "Always 0: there are no media.", _zero),
    ("counter", "mm_cache_hits_total", "Always 0: there are no media.", _zero),
    ("counter", "num_preemptions_total", "Sequences preempted.", _one(lambda v: v.stats.preemptions)),
    ("counter", "request_success_total", "Finished choices, by reason.",
     _by("finished_reason", lambda m: m.finished)),
    ("counter", "admission_rejections_total", "Requests rejected, by reason.", _by("reason", lambda m: m.rejected)),
    ("counter", "spec_decode_num_drafts_total", "Drafts verified.", _one(lambda v: v.stats.drafts)),
    ("counter", "spec_decode_num_draft_tokens_total", "Draft tokens verified.", _one(lambda v: v.stats.draft_tokens)),
    ("counter", "spec_decode_num_accepted_tokens_total", "Draft tokens accepted.",
     _one(lambda v: sum(v.stats.draft_accepted))),
    ("counter", "spec_decode_num_accepted_tokens_per_pos_total", "The same, by position in the draft.", _places),
    # names of older versions
    ("gauge", "gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1 (old name).", SHARE),
    ("gauge", "cpu_cache_usage_perc", "Always 0: nothing is swapped (old name).", _zero),
    ("gauge", "num_requests_swapped", "Always 0: nothing is swapped (old name).", _zero),
    ("counter", "gpu_prefix_cache_queries_total", "Tokens looked up in the prefix cache (old name).", QUERIES),
    ("counter", "gpu_prefix_cache_hits_total", "Tokens found in the prefix cache (old name).", HITS),
)  # fmt: skip

HISTOGRAMS: tuple[tuple[str, str, Callable[[Metrics], Distribution]], ...] = (
    ("time_to_first_token_seconds", "From a request's arrival to its first token.", lambda m: m.first_token),
    ("inter_token_latency_seconds", "Between two tokens.", lambda m: m.between_tokens),
    ("time_per_output_token_seconds", "Between two tokens (old name).", lambda m: m.between_tokens),
    ("request_time_per_output_token_seconds", "Mean time per token after the first.", lambda m: m.per_token),
    ("e2e_request_latency_seconds", "From a request's arrival to its last token.", lambda m: m.whole),
    ("request_queue_time_seconds", "From a request's arrival to its first step.", lambda m: m.queued),
    ("request_prefill_time_seconds", "From a request's first step to its first token.", lambda m: m.prefill),
    ("request_decode_time_seconds", "From the first token to the last.", lambda m: m.decode),
    ("request_inference_time_seconds", "From a request's first step to its end.", lambda m: m.inference),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.prompt_length),
    ("request_prefill_kv_computed_tokens", "Of those, computed rather than found.", lambda m: m.computed_length),
    ("request_generation_tokens", "Output tokens of a request.", lambda m: m.output_length),
    ("request_max_num_generation_tokens", "Output tokens of its longest choice.", lambda m: m.longest_output),
    ("request_num_preemptions", "Preemptions of a request.", lambda m: m.preempted),
    ("request_params_n", "n of a request.", lambda m: m.choices),
    ("request_params_max_tokens", "max_tokens of a request.", lambda m: m.max_tokens),
    ("iteration_tokens_total", "Tokens of a step of the engine.", lambda m: m.step_tokens),
)


def told(views: Sequence[View]) -> str:
    """Return these series in Prometheus' text format."""
    each = [(labels({"model_name": view.model, "engine": "0"}), view) for view in views]
    parts = [
        scalar(kind, f"vllm:{name}", help, [(common, values(view)) for common, view in each])
        for kind, name, help, values in SCALARS
    ]
    for name, help, read in HISTOGRAMS:
        parts.append(header("histogram", f"vllm:{name}", help))
        for common, view in each:
            parts += read(view.metrics).lines(f"vllm:{name}", common, "vllm")
    return "".join(parts)
