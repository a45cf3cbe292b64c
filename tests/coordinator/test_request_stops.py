"""Clients stop their requests by id through a coordinator, also those that wait in its queue or between attempts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.cluster_of_servers import Cluster
from support.http_client import Answer, RunningServer, build_request
from support.scripted_instance import ScriptedInstance

from parley.coordinator.proxy.generation.stream_merge import StreamMerge
from parley.disagg.wire.result_frames import ResultFrame
from parley.errors import ServerStopping

ROLES = [("mixed",), ("prefill", "decode")]
STOP = "/mindie/v2/models/tiny/stopInfer"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 40}
TEXT = {"id": "77", "text_input": "a b", "parameters": {"max_new_tokens": 40, "details": True}}
TOKENS = {"request_id": "77", "token_ids": [5, 6], "sampling_params": {"max_tokens": 40}}
ID_HEADER, JSON_HEADER = {"req-id": "77"}, "content-type: application/json"
REQUESTS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("/mindie/v2/models/tiny/generate", TEXT, {}),
    ("/mindie/v2/models/tiny/generate_stream", TEXT, {}),
    ("/mindie/v1/chat/completions", CHAT | {"stream": True}, ID_HEADER),
    ("/inference/v1/generate", TOKENS, {}),
]


def send(server: RunningServer, path: str, body: Any, headers: dict[str, str]) -> asyncio.Task[Answer]:
    return asyncio.create_task(server.post(path, body, **headers))


async def stop(server: RunningServer, path: str, **headers: str) -> Answer:
    if path.startswith("/inference"):
        return await server.post("/inference/v1/abort_requests", {"request_ids": ["other", "77"]}, **headers)
    return await server.post(STOP, {"id": "77"}, **headers)


async def fill_cluster(cluster: Cluster, requests: int = 1, **headers: str) -> asyncio.Task[Answer]:
    """Begin a request that leaves no room for another: the last of ``requests``."""
    for server in cluster.instances:
        server.engine.step_gate.clear()
    first = send(cluster.front, "/v1/chat/completions", CHAT, headers)
    await cluster.front.until(lambda: cluster.coordinator.scheduler.open_requests == requests)
    return first


async def run_on(cluster: Cluster, request: asyncio.Task[Answer]) -> None:
    """Let a request finish, and the cluster become idle."""
    for server in cluster.instances:
        server.engine.step_gate.set()
    assert (await request).status == 200
    await cluster.wait_until_idle()


@pytest.mark.parametrize("roles", ROLES, ids="-".join)
async def test_a_request_that_waits_for_room_ends_as_a_queued_one_of_a_single_server(
    live_cluster, serve, roles
) -> None:
    cluster, server = await live_cluster(*roles, max_running=1), await serve()
    server.engine.step_gate.clear()
    first = await fill_cluster(cluster)
    for path, body, headers in REQUESTS:
        on_server, on_cluster = send(server, path, body, headers), send(cluster.front, path, body, headers)
        await server.until(lambda: bool(server.engine.open_stream_count))
        await cluster.front.until(lambda: cluster.coordinator.scheduler.queued_requests == 1)
        assert (await stop(server, path)).body == (await stop(cluster.front, path)).body
        expected, answer = await on_server, await on_cluster
        assert (answer.status, answer.body) == (expected.status, expected.body), path
        assert cluster.coordinator.scheduler.queued_requests == 0 and not first.done()
        assert (await cluster.front.post(STOP, {"id": "77"})).status == 404
    server.engine.step_gate.set()
    await run_on(cluster, first)


async def test_a_key_cannot_stop_a_waiting_request_of_another_key(live_cluster) -> None:
    a, b = ({"authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
    cluster = await live_cluster("mixed", max_running=1, api_keys=("key-a", "key-b"), cluster_secret="s")
    first = await fill_cluster(cluster, **a)
    path, body, _ = REQUESTS[0]
    waiting = [send(cluster.front, path, body, headers) for headers in (a, b)]
    await cluster.front.until(lambda: cluster.coordinator.scheduler.queued_requests == 2)
    assert (await cluster.front.post(STOP, {"id": "77"})).status == 401
    assert (await stop(cluster.front, path, **b)).status == 200
    assert (await waiting[1]).status == 200 and not waiting[0].done()
    assert (await stop(cluster.front, path, **b)).status == 404
    assert (await stop(cluster.front, path, **a)).status == 200
    assert (await waiting[0]).json["text_output"] == ""
    await run_on(cluster, first)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_stopped_between_two_attempts_keeps_its_text(live_cluster, stream: bool) -> None:
    cluster = await live_cluster("mixed", "mixed", max_running=1, reply=lambda work, index: [70] * 3000, tick=0.001)
    path, body, _ = REQUESTS[stream]
    call = send(cluster.front, path, body | {"parameters": {"max_new_tokens": 3000, "details": True}}, {})
    await cluster.front.until(lambda: cluster.instances[0].engine.stats.generated_tokens > 5)
    first = await fill_cluster(cluster, requests=2)
    cluster.coordinator.table.set_instance_offline(cluster.coordinator.table.instances[1], offline=True)
    for open_request in list(cluster.instances[0].service.open_requests):
        open_request.fail_on_shutdown(ServerStopping("The server is shutting down."))
    await cluster.front.until(lambda: cluster.coordinator.scheduler.queued_requests == 1)
    assert (await stop(cluster.front, path)).status == 200
    if stream:
        frames = [json.loads(line[5:]) for line in (await call).body.splitlines() if line]
        assert frames[-1]["details"]["finish_reason"] == "stop_sequence"
        assert 5 < frames[-1]["details"]["generated_tokens"] == len([frame for frame in frames if frame["text_output"]])
    else:  # the client has no text yet
        assert ((await call).status, (await call).json["text_output"]) == (200, "")
    await run_on(cluster, first)


async def test_listed_requests_stop_although_an_instance_has_gone(cluster) -> None:
    gone, other = ScriptedInstance(), ScriptedInstance()
    running = await cluster(gone, other, heartbeat=30)
    held: list[str] = []

    async def hold_request(d: ScriptedInstance, request_id: str, parts: list[bytes], first_part: int) -> None:
        held.append(request_id)

    gone.decode_hook = other.decode_hook = hold_request
    call = asyncio.create_task(running.post("/inference/v1/generate", json.dumps(TOKENS).encode(), JSON_HEADER))
    await running.wait_until(lambda: bool(held))
    gone.decode_hook = other.decode_hook = None
    await gone.kill_instance()
    stopped = await running.post("/inference/v1/abort_requests", b'{"request_ids":["77"]}', JSON_HEADER)
    assert (stopped.status, (await call).status) == (200, 200)
    (request,) = (request for request in other.requests if request.target == "/inference/v1/generate")
    assert request.headers["parley-stopped"] == "true"


async def test_a_stop_that_comes_with_the_end_of_an_answer_changes_nothing(
    live_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await live_cluster("mixed", reply=lambda work, index: [70] * 9, tick=0.005)
    take_frame, body, stops = StreamMerge.take_frame, CHAT | {"stream": True}, []
    expected = await cluster.front.post("/v1/chat/completions", body)

    def take_after_stop(merge: StreamMerge, frame: ResultFrame) -> None:
        if frame.kind == "lastData" and merge._early_frames is None:  # the other part of the answer has come
            stops.append([runner.stop_request() for runner in cluster.coordinator.front._stops])
        take_frame(merge, frame)

    monkeypatch.setattr(StreamMerge, "take_frame", take_after_stop)
    connection = await cluster.front.connect()
    for _ in range(2):
        await connection.send(build_request("POST", "/v1/chat/completions", body))
        async with asyncio.timeout(20):
            assert (await connection.answer()).body == expected.body
    assert stops == [[True]] * 2
    await cluster.wait_until_idle()
