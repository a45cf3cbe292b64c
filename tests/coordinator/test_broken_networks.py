"""The network between a coordinator and an instance stalls or breaks, and comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from support.cluster_of_servers import Cluster
from support.compare_answers import same_answer
from support.http_client import HELLO_CHAT
from support.prefill_decode_pair import join_cluster
from support.server_fixtures import fix_identities
from support.tcp_proxy import TcpProxy

from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.coordinator import Coordinator
from parley.types import EngineRequest
from parley.web.port import open_listener

STREAM = json.dumps(HELLO_CHAT | {"stream": True, "n": 2, "logprobs": True, "max_tokens": 40}).encode()
WHOLE = json.dumps(HELLO_CHAT | {"max_tokens": 40}).encode()
JSON = {"content-type": "application/json"}


def long_reply(work: EngineRequest, index: int) -> list[int]:
    return [70 + number % 90 for number in range(40)]


@pytest.fixture
async def cluster_behind_proxies(serve, monkeypatch) -> AsyncIterator[Callable[..., Awaitable[tuple]]]:
    """Start instances of these roles with a coordinator that reaches them through proxies."""
    fix_identities(monkeypatch)
    started: list[tuple[Cluster, list[TcpProxy], asyncio.Task[int]]] = []

    async def start_cluster(*roles: str) -> tuple[Cluster, list[TcpProxy]]:
        servers = [await serve(long_reply, tick=0.01, role=role) for role in roles]
        proxies = [await TcpProxy(server.port).open() for server in servers]
        instances = tuple(
            InstanceConfig(id=number, url=f"http://127.0.0.1:{proxy.port}", role=role)
            for number, (proxy, role) in enumerate(zip(proxies, roles, strict=True), 1)
        )
        sock = open_listener("127.0.0.1", 0)
        options = CoordinatorOptions(instances=instances, separate="always", heartbeat=0.05, recovery_timeout=120)
        coordinator = Coordinator(options, {"predict": ("127.0.0.1", sock)}, access_log=False)
        task = asyncio.create_task(coordinator.run_until_stopped(signals=False))
        members = [await join_cluster(server) for server in servers]
        cluster = Cluster(servers, members, coordinator, sock.getsockname()[1])
        started.append((cluster, proxies, task))
        await cluster.front.until(lambda: len(coordinator.table.usable_instances()) == len(roles))
        return cluster, proxies

    yield start_cluster
    for cluster, proxies, task in started:
        cluster.front.close_connections()
        cluster.coordinator.request_stop()
        await task
        for member in cluster.members:
            await member.close_member()
        for proxy in proxies:
            await proxy.close()


@pytest.mark.parametrize("how", ["stall", "cut"])
@pytest.mark.parametrize(
    ("roles", "broken"),
    [(("mixed", "mixed"), 0), (("prefill", "prefill", "decode"), 0), (("prefill", "decode", "decode"), 1)],
    ids=["mixed", "prefill", "decode"],
)
async def test_answers_are_exact_although_the_network_of_an_instance_breaks(
    cluster_behind_proxies, serve, roles, broken, how
):
    cluster, proxies = await cluster_behind_proxies(*roles)
    table, single, path = cluster.coordinator.table, await serve(long_reply), "/v1/chat/completions"
    expected = {body: (await single.call("POST", path, body, JSON)).body for body in (STREAM, WHOLE)}
    server, instance = cluster.instances[broken], table.instances[broken + 1]
    if roles[broken] == "prefill":
        server.engine.step_gate.clear()  # it has no first token yet
    calls = [asyncio.create_task(cluster.front.call("POST", path, body, JSON)) for body in 4 * (STREAM, WHOLE)]
    await server.until(lambda: bool(server.service.open_requests) and server.engine.open_stream_count > 0)
    if how == "stall":
        proxies[broken].stall()
    else:
        await proxies[broken].cut()
    await cluster.front.until(lambda: not instance.is_usable(table.clock()))
    for body in (STREAM, WHOLE):
        answer = await cluster.front.call("POST", path, body, JSON)
        assert answer.status == 200 and same_answer(answer.body, expected[body]), answer.body
    for call, body in zip(calls, 4 * (STREAM, WHOLE), strict=True):
        answer = await call
        assert answer.status == 200 and same_answer(answer.body, expected[body]), answer.body
    server.engine.step_gate.set()
    await proxies[broken].restore()
    await cluster.front.until(lambda: len(table.usable_instances()) == len(roles))
    await cluster.wait_until_idle()
