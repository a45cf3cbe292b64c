"""A cluster over three Ray nodes on one machine: instances are placed by their resources and survive their node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.request_mixture import Answer, send_request

from parley.cluster import ray_client
from parley.cluster.plan import read_plan

pytestmark = pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes a minute: PARLEY_NIGHTLY=1")

PLAN = """
name = "three"

[coordinator]
predict_port = 7800
recovery_timeout = 120  # Ray takes half a minute to notice that a node is gone, and a model has to be loaded
resources = { front = 1 }

[[instances]]
role = "prefill"
cpus = 0.1
resources = { work = 1 }
kv-memory = "24MiB"

[[instances]]
role = "decode"
cpus = 0.1
resources = { work = 1 }
kv-memory = "24MiB"
"""
BODY = {
    "model": "parley-demo",
    "prompt": "One two three " * 20,
    "max_tokens": 2000,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
}
REQUEST = "/v1/completions", BODY


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"front": 1}})
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"work": 2})
    yield cluster
    ray_client.ray.shutdown()
    cluster.shutdown()


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)
    return result


def placed_processes(supervisor, *unlike):
    """Returns where each process runs once all run, with process ids other than those in ``unlike``."""
    seen, _ = ray_client.cluster_processes(supervisor)
    processes = {process.name: process for process in seen if process.pid and process.pid not in unlike}
    return processes if len(processes) == 3 else None


async def test_cluster_recovers_from_a_killed_ray_node(nodes, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    ray_client.connect_ray(nodes.address)
    supervisor = ray_client.start_cluster(read_plan(str(tmp_path / "plan.toml")))
    wait_for(lambda: ray_client.cluster_ready(supervisor))
    processes = wait_for(lambda: placed_processes(supervisor))
    front, *workers = (node.node_id for node in nodes.list_all_nodes())
    assert processes["coordinator"].node == front
    assert {processes["prefill-1"].node, processes["decode-2"].node} <= set(workers)

    url = ray_client.cluster_address(supervisor)
    whole = await send_request(url, *REQUEST)
    assert whole.whole and whole.count > 100, whole

    lost = processes["decode-2"].node
    lost_pids = [process.pid for process in processes.values() if process.node == lost]
    answer = Answer()
    running = asyncio.create_task(send_request(url, *REQUEST, answer))
    while not answer.count:
        await asyncio.sleep(0.01)
    (node,) = (node for node in nodes.list_all_nodes() if node.node_id == lost)
    down = time.monotonic()
    await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
    assert not answer.over
    await asyncio.wait_for(running, 150)
    print(f"the answer ended {time.monotonic() - down:.1f} s after its node was lost")
    assert answer.verdict(whole.contents()) == "exact", answer

    processes = await asyncio.to_thread(wait_for, lambda: placed_processes(supervisor, *lost_pids))
    assert processes["decode-2"].node in set(workers) - {lost}
    wait_for(lambda: ray_client.cluster_ready(supervisor))
    again = await send_request(url, *REQUEST)
    assert again.verdict(whole.contents()) == "exact", again
    await asyncio.to_thread(ray_client.stop_cluster, supervisor)
    assert ray_client.cluster_names() == []


async def test_scaled_down_instance_finishes_its_requests(nodes, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    ray_client.connect_ray(nodes.address)
    supervisor = ray_client.start_cluster(read_plan(str(tmp_path / "plan.toml")))
    wait_for(lambda: ray_client.cluster_ready(supervisor))
    wait_for(lambda: placed_processes(supervisor))
    url = ray_client.cluster_address(supervisor)
    answer = Answer()
    running = asyncio.create_task(send_request(url, *REQUEST, answer))
    while not answer.count:
        await asyncio.sleep(0.01)
    # The nodes have room for four instances; the scale call must not wait for those that find none.
    assert await asyncio.to_thread(ray_client.scale_group, supervisor, "prefill", 40) == ""
    assert await asyncio.to_thread(ray_client.scale_group, supervisor, "prefill", 1) == ""
    assert await asyncio.to_thread(ray_client.scale_group, supervisor, "decode", 0) == ""
    await asyncio.sleep(2.0)
    seen, target_counts = await asyncio.to_thread(ray_client.cluster_processes, supervisor)
    assert target_counts == {"prefill": 1, "decode": 0}
    assert not answer.over and "decode-2" in [process.name for process in seen]
    assert await asyncio.to_thread(ray_client.scale_group, supervisor, "decode", 1) == ""
    await asyncio.wait_for(running, 150)
    assert answer.whole and b'"error"' not in answer.body, answer.body[-500:]

    await asyncio.to_thread(
        wait_for, lambda: "decode-2" not in [process.name for process in ray_client.cluster_processes(supervisor)[0]]
    )
    await asyncio.to_thread(wait_for, lambda: ray_client.cluster_ready(supervisor) and placed_processes(supervisor))
    again = await send_request(url, *REQUEST)
    assert again.verdict(answer.contents()) == "exact", again
    await asyncio.to_thread(ray_client.stop_cluster, supervisor)
    assert ray_client.cluster_names() == []


def test_cluster_up_ends_when_ray_on_this_machine_has_ended(tmp_path: Path) -> None:
    with running_cluster_command(tmp_path) as (command, log):
        os.kill(find_raylet(command.pid), signal.SIGKILL)
        assert command.wait(60) == 1
        assert "parley: Ray on this machine has ended, and the cluster with it." in log.read_text()


def test_cluster_up_ends_soon_after_a_signal_that_ends_its_ray_too(tmp_path: Path) -> None:
    with running_cluster_command(tmp_path) as (command, log):
        os.killpg(command.pid, signal.SIGTERM)
        command.wait(45)  # Ray's own limit is 60 s
        assert "stopping" in log.read_text()


@contextlib.contextmanager
def running_cluster_command(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yields ``parley cluster up`` with a Ray of its own, ready and in a process group of its own, and its log."""
    plan, log = folder / "plan.toml", folder / "log"
    plan.write_text(
        f'name = "{secrets.token_hex(4)}"\n[coordinator]\npredict_port = {free_port()}\n'
        '[[instances]]\nrole = "mixed"\ncpus = 0.1\nkv-memory = "24MiB"\n'
    )
    with log.open("w") as output:
        command = subprocess.Popen(
            [sys.executable, "-P", "-m", "parley", "cluster", "up", str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "RAY_ADDRESS": ""},
            start_new_session=True,
        )
    try:
        wait_for(lambda: "status page:" in log.read_text())
        yield command, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)


def find_raylet(parent: int) -> int:
    """Returns the process id of the raylet among the child processes of ``parent``."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    (raylet,) = [child for child in children if Path(f"/proc/{child}/exe").resolve().name == "raylet"]
    return int(raylet)
