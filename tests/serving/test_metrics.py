"""The metrics page: the queries of vLLM's and TGI's dashboards find their names and labels, with correct values."""

import asyncio
import re
from types import SimpleNamespace

import msgspec
import pytest
from support.http_client import HELLO_CHAT, MODEL_INFO
from support.metrics_page import metric_value

from parley.errors import EngineError
from parley.metrics.http_requests import HttpRequestMetrics
from parley.metrics.key_names import MAX_KEYS
from parley.metrics.model_metrics import ModelMetrics, ModelSnapshot
from parley.metrics.series import BucketHistogram, LabelledCounter, scalar_lines
from parley.serving import request_metrics
from parley.serving.request_metrics import RequestMetrics
from parley.serving.web_pages.metrics_page import fit_buckets, render_metrics_page
from parley.types import EngineStats, Request, TextPrompt, Usage
from parley.web.logs import AccessLogEntry

VLLM_LABELS = 'model_name="tiny",engine="0"'

# Queried by vLLM's public dashboard, and by autoscalers and routers for vLLM.
VLLM_QUERIES = [
    *(f"{name}_{part}" for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds",
      "time_per_output_token_seconds", "time_to_first_token_seconds", "request_prompt_tokens",
      "request_generation_tokens", "request_queue_time_seconds", "request_prefill_time_seconds",
      "request_decode_time_seconds", "request_inference_time_seconds", "request_max_num_generation_tokens",
      "request_params_n", "request_params_max_tokens", "iteration_tokens_total", "request_prefill_kv_computed_tokens",
      "request_time_per_output_token_seconds", "request_num_preemptions") for part in ("sum", "count")),
    "prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting",
    "kv_cache_usage_perc", "gpu_cache_usage_perc", "num_requests_swapped", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "gpu_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total", "prompt_tokens_cached_total", "external_prefix_cache_queries_total",
]  # fmt: skip


async def test_metrics_page_answers_the_queries_of_vllm_dashboards(serve):
    server = await serve()
    await server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2})
    page = (await server.get("/metrics")).body.decode()
    values = {name: metric_value(page, f"vllm:{name}{{{VLLM_LABELS}}}") for name in VLLM_QUERIES}
    assert values["request_prompt_tokens_sum"] == values["request_prefill_kv_computed_tokens_sum"] == 3
    assert values["request_generation_tokens_sum"] == values["generation_tokens_total"] == 18
    assert values["request_max_num_generation_tokens_sum"] == values["request_params_max_tokens_sum"] == 9
    assert values["request_params_n_sum"] == 2
    assert (values["request_num_preemptions_sum"], values["request_num_preemptions_count"]) == (0, 1)
    assert values["time_per_output_token_seconds_count"] == values["inter_token_latency_seconds_count"] == 16
    assert values["iteration_tokens_total_count"] == 9
    assert values["iteration_tokens_total_sum"] == values["prompt_tokens_total"] + values["generation_tokens_total"]
    for line, number in (
        (f'request_success_total{{{VLLM_LABELS},finished_reason="length"}}', 2),
        (f'request_success_total{{{VLLM_LABELS},finished_reason="repetition"}}', 0),
        (f'num_requests_waiting_by_reason{{{VLLM_LABELS},reason="capacity"}}', 0),
        (f'engine_sleep_state{{{VLLM_LABELS},sleep_state="awake"}}', 1),
        (f'admission_rejections_total{{{VLLM_LABELS},reason="queue_full"}}', 0),
        (f'cache_config_info{{{VLLM_LABELS},block_size="16",cache_dtype="auto",enable_prefix_caching="True",'
         f'kv_cache_max_concurrency="16.00",kv_cache_size_tokens="65536",'
             f'num_cpu_blocks="0",num_gpu_blocks="4096"}}', 1),
        (f'request_prompt_tokens_bucket{{{VLLM_LABELS},le="2"}}', 0),
        (f'request_prompt_tokens_bucket{{{VLLM_LABELS},le="5"}}', 1),
        (f'request_prompt_tokens_bucket{{{VLLM_LABELS},le="2000"}}', 1),
        (f'iteration_tokens_total_bucket{{{VLLM_LABELS},le="1"}}', 0),
        (f'iteration_tokens_total_bucket{{{VLLM_LABELS},le="8"}}', 9),
    ):  # fmt: skip
        assert metric_value(page, f"vllm:{line}") == number, line
    assert 'request_prompt_tokens_bucket{model_name="tiny",engine="0",le="5000"}' not in page  # beyond the context
    assert "# TYPE vllm:iteration_tokens_total histogram" in page


async def test_metrics_page_counts_media(serve):
    server = await serve()
    page = (await server.get("/metrics")).body.decode()
    assert metric_value(page, f"vllm:mm_cache_hits_total{{{VLLM_LABELS}}}") == 0
    stats = EngineStats(media_cache_queries=5, media_cache_hits=2, media_items={"image": 7}, encode_seconds=1.5)
    info = msgspec.structs.replace(server.engine.info, media_kinds=frozenset({"image", "video"}))
    metrics = ModelMetrics()
    fit_buckets(metrics, 100)
    page = render_metrics_page(
        [ModelSnapshot("tiny", metrics, stats, info, True, True, 1.0, 0)], {}, HttpRequestMetrics()
    )
    for line, number in (
        (f"vllm:mm_cache_queries_total{{{VLLM_LABELS}}}", 5),
        (f"vllm:mm_cache_hits_total{{{VLLM_LABELS}}}", 2),
        ('parley:media_items_total{model_name="tiny",kind="image"}', 7),
        ('parley:media_items_total{model_name="tiny",kind="video"}', 0),
        ('parley:media_encode_seconds_total{model_name="tiny"}', 1.5),
    ):
        assert metric_value(page, line) == number, line


def test_preemption_metric_sums_over_all_choices():
    metrics = ModelMetrics()
    fit_buckets(metrics, 100)
    tally = RequestMetrics(metrics, AccessLogEntry(), 0.0)
    tally.record_submit(Request(id="r", model="m", prompts=[TextPrompt("a")], n=2), Usage(3, 0))
    for choice, times in ((0, 1), (1, 1), (0, 2), (0, 2)):  # the second number is cumulative
        tally.record_preemptions(choice, times)
    tally.record_end([4, 4], 0, failed=False)
    lines = "".join(metrics.preemption_counts.histogram_lines("p", "", "vllm"))
    assert 'p_bucket{le="2"} 0\np_bucket{le="5"} 1\n' in lines and lines.endswith("p_sum 3\np_count 1\n")


@pytest.mark.parametrize(("resumed", "phases"), [(False, (5.0, 3.0)), (True, (None, 10.0))])
def test_timings_divide_inference_at_the_first_token(monkeypatch, resumed, phases):
    monkeypatch.setattr(request_metrics, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    tally = RequestMetrics(ModelMetrics(), AccessLogEntry(), 90.0)
    assert (tally.current_timings().prefill, tally.current_timings().decode) == (None, None)
    tally.record_submit(Request(id="r", model="m", prompts=[TextPrompt("a")]), Usage(3, 0), resumed=resumed)
    if resumed:  # another instance computed the prompt and the first token
        with tally.replaying_outputs():
            tally.record_tokens(0, 1, 100.0, 0.0)
    for now, queue_seconds in (107.0, 2.0), (108.0, 0.0), (110.0, 0.0):
        tally.record_tokens(0, 1, now, queue_seconds)
    assert (tally.current_timings().prefill, tally.current_timings().decode) == phases


async def test_metrics_page_answers_the_queries_of_the_tgi_dashboard(serve):
    server = await serve(max_batch=1, max_queue=0)
    for body in ({"inputs": "abc"}, {"inputs": ""}, {"inputs": "a", "parameters": {"temperature": "x"}}):
        await server.post("/generate", body | {"parameters": {"max_new_tokens": 9} | body.get("parameters", {})})
    await server.post("/tgi/generate_stream", {"inputs": ""})
    server.engine.step_gate.clear()
    running = asyncio.create_task(server.post("/v1/chat/completions", HELLO_CHAT))
    await server.until(lambda: server.engine.open_stream_count == 1)
    assert (await server.post("/generate", {"inputs": "a"})).status == 429
    page = (await server.get("/metrics")).body.decode()
    assert metric_value(page, "tgi_request_count") == 6
    for generation in list(server.service.open_requests):
        generation.fail_request(EngineError("gone"))
    assert (await running).status == 500
    page = (await server.get("/metrics")).body.decode()
    assert metric_value(page, "tgi_request_count") == 6
    assert metric_value(page, "tgi_request_success") == 1
    failed = {name: metric_value(page, f'tgi_request_failure{{err="{name}"}}')
              for name in ("validation", "overloaded", "generation", "dropped")}  # fmt: skip
    assert failed == {"validation": 3, "overloaded": 1, "generation": 1, "dropped": 0}
    assert (
        metric_value(page, "tgi_request_generated_tokens_sum")
        == metric_value(page, "tgi_request_max_new_tokens_sum") - 8
        == 9
    )
    for name in ("tgi_request_duration", "tgi_request_validation_duration", "tgi_request_input_length"):
        assert metric_value(page, f"{name}_count") == 2
    for name in ("queue_duration", "inference_duration", "mean_time_per_token_duration"):
        assert metric_value(page, f"tgi_request_{name}_count") == 1
    for name in ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens"):
        assert metric_value(page, name) in (0, 1)
    assert metric_value(page, "tgi_batch_next_size_count") == 9
    assert metric_value(page, 'tgi_batch_inference_count{method="prefill"}') == 1
    assert metric_value(page, 'tgi_batch_inference_duration_count{method="decode"}') == 8
    assert metric_value(page, 'tgi_request_duration_bucket{le="145.611"}') == 2
    assert 'tgi_request_input_length_bucket{le="40.95"}' in page and 'le="4096.0"}' in page


def test_distribution_counts_in_the_buckets_of_each_api():
    distribution = BucketHistogram(a=(1, 2), b=(1.5,))
    for number in (0.5, 1, 1.2, 2, 3):
        distribution.observe(number)
    distribution.observe(1, 3)
    lines = "".join(distribution.histogram_lines("x", "", "a"))
    assert (
        lines == 'x_bucket{le="1"} 5\nx_bucket{le="2"} 7\nx_bucket{le="+Inf"} 8\nx_sum 10.699999999999999\nx_count 8\n'
    )
    assert "".join(distribution.histogram_lines("x", 'l="1"', "b")).startswith('x_bucket{l="1",le="1.5"} 6\n')
    assert distribution.observed_count == 8
    with pytest.raises(KeyError):
        next(distribution.histogram_lines("x", "", "c"))
    distribution.set_scale("b", (1.5,))
    assert distribution.observed_count == 8
    distribution.set_scale("c", (7,))
    distribution.observe(8)
    assert "".join(distribution.histogram_lines("x", "", "c")).startswith('x_bucket{le="7"} 0\nx_bucket{le="+Inf"} 1\n')


def test_scalar_metrics_join_common_and_own_labels():
    count = LabelledCounter("a")
    count.add_count(2, "b")
    assert count.total_count == 2
    values = [("", 1), ('l="2"', 0.5), (',l="3"', 2)]
    assert scalar_lines("gauge", "x", "X.", [('m="1"', values), ("", [("", 7)])]) == (
        '# HELP x X.\n# TYPE x gauge\nx{m="1"} 1\nx{m="1",l="2"} 0.5\nx{m="1",l="3"} 2\nx 7\n'
    )


# What the published dashboards of these servers ask for: TGI's assets/tgi_grafana.json, Triton's
# deploy/*/dashboard.json but for its GPU gauges, and what vLLM's dashboards ask of its HTTP server.
DASHBOARD_TEXT = """
tgi_batch_concat tgi_batch_concat_duration_bucket tgi_batch_current_max_tokens tgi_batch_current_size
tgi_batch_decode_duration_bucket tgi_batch_filter_duration_bucket tgi_batch_forward_duration_bucket
tgi_batch_inference_duration_bucket tgi_queue_size tgi_request_count tgi_request_duration_bucket tgi_request_failure
tgi_request_generated_tokens_bucket tgi_request_generated_tokens_count tgi_request_generated_tokens_sum
tgi_request_input_length_bucket tgi_request_mean_time_per_token_duration_bucket tgi_request_queue_duration_bucket
tgi_request_skipped_tokens_bucket tgi_request_success
nv_cpu_memory_used_bytes nv_cpu_utilization nv_inference_compute_duration_us nv_inference_compute_infer_duration_us
nv_inference_count nv_inference_first_response_histogram_ms_bucket nv_inference_load_ratio_bucket
nv_inference_queue_duration_us nv_inference_request_failure nv_inference_request_success
http_requests_total http_request_duration_seconds_bucket http_request_duration_highr_seconds_bucket
process_cpu_seconds_total process_resident_memory_bytes process_open_fds
"""


async def test_metrics_page_has_every_name_that_published_dashboards_ask_for(serve):
    server = await serve(api_keys=("a", "b"))
    headers = {"authorization": "Bearer b", "content-type": "application/json"}
    body = b'{"prompt": [5, 6, 7], "max_tokens": 9}'
    assert (await server.call("POST", "/v1/completions", body, headers)).status == 200
    page = (await server.call("GET", "/metrics", b"", headers)).body.decode()
    names = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
    assert not {*DASHBOARD_TEXT.split()} - names
    tokens = {kind: metric_value(page, f'parley:tokens_total{{model_name="tiny",key="key-2",kind="{kind}"}}')
              for kind in ("prompt", "cached", "output")}  # fmt: skip
    assert tokens == {"prompt": 3, "cached": 0, "output": 9}
    assert 0 <= metric_value(page, "nv_cpu_utilization") <= 1
    assert metric_value(page, 'nv_inference_load_ratio_sum{model="tiny",version="1"}') >= 1


async def test_metrics_page_says_what_computes_a_model(serve):
    info = msgspec.structs.replace(MODEL_INFO, kernels="avx2", quantization="int8")
    server = await serve(info=info)
    page = (await server.get("/metrics")).body.decode()
    line = next(line for line in page.splitlines() if line.startswith("parley:engine_info"))
    assert 'model_name="tiny"' in line and 'quantization="int8"' in line and 'kernels="avx2"' in line


def test_only_the_first_keys_have_series_of_their_own():
    metrics = ModelMetrics()
    for number in range(MAX_KEYS + 50):
        metrics.record_key_tokens(f"key-{number}", {"prompt": 2, "output": 1})
    assert len(metrics.key_tokens) == 2 * (MAX_KEYS + 1)
    assert (metrics.key_tokens["other", "prompt"], metrics.key_tokens["key-0", "output"]) == (100, 1)
