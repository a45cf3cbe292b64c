"""What the gateway API inference extension and its syncer of adapters need of a model server.

The metrics are those of ``docs/proposals/003-model-server-protocol`` there; the syncer is
``tools/dynamic-lora-sidecar/sidecar/sidecar.py``.
"""

import asyncio
import re

import pytest
from support.metrics_page import metric_value

LABELS = 'model_name="tiny",engine="0"'


@pytest.fixture
async def server(serve, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "adapter_config.json").write_text("{}")
    return await serve(tick=0.001, lora_root=str(tmp_path))


async def read_page(server):
    return (await server.get("/metrics")).body.decode()


def label_values(page, name):
    """Return the labels of the only series of a metric."""
    (labels,) = re.findall(rf"^{name}{{(.*)}} ", page, re.M)
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


async def test_metrics_page_has_the_gauges_of_the_model_server_protocol(server):
    page = await read_page(server)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"# TYPE vllm:{name} gauge" in page
        assert metric_value(page, f"vllm:{name}{{{LABELS}}}") == 0
    cache = label_values(page, "vllm:cache_config_info")
    assert int(cache["block_size"]) == 16 and int(cache["num_gpu_blocks"]) > 0
    adapters = label_values(page, "vllm:lora_requests_info")
    assert int(adapters["max_lora"]) > 0
    assert (adapters["running_lora_adapters"], adapters["waiting_lora_adapters"]) == ("", "")


async def test_adapter_syncer_reconciles_a_server(server):
    """The syncer's requests, in its order: health, models, load, models, unload."""
    assert (await server.get("/health")).status == 200
    listed = (await server.get("/v1/models")).json["data"]
    assert [entry["id"] for entry in listed] == ["tiny"]
    body = {"lora_name": "french", "lora_path": "one", "base_model_name": "tiny"}
    assert (await server.post("/v1/load_lora_adapter", body)).status == 200
    assert "french" in [entry["id"] for entry in (await server.get("/v1/models")).json["data"]]
    params = {"max_tokens": 3000, "ignore_eos": True}
    request = {"model": "french", "token_ids": [5], "request_id": "a", "sampling_params": params}
    answer = asyncio.create_task(server.post("/inference/v1/generate", request))
    await server.until(lambda: server.engine.stats.generated_tokens > 0)
    adapters = label_values(await read_page(server), "vllm:lora_requests_info")
    assert (adapters["running_lora_adapters"], adapters["waiting_lora_adapters"]) == ("french", "")
    await server.post("/inference/v1/abort_requests", {"request_ids": ["a"]})
    assert (await answer).json["model"] == "french"
    await server.wait_until_idle()
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "french"})).status == 200
    assert [entry["id"] for entry in (await server.get("/v1/models")).json["data"]] == ["tiny"]
