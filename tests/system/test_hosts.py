"""Coordinator, P and D on hosts of their own: packets get lost, come late, and a link is down for a while."""

from __future__ import annotations

import asyncio
import os
import time

import hosts
import pytest
from clustered import Cluster, stream

pytestmark = [
    hosts.needed,
    pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes minutes: PARLEY_NIGHTLY=1"),
]

PROMPTS = [
    {"prompt": f"{start} " * 40 + "The capital of France is", "max_tokens": 48, "ignore_eos": True, **more}
    for start in ("One", "Two", "Three")
    for more in ({"temperature": 0}, {"seed": 7, "logprobs": 2}, {"seed": 9, "n": 2, "stop": ["zzz"]})
]


def told(heard):
    """What a client has of a stream that does not depend on its id, its time or the order of its choices."""
    choices = {}
    for event in heard.events:
        assert "error" not in event, event
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append({**choice, "index": 0})
    return choices


@pytest.fixture(scope="module")
def apart():
    made = hosts.Hosts(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster(apart, tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("hosts"), "prefill", "decode", "decode", on=apart, separate="always")
    yield made
    made.close()


@pytest.fixture(scope="module")
async def wanted(cluster):
    """What the streams are while nothing is wrong."""
    return [told(await stream(cluster.coordinator.url, body)) for body in PROMPTS]


async def together(cluster):
    return await asyncio.gather(*(stream(cluster.coordinator.url, body) for body in PROMPTS))


async def test_lost_and_late_packets_change_nothing(apart, cluster, wanted):
    apart.disturb(loss=0.05, delay=0.02)
    try:
        heard = await together(cluster)
    finally:
        apart.disturb()
    assert all(each.done and not each.cut for each in heard), heard
    assert [told(each) for each in heard] == wanted
    cluster.idle()


@pytest.mark.parametrize("number", [2, 3], ids=["prefill", "decode"])
async def test_a_link_that_is_down_for_ten_seconds(apart, cluster, wanted, number):
    running = asyncio.create_task(together(cluster))
    await asyncio.sleep(0.3)
    apart.cut(number)
    down = time.monotonic()
    try:
        await asyncio.sleep(10)
    finally:
        apart.mend(number)
    heard = await asyncio.wait_for(running, 120)
    assert time.monotonic() - down > 10
    for each, whole in zip(heard, wanted, strict=True):
        if each.done and not each.errors:
            assert told(each) == whole
        else:  # one clear error, and nothing behind it
            assert each.cut or (len(each.errors) == 1 and "error" in each.events[-1]), each
    assert [told(each) for each in await together(cluster)] == wanted  # all is well again
    cluster.idle()
