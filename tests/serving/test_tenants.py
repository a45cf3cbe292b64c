"""Two API keys on one server: neither sees the other's prompts, ends its requests, or overtakes them by priority."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.http_client import HELLO_CHAT, Answer, RunningServer

import parley
from parley.types import EngineRequest, ParleySettings
from parley.web.auth import tenant_id

BUILT_IN = Path(parley.__file__).parent / "demo" / "model"
CHAT = "/v1/chat/completions"
KEYS = ("key-of-a", "key-of-b")
LONG_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the weather in Paris? " * 20}],
    "max_tokens": 1,
}


def built_in_settings(**settings: Any) -> ParleySettings:
    return ParleySettings(model=str(BUILT_IN), **({"threads": 1, "kv_memory": 24 << 20, "max_batch": 8} | settings))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def cached_tokens(server: RunningServer, key: str, **members: Any) -> int:
    answer = await server.post(CHAT, LONG_CHAT | members, **bearer(key))
    assert answer.status == 200, answer.body
    count: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


# -- the prefix cache


async def test_a_key_does_not_learn_which_prompts_another_key_sent(serve):
    server = await serve(settings=built_in_settings(), api_keys=KEYS)
    a, b = KEYS
    assert await cached_tokens(server, a) == 0 < await cached_tokens(server, a)
    assert await cached_tokens(server, b) == 0 < await cached_tokens(server, b)
    assert await cached_tokens(server, a, cache_salt="s") == await cached_tokens(server, b, cache_salt="s") == 0
    assert await cached_tokens(server, b, cache_salt="s") > 0


async def test_keys_share_prefixes_if_the_operator_wants_it(serve):
    server = await serve(settings=built_in_settings(), api_keys=KEYS, share_prefixes=True)
    a, b = KEYS
    assert await cached_tokens(server, a) == 0 < await cached_tokens(server, b)
    assert await cached_tokens(server, a, cache_salt="s") == 0 < await cached_tokens(server, b, cache_salt="s")


async def test_without_keys_clients_share_prefixes_whatever_key_they_send(serve):
    server = await serve(settings=built_in_settings())
    assert await cached_tokens(server, "any") == 0 < await cached_tokens(server, "other")


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")], ids="-".join)
async def test_a_coordinator_keeps_the_prefixes_of_keys_apart(live_cluster, roles):
    options: dict[str, Any] = {"api_keys": KEYS, "cluster_secret": "s", "names": ("tiny", "parley-demo")}
    cluster = await live_cluster(*roles, settings=lambda: built_in_settings(shared=True), **options)
    a, b = KEYS
    members = {"max_tokens": 4}  # more than the prefill instance generates
    assert await cached_tokens(cluster.front, a, **members) == 0 < await cached_tokens(cluster.front, a, **members)
    assert await cached_tokens(cluster.front, b, **members) == 0 < await cached_tokens(cluster.front, b, **members)
    if roles != ("mixed",):  # instances and coordinator hash the prompts of a key alike
        statuses = [await server.get("/v1/status", **{"parley-secret": "s"}) for server in cluster.instances]
        reported = {tenant_hash for status in statuses for tenant_hash in status.json["parley"]["prefix_hash"]}
        assert reported and reported == {
            mark for instance in cluster.coordinator.table for mark in instance.sent_hashes
        }


async def test_ids_of_tenants_do_not_reveal_keys_and_depend_on_the_secret():
    ids = {tenant_id(key, secret) for key in (b"k", b"l") for secret in ("", "s")}
    assert len(ids) == 4 and {len(hashed_id) for hashed_id in ids} == {32} and tenant_id(b"", "s") == ""


# -- the ids of requests


@pytest.mark.parametrize("path", ["/v2/models/tiny/stopInfer", "/mindie/v2/models/tiny/stopInfer"])
async def test_a_key_cannot_stop_a_request_of_another_key(serve, path):
    server = await serve(api_keys=KEYS)
    server.engine.step_gate.clear()  # requests run until they are stopped
    a, b = map(bearer, KEYS)
    body = {"id": "mine", "text_input": "a b", "parameters": {"max_new_tokens": 3000}}
    requests = [
        asyncio.create_task(server.post("/mindie/v2/models/tiny/generate", body, **a)),
    ]
    await server.until(lambda: len(server.service.open_requests) == 1)
    foreign = await server.post(path, {"id": "mine"}, **b)
    unknown = await server.post(path, {"id": "other"}, **b)
    assert (foreign.status, foreign.body.replace(b"mine", b"other")) == (unknown.status, unknown.body)
    assert not requests[0].done()
    requests.append(asyncio.create_task(server.post("/mindie/v2/models/tiny/generate", body, **b)))
    await server.until(lambda: len(server.service.open_requests) == 2)
    assert (await server.post(path, {"id": "mine"}, **b)).status == 200
    assert (await requests[1]).status == 200 and not requests[0].done()
    assert (await server.post(path, {"id": "mine"}, **a)).status == 200
    assert (await requests[0]).status == 200
    server.engine.step_gate.set()
    await server.wait_until_idle()


async def test_keys_may_use_the_same_request_ids_through_a_coordinator(live_cluster):
    cluster = await live_cluster("prefill", "decode", api_keys=KEYS, cluster_secret="s")
    cluster.instances[1].engine.step_gate.clear()  # requests run until they are stopped
    a, b = map(bearer, KEYS)
    chat, stop = HELLO_CHAT | {"max_tokens": 3000}, "/mindie/v2/models/tiny/stopInfer"

    def send_chat(key: dict[str, str]) -> asyncio.Task[Answer]:
        return asyncio.create_task(cluster.front.post("/mindie" + CHAT, chat, **key, **{"req-id": "77"}))

    decoding = cluster.instances[1].service
    first = send_chat(a)
    await cluster.front.until(lambda: len(decoding.open_requests) == 1)
    assert (await cluster.front.post(stop, {"id": "77"}, **b)).status == 404
    second = send_chat(b)
    await cluster.front.until(lambda: len(decoding.open_requests) == 2)
    assert (await cluster.front.post(stop, {"id": "77"}, **b)).status == 200
    assert (await second).status == 200 and not first.done()
    assert (await cluster.front.post(stop, {"id": "77"}, **a)).status == 200
    assert (await first).status == 200
    cluster.instances[1].engine.step_gate.set()
    await cluster.wait_until_idle()


# -- priorities


def submitted_priorities(requests: list[EngineRequest]) -> list[tuple[int, int]]:
    return [(request.priority, request.tenant_priority) for request in requests]


async def test_a_keys_priority_counts_among_its_own_requests_unless_the_key_is_privileged(serve):
    requests: list[EngineRequest] = []

    def note_request(request: EngineRequest, index: int) -> list[int]:
        requests.append(request)
        return [70]

    urgent = HELLO_CHAT | {"priority": -(2**31)}
    keys = {"api_keys": (*KEYS, "trusted"), "admin_keys": ("chief",), "priority_keys": ("trusted",)}
    server = await serve(reply=note_request, **keys)
    for key in (*KEYS, "trusted", "chief"):
        assert (await server.post(CHAT, urgent, **bearer(key))).status == 200
    assert submitted_priorities(requests) == [(0, -(2**31)), (0, -(2**31)), (-(2**31), 0), (-(2**31), 0)]
    assert len({request.tenant for request in requests}) == 4
    unkeyed = await serve(reply=note_request)
    assert (await unkeyed.post(CHAT, urgent)).status == 200
    assert submitted_priorities(requests[4:]) == [(-(2**31), 0)]


async def test_no_priority_lets_a_key_starve_another(serve):
    """A's requests flood a server with one slot; B's request is next in turn, whatever priority A's have."""
    server = await serve(settings=built_in_settings(max_batch=1), api_keys=KEYS)
    a, b = map(bearer, KEYS)
    urgent = HELLO_CHAT | {"priority": -(2**31), "max_tokens": 40, "ignore_eos": True}
    flood = [asyncio.create_task(server.post(CHAT, urgent, **a)) for _ in range(12)]
    await server.until(lambda: server.model.used_slots == 12)
    assert (await server.post(CHAT, HELLO_CHAT, **b)).status == 200
    assert sum(not request.done() for request in flood) > 6
    await asyncio.gather(*flood)
