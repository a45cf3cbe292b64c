"""Coordinator, P and D on hosts of their own: packets are lost or delayed, and links are down for a while."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from support import network_hosts
from support.cluster_processes import Cluster
from support.request_mixture import MIXTURE, check_recovered, judge_answers, send_request, undisturbed_answers

pytestmark = [
    network_hosts.needs_namespaces,
    pytest.mark.skipif(not os.environ.get("PARLEY_NIGHTLY"), reason="takes minutes: PARLEY_NIGHTLY=1"),
]


@pytest.fixture(scope="module")
def network():
    hosts = network_hosts.NetworkHosts(4)
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def cluster(network, tmp_path_factory):
    cluster = Cluster(
        tmp_path_factory.mktemp("hosts"), "prefill", "decode", "decode", network=network, separate="always"
    )
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def expected_answers(cluster):
    """The undisturbed answers."""
    return [answer.contents() for answer in asyncio.run(undisturbed_answers(cluster.coordinator.url))]


async def send_mixture(cluster):
    return await asyncio.gather(*(send_request(cluster.coordinator.url, path, body) for path, body in MIXTURE))


async def test_lost_and_delayed_packets_do_not_change_answers(network, cluster, expected_answers):
    network.disturb_network(loss=0.05, delay=0.02)
    try:
        answers = await send_mixture(cluster)
    finally:
        network.disturb_network()
    assert set(judge_answers(answers, expected_answers)) == {"exact"}, answers
    await asyncio.to_thread(cluster.wait_until_idle)


@pytest.mark.parametrize("number", [1, 2, 3], ids=["coordinator", "prefill", "decode"])
async def test_recovers_from_a_link_that_is_down_for_ten_seconds(network, cluster, expected_answers, number):
    running = asyncio.create_task(send_mixture(cluster))
    await asyncio.sleep(0.3)
    network.cut_off_host(number)
    down = time.monotonic()
    try:
        await asyncio.sleep(10)
    finally:
        network.reconnect_host(number)
    answers = await asyncio.wait_for(running, 120)
    print(judge_answers(answers, expected_answers), f"{time.monotonic() - down:.1f} s")
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "error"}, answers
    await check_recovered(cluster, expected_answers)


async def test_requests_complete_when_p_cannot_reach_its_ds(network, cluster, expected_answers):
    """The coordinator still reaches all of them, so it cannot know."""
    running = asyncio.create_task(send_mixture(cluster))
    await asyncio.sleep(0.3)
    for d in (3, 4):
        network.separate_hosts(2, d)
    began = time.monotonic()
    answers = await asyncio.wait_for(running, 120)
    print(judge_answers(answers, expected_answers), f"{time.monotonic() - began:.1f} s")
    assert set(judge_answers(answers, expected_answers)) <= {"exact", "error"}, answers
    began = time.monotonic()
    answers = await asyncio.wait_for(send_mixture(cluster), 120)
    print(judge_answers(answers, expected_answers), f"{time.monotonic() - began:.1f} s")
    network.reconnect_host(2)
    assert set(judge_answers(answers, expected_answers)) == {"exact"}, answers
    await check_recovered(cluster, expected_answers)
