"""vLLM's workers on two Ray nodes, in a cluster that ``parley cluster`` places: ``make test-engines``. Needs ray beside
vLLM, and PARLEY_NIGHTLY=1, because it takes ten minutes.

vLLM's build for CPUs says that its platform has no device in Ray. Here it has: GPUs that nodes only declare.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.request_mixture import Answer, send_request, wait_until

PYTHON = os.environ.get("PARLEY_VLLM_PYTHON", "")
HAS_RAY = bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import ray"], capture_output=True).returncode
pytestmark = pytest.mark.skipif(
    not HAS_RAY or not os.environ.get("PARLEY_NIGHTLY"),
    reason="PARLEY_VLLM_PYTHON does not name a Python with vLLM and ray, or PARLEY_NIGHTLY is not set",
)
NO_PIPELINES = pytest.mark.skip("vLLM 0.32 for CPUs ends at the first request of a pipeline, in its own server too")
START_SECONDS = 280.0  # less than the time after which pytest dumps the stacks
CPU_IN_RAY = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_declare(module):
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = run_and_declare
        return spec

sys.meta_path.insert(0, Finder())
"""
PLAN = """
name = "divided"

[coordinator]
predict_port = 7803
recovery_timeout = 600
resources = {{ front = 1 }}

[[instances]]
cpus = 0.1
resources = {{ work = 1 }}
engine = "vllm"
engine-python = "{python}"
dtype = "fp32"
kv-memory = "128MiB"
max-batch = 8
max-model-len = 1024
engine-args = ["--enforce-eager", "--{kind}-parallel-size", "2", "--distributed-executor-backend", "ray"]
"""
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}
STREAM = {"prompt": "One two three", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "sitecustomize.py").write_text(CPU_IN_RAY)
    for name, value in {
        "PYTHONPATH": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PARLEY_VLLM_PYTHON", "PARLEY_NIGHTLY"):
        monkeypatch.delenv(name, raising=False)
    from ray.cluster_utils import Cluster

    from parley.cluster import ray_client

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "resources": {"front": 1}})
    for _ in range(2):
        add_node(cluster)
    yield cluster
    ray_client.ray.shutdown()
    cluster.shutdown()


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=1, resources={"work": 2})


def wait_for(condition: Any, seconds: float = START_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.5)
    return result


@pytest.mark.parametrize("kind", ["tensor", pytest.param("pipeline", marks=NO_PIPELINES)])
async def test_model_on_two_nodes_answers_and_comes_back_when_a_node_is_lost(
    nodes: Any, tmp_path: Path, kind: str
) -> None:
    from parley.cluster import ray_client
    from parley.cluster.plan import read_plan

    (tmp_path / "plan.toml").write_text(PLAN.format(python=PYTHON, kind=kind))
    ray_client.connect_ray(nodes.address)
    supervisor = ray_client.start_cluster(read_plan(str(tmp_path / "plan.toml")))
    wait_for(lambda: ray_client.cluster_ready(supervisor))
    (group,) = ray_client.ray.util.placement_group_table().values()
    assert len(set(group["bundles_to_node_id"].values())) == 2
    url = ray_client.cluster_address(supervisor)
    answer = await send_request(url, "/v1/chat/completions", {**QUESTION, "temperature": 0})
    assert "Paris" in json.loads(answer.body)["choices"][0]["message"]["content"]

    stream = Answer()
    running = asyncio.create_task(send_request(url, "/v1/completions", STREAM, stream))
    assert await wait_until(lambda: stream.count > 10, 60)
    processes, _ = ray_client.cluster_processes(supervisor)
    (instance_node,) = (process.node for process in processes if process.name == "mixed-1")
    lost = next(node for node in nodes.list_all_nodes() if node.node_id in group["bundles_to_node_id"].values()
                and node.node_id != instance_node)  # fmt: skip
    await asyncio.to_thread(nodes.remove_node, lost, allow_graceful=False)
    add_node(nodes)  # Ray sets signal handlers, which only this thread may do
    await asyncio.wait_for(running, 900)
    events = list(stream.events())
    assert stream.whole and ("error" in events[-1] or events[-1]["choices"][0]["finish_reason"] == "length")
    await asyncio.to_thread(wait_for, lambda: ray_client.cluster_ready(supervisor))
    again = await send_request(url, "/v1/chat/completions", {**QUESTION, "temperature": 0})
    assert "Paris" in json.loads(again.body)["choices"][0]["message"]["content"]
    await asyncio.to_thread(ray_client.stop_cluster, supervisor)
