"""A cluster over three Ray nodes on one machine: instances are placed by their resources and survive their node."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from support.request_mixture import Answer, ask

from parley.cluster import ray_client
from parley.cluster.plan import read

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
ASKED = "/v1/completions", BODY


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"front": 1}})
    for _ in range(2):
        made.add_node(num_cpus=1, resources={"work": 2})
    yield made
    ray_client.ray.shutdown()
    made.shutdown()


def wait(what, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)
    return found


def placed(keeper, *unlike):
    """Returns where each process runs once all run, with process ids other than those in ``unlike``."""
    seen, _ = ray_client.look(keeper)
    there = {each.name: each for each in seen if each.pid and each.pid not in unlike}
    return there if len(there) == 3 else None


async def test_cluster_recovers_from_a_killed_ray_node(nodes, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    ray_client.connect(nodes.address)
    keeper = ray_client.up(read(str(tmp_path / "plan.toml")))
    wait(lambda: ray_client.ready(keeper))
    there = wait(lambda: placed(keeper))
    front, *workers = (node.node_id for node in nodes.list_all_nodes())
    assert there["coordinator"].node == front
    assert {there["prefill-1"].node, there["decode-2"].node} <= set(workers)

    url = ray_client.address(keeper)
    whole = await ask(url, *ASKED)
    assert whole.whole and whole.count > 100, whole

    lost = there["decode-2"].node
    gone = [each.pid for each in there.values() if each.node == lost]
    heard = Answer()
    running = asyncio.create_task(ask(url, *ASKED, heard))
    while not heard.count:
        await asyncio.sleep(0.01)
    (node,) = (node for node in nodes.list_all_nodes() if node.node_id == lost)
    down = time.monotonic()
    await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)
    assert not heard.over
    await asyncio.wait_for(running, 150)
    print(f"the answer ended {time.monotonic() - down:.1f} s after its node was lost")
    assert heard.verdict(whole.told()) == "exact", heard

    there = await asyncio.to_thread(wait, lambda: placed(keeper, *gone))
    assert there["decode-2"].node in set(workers) - {lost}
    wait(lambda: ray_client.ready(keeper))
    again = await ask(url, *ASKED)
    assert again.verdict(whole.told()) == "exact", again
    await asyncio.to_thread(ray_client.down, keeper)
    assert ray_client.names() == []


async def test_scaled_down_instance_finishes_its_requests(nodes, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    ray_client.connect(nodes.address)
    keeper = ray_client.up(read(str(tmp_path / "plan.toml")))
    wait(lambda: ray_client.ready(keeper))
    wait(lambda: placed(keeper))
    url = ray_client.address(keeper)
    heard = Answer()
    running = asyncio.create_task(ask(url, *ASKED, heard))
    while not heard.count:
        await asyncio.sleep(0.01)
    # The nodes have room for four instances; the scale call must not wait for those that find none.
    assert await asyncio.to_thread(ray_client.scale, keeper, "prefill", 40) == ""
    assert await asyncio.to_thread(ray_client.scale, keeper, "prefill", 1) == ""
    assert await asyncio.to_thread(ray_client.scale, keeper, "decode", 0) == ""
    await asyncio.sleep(2.0)
    seen, wanted = await asyncio.to_thread(ray_client.look, keeper)
    assert wanted == {"prefill": 1, "decode": 0}
    assert not heard.over and "decode-2" in [each.name for each in seen]
    assert await asyncio.to_thread(ray_client.scale, keeper, "decode", 1) == ""
    await asyncio.wait_for(running, 150)
    assert heard.whole and b'"error"' not in heard.body, heard.body[-500:]

    await asyncio.to_thread(wait, lambda: "decode-2" not in [each.name for each in ray_client.look(keeper)[0]])
    await asyncio.to_thread(wait, lambda: ray_client.ready(keeper) and placed(keeper))
    again = await ask(url, *ASKED)
    assert again.verdict(heard.told()) == "exact", again
    await asyncio.to_thread(ray_client.down, keeper)
    assert ray_client.names() == []
