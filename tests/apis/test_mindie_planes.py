"""MindIE's management and metrics planes through a running server: their answers in each state, and their commands."""

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from support.http_client import MODEL_INFO, Answer

from parley.dialects import mindie
from parley.dialects.facts import ModelCard, ServerFacts, ServerStatus
from parley.dialects.mindie import management_ports
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mounts import DEDICATED_APIS, dedicated_mounts, mount_table, universal_mounts
from parley.dialects.request_context import RequestContext
from parley.types import EngineStats, ModelInfo

PLANES = dedicated_mounts("mindie-management", "mindie-metrics", "mindie")
LONG = {"inputs": "a", "parameters": {"max_new_tokens": 3000}}
FAULT_COMMAND = "/v1/engine-server/fault-handling-command"


@pytest.fixture
def serve_planes(serve):
    return lambda **options: serve(surfaces=PLANES, **options)


def status_and_body(answer: Answer) -> tuple[int, Any]:
    return answer.status, answer.json if answer.body else ""


def test_management_plane_is_not_mounted_on_the_shared_port():
    everywhere = mount_table(universal_mounts()) | mount_table(dedicated_mounts("mindie"))
    assert not {"/stopService", "/metrics-json", FAULT_COMMAND} & {path for _, path in everywhere}
    assert DEDICATED_APIS["mindie-management"] is mindie.MANAGEMENT


async def test_mindie_health_routes_answer_200_while_healthy(serve_planes):
    server = await serve_planes(names=("m",))
    for path in ("/health", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
        assert status_and_body(await server.get(path)) == (200, "")
    for path in ("/health/timed", "/health/timed-1", "/health/timed-600"):
        answer = await server.get(path)
        assert (answer.status, answer.body) == (200, b'{"status":"healthy"}')
    await server.wait_until_idle()
    assert server.engine.stats.generated_tokens == 3
    wrong = {"error": "Wait time should be in range of [1, 600], input is not valid", "error_type": "NotFoundError"}
    for seconds in ("0", "601", "x", "-1", "1.5"):
        assert status_and_body(await server.get(f"/health/timed-{seconds}")) == (404, wrong)
    long = await server.get("/health/timed-1000")
    assert long.json["error"] == "Max wait time is 600, input is invalid or too long"
    unknown = await server.get("/v2/models/other/ready")
    assert status_and_body(unknown) == (404, {"error": "Model other not found.", "error_type": "NotFoundError"})


async def test_timed_health_tests_an_embedding_model_with_an_embedding(serve_planes):
    server = await serve_planes(info=msgspec.structs.replace(MODEL_INFO, generates=False))
    assert (await server.get("/health/timed-5")).status == 200
    await server.wait_until_idle()


async def test_mindie_health_reports_loading_busy_stalled_and_dead_engines(serve_planes):
    server = await serve_planes(load=60, wait=False)
    assert status_and_body(await server.get("/v2/health/ready")) == (503, "")
    assert (await server.get("/health/timed-1")).status == 503

    server = await serve_planes(max_batch=1, max_queue=0, tick=0.01)
    running = asyncio.create_task(server.post("/generate", LONG))
    await server.until(lambda: server.model.used_slots)
    assert status_and_body(await server.get("/v2/health/live")) == (200, {"message": "Service is alive but busy"})
    busy = {"message": "Service is alive but busy. Consider reducing request frequency"}
    assert status_and_body(await server.get("/v2/health/ready")) == (503, busy)
    assert (await server.get("/v1/engine-server/running-status")).json["status"] == 5
    assert status_and_body(await server.get("/health/timed-1")) == (
        200,
        {"status": "healthy"},
    )  # busy, but it makes steps
    running.cancel()
    await server.wait_until_idle()

    server.engine.step_gate.clear()  # the engine stalls
    assert status_and_body(await server.get("/health/timed-1")) == (500, {"status": "abnormal"})
    server.engine.step_gate.set()
    await server.wait_until_idle()
    server.engine.crash_engine()
    for path in ("/health", "/v2/health/live", "/v2/health/ready"):
        assert status_and_body(await server.get(path)) == (500, {"message": "Service is abnormal"})
    assert (await server.get("/v1/engine-server/running-status")).json == {"status": 2, "errors": []}


async def test_mindie_probes_need_no_key_but_commands_need_one(serve_planes):
    server = await serve_planes(api_keys=("k" * 16,))
    assert (await server.get("/v2/health/ready")).status == 200
    for path in ("/stopService", "/info", "/health/timed"):
        assert (await server.get(path)).status == 401
    assert not server.service.shutting_down


async def test_mindie_info_config_and_slots_describe_the_server(serve_planes):
    server = await serve_planes(names=("m",), max_batch=7)
    info = (await server.get("/info")).json
    assert list(info) == [
        "docker_label", "max_batch_total_tokens", "max_best_of", "max_concurrent_requests", "max_stop_sequences",
        "max_waiting_tokens", "sha", "validation_workers", "version", "waiting_served_ratio", "models",
        "max_input_length",
    ]  # fmt: skip
    assert (info["max_concurrent_requests"], info["max_best_of"], info["max_input_length"]) == (7, 1, 4095)
    assert info["models"] == [
        {
            "model_device_type": "npu",
            "model_dtype": "none",
            "model_id": "m",
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": 4096,
        }
    ]
    assert (await server.get("/v1/config")).json == {
        "modelName": "m",
        "maxSeqLen": 4096,
        "npuMemSize": -1,
        "cpuMemSize": 5,
        "worldSize": 1,
        "maxOutputLen": 4096,
        "cacheBlockSize": server.model.model_info.page_tokens,
    }
    slots = (await server.get("/v2/models/m/getSlotCount")).json
    assert list(slots) == ["total_slots", "free_slots", "available_tokens_length"]
    assert (slots["total_slots"], slots["free_slots"]) == (7, 7)
    assert (await server.get("/v2/models/x/getSlotCount")).status == 404


def test_mindie_info_reports_limits_of_the_configuration_file():
    rules = MindieRules("extended", max_seq_len=100, max_input_token_len=50, max_iter_times=20, npu_mem_size=3)
    facts = ServerFacts("1", [ModelCard("m", 1, 100)], True, ServerStatus())
    head = RequestContext("0f", 1, "fp", context_length=90)
    info = json.loads(management_ports.mindie_info(rules, b"", head, facts).body)
    assert (info["max_input_length"], info["models"][0]["max_total_tokens"], info["max_best_of"]) == (50, 100, 128)
    config = json.loads(management_ports.mindie_config(rules, b"", head, facts).body)
    assert (config["maxSeqLen"], config["maxOutputLen"], config["npuMemSize"]) == (100, 20, 3)


async def test_metrics_json_reports_latencies_and_queue_lengths(serve_planes):
    server = await serve_planes(names=("m",), tick=0.02)
    answer = await server.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 4}})
    assert answer.status == 200
    body = (await server.get("/metrics-json")).json
    assert body["resultType"] == "vector"
    values = {}
    for entry in body["result"]:
        (labels,) = entry["metric"]
        assert (labels["job"], labels["instance"]) == ("node", "localhost") and list(entry) == ["metric", "value"]
        values[labels["__name__"]] = entry["value"]
    waiting, running, blocks = "waitingInferRequestNum", "processingInferRequestNum", "remainBlocks"
    assert list(values) == ["TTFT", "TBT", waiting, running, blocks]
    assert int(values["TTFT"]) >= 20 and int(values["TBT"]) >= 20 and values[waiting] == values[running] == "0"


async def test_mindie_metrics_page_has_exactly_the_documented_names(serve_planes):
    server = await serve_planes(names=("m",))
    for _ in range(3):
        await server.post("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 4}})
    await server.post("/generate", {})
    answer = await server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain") and answer.status == 200
    text = answer.body.decode()
    kinds = dict(re.findall(r"# TYPE (\S+) (\w+)", text))
    counters = ("request_received_total", "request_success_total", "request_failed_total", "num_preemptions_total",
                "prompt_tokens_total", "generation_tokens_total")  # fmt: skip
    gauges = ("num_requests_running", "num_requests_waiting", "num_requests_swapped",
              "avg_prompt_throughput_toks_per_s", "avg_generation_throughput_toks_per_s", "failed_request_perc",
              "npu_cache_usage_perc", "cpu_cache_usage_perc", "npu_prefix_cache_hit_rate", "all_radix_match_num",
              "npu_radix_match_hit_num")  # fmt: skip
    histograms = ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds",
                  "request_prompt_tokens", "request_generation_tokens")  # fmt: skip
    assert kinds == dict.fromkeys(counters, "counter") | dict.fromkeys(gauges, "gauge") | dict.fromkeys(
        histograms, "histogram"
    )
    for line in ("request_received_total 4", "request_success_total 3", "request_failed_total 1",
                 "failed_request_perc 0.25", "generation_tokens_total 12", "request_generation_tokens_count 3",
                 "time_per_output_token_seconds_count 9"):  # fmt: skip
        name, value = line.split()
        assert f'\n{name}{{model_name="m"}} {value}\n' in "\n" + text
    bounds = re.findall(r'request_prompt_tokens_bucket\{model_name="m",le="([^"]+)"\}', text)
    assert bounds[:3] == ["10", "50", "100"] and bounds[-2:] == ["128000", "+Inf"]


async def test_strict_metrics_plane_answers_500_without_monitoring(serve):
    (page,) = mindie.metrics_dialect(MindieRules("strict", has_metrics_port=False)).routes
    facts = ServerFacts("1", [], True)
    assert page.reader is not None and page.reader(b"", RequestContext("0f", 1, "fp"), facts).status == 500
    assert mindie.metrics_dialect(MindieRules("extended", has_metrics_port=False)).routes == mindie.METRICS.routes


async def test_fault_commands_pause_and_resume_without_losing_requests(serve_planes):
    server = await serve_planes(tick=0.005)

    async def send_command(number: Any) -> tuple[int, Any]:
        return status_and_body(await server.post(FAULT_COMMAND, {"cmd": number}))

    async def status() -> int:
        return (await server.get("/v1/engine-server/running-status")).json["status"]

    done = {"status": True, "message": "success", "reason": [{"device_id": 0, "result": True, "message": "success"}]}
    wrong = {"error": "Command is not consistent with current status.", "error_type": "Bad Request"}
    running = asyncio.create_task(server.post("/generate", LONG | {"parameters": {"max_new_tokens": 300}}))
    await server.until(lambda: server.engine.stats.running)
    assert await status() == 1
    for number in (1, 2, 4, -1):
        assert await send_command(number) == (400, wrong)
    assert await send_command(0) == (200, done) and await status() == 3
    assert (await server.post("/generate", {"inputs": "a"})).status == 503
    assert await send_command(0) == await send_command(3) == (400, wrong)
    assert await send_command(1) == (200, done) and await status() == 0
    assert (await server.post("/generate", {"inputs": "a"})).status == 503
    assert await send_command(2) == (200, done) and await status() == 1
    assert (await server.post("/generate", {"inputs": "a"})).status == 200
    assert await send_command(3) == (200, done) and await send_command(2) == (200, done)
    assert (await running).status == 200  # the pause lost no running request
    for body in ({}, {"cmd": None}, {"cmd": "0"}, [], b"{"):
        answer = await server.post(FAULT_COMMAND, body)
        assert answer.status == 422 and json.loads(answer.json["error"])["error_type"] == "validation"


async def test_mindie_adapter_routes_check_names_and_paths(serve_planes):
    server = await serve_planes()
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        good = await server.post(path, {"lora_name": "a", "lora_path": "/x/y", "master_model": "tiny"})
        assert good.status == 200 and b"--lora-root" in good.body
        answer = await server.post(path, b"{")
        assert answer.status == 200 and b"wanted" in answer.body
        assert (await server.post(path, {"lora_name": "a b"})).json["error"] == "Input invalid lora name"
        answer = await server.post(path, {"lora_name": "a", "lora_path": "../x"})
        assert status_and_body(answer) == (
            503,
            {"error": "Input invalid lora path", "error_type": "Service Unavailable"},
        )
    assert (
        management_ports.read_adapter_change(MindieRules("extended"), True, b"{}", RequestContext("0f", 1, "fp")).status
        == 400
    )


async def test_stop_service_drains_running_requests_and_rejects_new_ones(serve_planes):
    server = await serve_planes(tick=0.005)
    ended = asyncio.Event()
    server.service.stop_server = ended.set
    running = asyncio.create_task(server.post("/generate", LONG | {"parameters": {"max_new_tokens": 60}}))
    await server.until(lambda: server.engine.stats.running)
    stopping = asyncio.create_task(server.get("/stopService"))
    await server.until(lambda: server.service.shutting_down)
    assert (await server.post("/generate", {"inputs": "a"})).status == 503
    for path in ("/health", "/v2/health/live"):
        answer = await server.get(path)
        assert status_and_body(answer) == (
            503,
            {"error": "The service has been stopped.", "error_type": "Service Unavailable"},
        )
    for path in ("/v1/status", "/v2/status"):
        answer = await server.get(path)
        assert (answer.status, answer.json["error"]) == (503, "The service has been stopped.")
    assert (await server.get("/stopService")).status == 500
    assert not stopping.done() and not ended.is_set()
    assert (await running).status == 200
    assert status_and_body(await stopping) == (200, "")
    await server.until(ended.is_set)


async def test_forced_stop_service_answers_before_running_requests_end(serve_planes):
    server = await serve_planes(tick=0.005)
    ended = asyncio.Event()
    server.service.stop_server = ended.set
    running = asyncio.create_task(server.post("/generate", LONG | {"parameters": {"max_new_tokens": 60}}))
    await server.until(lambda: server.engine.stats.running)
    assert (await server.get("/stopService?mode=Force")).status == 200
    assert not running.done()
    assert (await running).status == 200  # it finished within the grace period
    await server.until(ended.is_set)


@pytest.mark.parametrize("path", ["/stopService", "/stopService?mode=Force"])
async def test_stop_service_ends_requests_that_outlast_the_drain_time(serve_planes, monkeypatch, path):
    monkeypatch.setattr("parley.serving.admin.control.FORCED_DRAIN_SECONDS", 0.1)
    server = await serve_planes(tick=0.01, drain=0.1)
    ended = asyncio.Event()
    server.service.stop_server = ended.set
    running = asyncio.create_task(server.post("/generate", LONG))
    await server.until(lambda: server.engine.stats.running)
    assert (await server.get(path)).status == 200
    assert (await running).status == 503
    await server.until(ended.is_set)


async def test_stop_service_rejects_requests_from_web_pages(serve_planes):
    server = await serve_planes()
    for site in ("cross-site", "same-site"):
        assert (await server.get("/stopService", **{"sec-fetch-site": site})).status == 403
    assert not server.service.shutting_down


def test_mindie_info_names_the_real_device_only_in_extended_profile():
    info = ModelInfo(architecture="a", dtype="bfloat16", device="cuda", parameters=1, vocab_size=1, max_model_len=1,
                     weights_bytes=1, kv_bytes=1, kv_pages=1, page_tokens=1, fused=True)  # fmt: skip
    facts = ServerFacts("1", [ModelCard("m", 1, 1)], True, ServerStatus(info=info, stats=EngineStats()))
    for profile, device in (("strict", "npu"), ("extended", "cuda")):
        body = json.loads(
            management_ports.mindie_info(
                MindieRules(profile), b"", RequestContext("0f", 1, "fp", context_length=9), facts
            ).body
        )
        assert (body["models"][0]["model_device_type"], body["models"][0]["model_dtype"]) == (device, "bfloat16")
