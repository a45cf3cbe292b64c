"""API keys at a coordinator: their limits and their usage count once for the whole cluster."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc
import pytest
from support.answer_scripts import raw_answer
from support.api_keys import Clock, make_keys
from support.cluster_of_servers import Cluster
from support.free_ports import free_port
from support.grpc_client import GrpcClient, answer_text
from support.http_client import HELLO_CHAT, Answer, build_request
from support.scripted_instance import ScriptedInstance
from support.simulated_cluster import lose_instance

from parley.cli import coordinator as cli
from parley.coordinator import coordinator
from parley.coordinator.config import CoordinatorOptions
from parley.disagg.wire.vouched_client import write_vouched_client
from parley.errors import ServerStopping
from parley.serving.grpc.grpc_port import TritonGrpcPort
from parley.settings.file_changes import file_changes
from parley.settings.key_file import add_key, make_key, read_key_table, remove_key
from parley.settings.options import ConfigError, resolve_options
from parley.types import Tenant
from parley.web import exchange

COMPLETION = {"prompt": "a b c", "max_tokens": 4}  # 4 tokens and 4
CHAT = HELLO_CHAT | {"max_tokens": 3}
SECRET = "the cluster's secret"


def stop_clock(cluster: Cluster) -> Clock:
    clock = Clock()
    assert cluster.coordinator.client_keys is not None
    cluster.coordinator.client_keys.ledger.limiter = clock.limiter()
    return clock


def open_requests(cluster: Cluster) -> int:
    assert cluster.coordinator.client_keys is not None
    meters = cluster.coordinator.client_keys.ledger.limiter._meters
    return sum(meter.open_requests for meter in meters.values())


async def usage_rows(cluster: Cluster, headers: dict[str, str], **members: str) -> list[dict[str, Any]]:
    query = "&".join(f"{name}={value}" for name, value in members.items())
    answer = await cluster.front.get(f"/v1/usage?{query}", **headers)
    assert answer.status == 200, answer.body
    return answer.json["data"]


async def test_limits_are_exact_for_the_whole_cluster_under_64_concurrent_clients(live_cluster):
    headers, keys = make_keys(
        requests={"requests_per_minute": 100}, tokens={"tokens_per_minute": 100 * 8}, open={"concurrent_requests": 8}
    )
    cluster = await live_cluster("prefill", "prefill", "decode", client_keys={"hashed_keys": keys})
    stop_clock(cluster)

    async def send(name: str, count: int) -> Counter[int]:
        connection = await cluster.front.connect()
        statuses: Counter[int] = Counter()
        for _ in range(count):
            await connection.send(build_request("POST", "/v1/completions", COMPLETION, headers[name]))
            statuses[(await connection.answer()).status] += 1
        return statuses

    for name, count in (("requests", 2), ("tokens", 2)):
        statuses = sum(await asyncio.gather(*(send(name, count) for _ in range(64))), Counter())
        assert statuses == {200: 100, 429: 28}, name
    statuses = sum(await asyncio.gather(*(send("open", 1) for _ in range(64))), Counter())
    assert statuses[200] >= 8 and statuses[200] + statuses[429] == 64
    await cluster.wait_until_idle()
    assert open_requests(cluster) == 0


async def test_refusals_have_the_texts_and_headers_of_a_single_server(live_cluster, serve):
    headers, keys = make_keys(
        alice={"requests_per_minute": 3, "tokens_per_minute": 60},
        models={"models": ["other"]},
        apis={"apis": ["anthropic"]},
        expired={"expires": "2020-01-01"},
    )
    headers["unknown"] = {"authorization": f"Bearer {make_key('unknown')[0]}"}
    headers["none"] = {}
    single = await serve(hashed_keys=keys)
    single.service.key_ledger.limiter = Clock().limiter()
    cluster = await live_cluster("prefill", "decode", client_keys={"hashed_keys": keys})
    stop_clock(cluster)

    async def ask(server: Any, path: str, body: Any, name: str) -> tuple[int, bytes, dict[str, str]]:
        answer: Answer = await server.post(path, body, **headers[name])
        limits = {key: value for key, value in answer.headers.items() if "ratelimit" in key or "retry" in key}
        resets = {key: value for key, value in limits.items() if not key.startswith("anthropic")}
        return answer.status, answer.body if answer.status != 200 else b"", resets

    for name, path, body in (
        ("none", "/v1/chat/completions", CHAT),
        ("unknown", "/v1/chat/completions", CHAT),
        ("expired", "/v1/messages", CHAT),
        ("models", "/v1/chat/completions", CHAT),
        ("models", "/v1/completions", COMPLETION),
        ("apis", "/v1/chat/completions", CHAT),
        ("apis", "/generate", CHAT),
        ("apis", "/v1/messages", CHAT),
        ("alice", "/v1/completions", COMPLETION | {"max_tokens": 57}),  # alone exceeds the limit
        ("alice", "/v1/completions", COMPLETION),
        ("alice", "/v1/completions", COMPLETION | {"max_tokens": 50}),  # exceeds what is left
        ("alice", "/v1/completions", COMPLETION),
        ("alice", "/v1/messages", CHAT),
        ("alice", "/generate", {"inputs": "a b c"}),
        ("alice", "/vllm/v1/chat/completions", CHAT),
        ("alice", "/api/chat", CHAT),
        ("alice", "/mindie/infer", CHAT),
        ("alice", "/v2/models/tiny/generate", CHAT),
        ("alice", "/serving-endpoints/tiny/invocations", CHAT),
        ("alice", "/tei/embed", {"inputs": "a b c"}),
        ("alice", "/no/such/path", CHAT),
        ("none", "/no/such/path", CHAT),
        ("alice", "/reset_prefix_cache", None),
    ):
        expected, actual = await ask(single, path, body, name), await ask(cluster.front, path, body, name)
        assert actual == expected, (name, path)


@pytest.mark.parametrize("where", ["coordinator", "instances", ""])
async def test_endpoint_metrics_are_refused_as_by_one_server(live_cluster, serve, where):
    headers, keys = make_keys(alice={})
    instance_keys = {"hashed_keys": keys, "cluster_secret": SECRET} if where == "instances" else {}
    cluster = await live_cluster(
        "mixed", client_keys={"hashed_keys": keys} if where == "coordinator" else {}, **instance_keys
    )
    single = await serve(**({"hashed_keys": keys} if where else {}))
    alice = headers["alice"] if where else {}
    for name in ("tiny", "absent"):
        path = f"/api/2.0/serving-endpoints/{name}/metrics"
        expected, actual = await single.get(path, **alice), await cluster.front.get(path, **alice)
        assert actual.status == expected.status == (200 if name == "tiny" else 404)
        if name == "absent":
            assert actual.body == expected.body
    if where:
        assert (await cluster.front.get("/api/2.0/serving-endpoints/tiny/metrics")).status == 401


async def test_endpoint_has_the_same_id_on_all_instances(live_cluster, monkeypatch):
    monkeypatch.setattr(exchange, "draw_id", lambda: os.urandom(16))  # as outside of tests
    cluster = await live_cluster("mixed", "mixed")
    config = {"served_entities": [{"entity_name": "tiny"}]}
    made = await cluster.front.post("/api/2.0/serving-endpoints", {"name": "e", "config": config})
    path = f"/api/2.0/permissions/serving-endpoints/{made.json['id']}"
    for method in ("PUT", "PATCH"):  # which go to every instance
        changed = await cluster.front.call(method, path, {"access_control_list": []})
        assert (changed.status, changed.json["access_control_list"]) == (200, [])


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode")])
async def test_usage_equals_that_of_the_answers_and_counts_once(live_cluster, tmp_path, roles):
    headers, keys = make_keys(alice={"tokens_per_minute": 10_000}, bob={}, boss={"admin": True})
    cluster = await live_cluster(
        *roles,
        client_keys={"hashed_keys": keys, "usage_db": str(tmp_path / "usage.db")},
        hashed_keys=keys,  # the instances have the same keys, and the same database
        usage_db=str(tmp_path / "usage.db"),
        cluster_secret=SECRET,
    )
    stop_clock(cluster)
    whole = await cluster.front.post("/v1/chat/completions", CHAT, **headers["bob"])
    used = whole.json["usage"]
    for name in ("alice", "bob"):
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = await cluster.front.post(path, CHAT | {"stream": True}, **headers[name])
            assert answer.status == 200 and b"total_tokens" not in answer.body
    await cluster.wait_until_idle()
    rows = {row["key"]: row for row in await usage_rows(cluster, headers["boss"])}
    assert rows.keys() == {"alice", "bob"}
    for name, requests in (("alice", 2), ("bob", 3)):
        row = rows[name]
        assert (row["model"], row["requests"]) == ("tiny", requests)
        assert row["prompt_tokens"] == requests * used["prompt_tokens"]
        assert row["completion_tokens"] == requests * used["completion_tokens"]
    alice = cluster.coordinator.client_keys.keys.check_key(
        {b"authorization": headers["alice"]["authorization"].encode()}
    )
    states = cluster.coordinator.client_keys.ledger.limiter.states_of(alice)
    assert states.tokens.remaining == 10_000 - 2 * used["total_tokens"]
    assert (await cluster.front.get("/v1/usage", **headers["bob"])).status == 403


async def test_a_bad_request_is_refused_as_such_although_no_instance_with_a_longer_context_can_be_reached(live_cluster):
    headers, keys = make_keys(alice={"tokens_per_minute": 10_000})
    cluster = await live_cluster("mixed", "mixed", client_keys={"hashed_keys": keys})
    await cluster.coordinator.health.stop_checks()
    _, lost = cluster.coordinator.table
    lost.context_length, lost.url = 1 << 20, f"http://127.0.0.1:{free_port()}"
    lose_instance(cluster.coordinator.table, lost)
    answer = await cluster.front.post("/v1/completions", COMPLETION | {"temperature": -1}, **headers["alice"])
    assert answer.status == 400 and "temperature" in answer.body.decode(), answer.body


async def test_every_ending_releases_unused_tokens(live_cluster, tmp_path):
    headers, keys = make_keys(alice={"concurrent_requests": 4, "tokens_per_minute": 10_000}, boss={"admin": True})
    cluster = await live_cluster(
        "mixed", "mixed", client_keys={"hashed_keys": keys, "usage_db": str(tmp_path / "usage.db")}
    )
    stop_clock(cluster)
    body = COMPLETION | {"stream": True, "max_tokens": 1000, "ignore_eos": True, "min_tokens": 1000}
    connections = []
    for _ in range(4):
        connections.append(await cluster.front.connect())
        await connections[-1].send(build_request("POST", "/v1/completions", body, headers["alice"]))
        assert (await connections[-1].head())[0] == 200
    refused = await cluster.front.post("/v1/completions", COMPLETION, **headers["alice"])
    assert refused.status == 429 and "concurrent requests: limit 4" in refused.json["error"]["message"]
    for connection in connections:  # the clients leave
        connection.close()
    await cluster.front.until(lambda: open_requests(cluster) == 0)
    await cluster.wait_until_idle()
    (row,) = await usage_rows(cluster, headers["boss"], key="alice")
    alice = Tenant(id=next(iter(cluster.coordinator.client_keys.ledger.limiter._meters)))
    assert row["requests"] == 4 and row["prompt_tokens"] == 16 and row["completion_tokens"] < 4000
    meter = cluster.coordinator.client_keys.ledger.limiter._meters[alice.id]
    assert meter.tokens.remaining == 10_000 - row["prompt_tokens"] - row["completion_tokens"]
    wrong = await cluster.front.post("/v1/completions", COMPLETION | {"max_tokens": -1}, **headers["alice"])
    assert wrong.status == 400 and open_requests(cluster) == 0


async def test_requests_that_move_to_another_instance_count_once(live_cluster, tmp_path):
    headers, keys = make_keys(alice={"concurrent_requests": 1, "tokens_per_minute": 10_000}, boss={"admin": True})
    cluster = await live_cluster(
        "mixed", "mixed", client_keys={"hashed_keys": keys, "usage_db": str(tmp_path / "usage.db")}, tick=0.01
    )
    stop_clock(cluster)
    body = COMPLETION | {
        "stream": True,
        "max_tokens": 40,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    connection = await cluster.front.connect()
    await connection.send(build_request("POST", "/v1/completions", body, headers["alice"]))
    assert (await connection.head())[0] == 200
    busy = next(server for server in cluster.instances if server.service.open_requests)
    busy.server.should_exit = busy.server.force_exit = True
    for request in list(busy.service.open_requests):
        request.fail_on_shutdown(ServerStopping("The instance ends."))
    chunks = b"".join(await connection.chunks()).decode()
    usage = next(json.loads(line[6:])["usage"] for line in chunks.splitlines() if '"total_tokens"' in line)
    await cluster.front.until(lambda: open_requests(cluster) == 0)
    (row,) = await usage_rows(cluster, headers["boss"], key="alice")
    assert (row["requests"], row["prompt_tokens"]) == (1, usage["prompt_tokens"])
    assert row["completion_tokens"] == usage["completion_tokens"]


async def test_embeddings_are_counted_and_changes_are_audited(live_cluster, tmp_path):
    headers, keys = make_keys(alice={"tokens_per_minute": 1000}, boss={"admin": True})
    audit = tmp_path / "audit.jsonl"
    files = {"usage_db": str(tmp_path / "usage.db"), "audit_log": str(audit)}
    cluster = await live_cluster("mixed", "mixed", client_keys={"hashed_keys": keys} | files)
    stop_clock(cluster)
    answer = await cluster.front.post("/v1/embeddings", {"input": "a b c"}, **headers["alice"])
    assert answer.status == 200, answer.body
    assert "used-tokens" not in "".join(answer.headers)
    for name, status in (("alice", 403), ("boss", 200)):
        assert (await cluster.front.post("/reset_prefix_cache", **headers[name])).status == status
    (row,) = await usage_rows(cluster, headers["boss"], key="alice")
    assert (row["requests"], row["prompt_tokens"]) == (1, answer.json["usage"]["prompt_tokens"])
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in lines if "reset" in line["path"]] == [
        ("/reset_prefix_cache", 403),
        ("/reset_prefix_cache", 200),
    ]


async def test_only_the_coordinator_may_name_the_client(live_cluster):
    headers, keys = make_keys(alice={}, boss={"admin": True})
    cluster = await live_cluster("mixed", client_keys={"hashed_keys": keys}, hashed_keys=keys, cluster_secret=SECRET)
    boss = cluster.coordinator.client_keys.keys.check_key({b"authorization": headers["boss"]["authorization"].encode()})
    claim = {"parley-client": write_vouched_client(boss, "boss").decode()}
    instance = cluster.instances[0]
    assert (await instance.post("/v1/completions", COMPLETION, **claim)).status == 401
    assert (await instance.post("/reset_prefix_cache", **claim)).status == 401
    assert (await cluster.front.post("/reset_prefix_cache", **claim, **headers["alice"])).status == 403
    known = claim | {"parley-secret": SECRET, "parley-forwarded": "public"}
    assert (await instance.post("/reset_prefix_cache", **known)).status == 200


def coordinator_options_of(*flags: str) -> CoordinatorOptions:
    return cli.coordinator_options(resolve_options(cli.OPTIONS, flags, {}))


def test_key_options_are_checked(tmp_path):
    file, plain, config = tmp_path / "keys.toml", tmp_path / "keys", tmp_path / "cluster.toml"
    plain.write_text("a key\n")
    config.write_text('api_key_file = "keys.toml"\nusage_db = "usage.db"\n')
    for flags, message in (
        (("--api-key-file", str(plain)), "not a file in TOML"),
        (("--api-key-file", str(file)), "cannot be read"),
        (("--usage-db", "usage.db"), "--usage-db needs --api-key-file"),
        (("--config", str(config)), "keys.toml cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            coordinator_options_of(*flags)
    add_key(file, make_key("alice", apis=("openai",))[1])
    options = coordinator_options_of("--config", str(config))
    assert [key.name for key in options.hashed_keys or ()] == ["alice"]
    assert options.usage_db == str(tmp_path / "usage.db")
    add_key(file, make_key("bob", apis=("no such",))[1])
    with pytest.raises(ConfigError, match="no API is called no such"):
        coordinator_options_of("--config", str(config))


async def test_changed_key_file_is_read_again_and_a_broken_one_is_ignored(live_cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(coordinator, "file_changes", partial(file_changes, poll_seconds=0.01))
    file = tmp_path / "keys.toml"
    key, hashed = make_key("alice")
    add_key(file, hashed)
    cluster = await live_cluster("mixed", client_keys={"hashed_keys": (hashed,), "api_key_file": str(file)})
    cluster.coordinator._read_options = lambda: replace(
        cluster.coordinator.options, hashed_keys=read_key_table(file, "file")
    )
    headers = {"authorization": f"Bearer {key}"}

    async def wait_for(status: int) -> None:
        async with asyncio.timeout(20):
            while (await cluster.front.post("/v1/completions", COMPLETION, **headers)).status != status:
                await asyncio.sleep(0.02)

    await wait_for(200)
    remove_key(file, "alice")
    await wait_for(401)
    add_key(file, hashed)
    await wait_for(200)
    file.write_text("[[keys]]\nname = 1\n")
    await asyncio.sleep(0.1)
    await wait_for(200)


async def test_background_requests_are_counted_until_their_end(live_cluster, tmp_path):
    headers, keys = make_keys(alice={"concurrent_requests": 1, "tokens_per_minute": 1000}, boss={"admin": True})
    cluster = await live_cluster(
        "mixed", "mixed", client_keys={"hashed_keys": keys, "usage_db": str(tmp_path / "usage.db")}, tick=0.02
    )
    stop_clock(cluster)
    body = {"model": "tiny", "input": "a b c", "max_output_tokens": 4, "background": True}
    too_much = await cluster.front.post("/v1/responses", body | {"max_output_tokens": 1000}, **headers["alice"])
    assert too_much.status == 429 and "requested 1" in too_much.json["error"]["message"]
    await cluster.front.until(lambda: open_requests(cluster) == 0)
    begun = await cluster.front.post("/v1/responses", body, **headers["alice"])
    assert begun.status == 200 and begun.json["status"] in ("queued", "in_progress")
    refused = await cluster.front.post("/v1/completions", COMPLETION, **headers["alice"])
    assert refused.status == 429 and "concurrent requests" in refused.json["error"]["message"]
    await cluster.front.until(lambda: open_requests(cluster) == 0)
    stored = await cluster.front.get(f"/v1/responses/{begun.json['id']}", **headers["alice"])
    assert stored.json["status"] in ("completed", "incomplete"), stored.body
    (row,) = await usage_rows(cluster, headers["boss"], key="alice")
    assert (row["requests"], row["completion_tokens"]) == (1, stored.json["usage"]["output_tokens"])
    assert row["prompt_tokens"] == stored.json["usage"]["input_tokens"]
    other = await cluster.front.get(f"/v1/responses/{begun.json['id']}", **headers["boss"])
    assert other.status == 404


async def test_grpc_calls_have_the_same_limits(live_cluster):
    headers, keys = make_keys(alice={"requests_per_minute": 1}, apis={"apis": ["openai"]})
    port = free_port()
    cluster = await live_cluster("prefill", "decode", client_keys={"hashed_keys": keys, "grpc_port": port})
    stop_clock(cluster)
    client = GrpcClient(cluster.front, cast(TritonGrpcPort, None), f"127.0.0.1:{port}")
    outcomes = []
    for name in ("alice", "alice", "apis"):
        metadata = tuple(headers[name].items())
        try:
            outcomes.append(answer_text(await client.infer(metadata=metadata, max_tokens=2)) != "")
        except grpc.aio.AioRpcError as error:
            outcomes.append((error.code().name, dict(error.trailing_metadata()).get("retry-after")))
    assert outcomes == [True, ("RESOURCE_EXHAUSTED", "60"), ("PERMISSION_DENIED", None)]
    with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
        await client.infer(max_tokens=2)
    await client.channel.close()
    await cluster.wait_until_idle()


async def test_requests_to_other_servers_are_counted_by_the_usage_in_their_answers(cluster, tmp_path):
    headers, keys = make_keys(alice={"tokens_per_minute": 1000}, models={"models": ["other"]}, boss={"admin": True})
    plain = ScriptedInstance("mixed", plain=True)
    running = await cluster(plain, hashed_keys=keys, usage_db=str(tmp_path / "usage.db"))
    usage = b'{"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18}}'
    stream = b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    sent = iter((raw_answer(200, usage), raw_answer(200, stream), raw_answer(422, b"{}")))

    async def answer(request: Any) -> bytes:
        return next(sent)

    plain.before_prefill = answer
    body = json.dumps(CHAT | {"model": "theirs"}).encode()
    key_lines = {name: f"authorization: {header['authorization']}" for name, header in headers.items()}
    for status in (200, 200, 422):
        assert (await running.post("/v1/chat/completions", body, key_lines["alice"])).status == status
    too_much = json.dumps(CHAT | {"model": "theirs", "max_tokens": 1000}).encode()
    assert (await running.post("/v1/chat/completions", too_much, key_lines["alice"])).status == 429
    assert (await running.post("/v1/chat/completions", body, key_lines["models"])).status == 403
    assert (await running.post("/v1/chat/completions", body)).status == 401
    assert len(plain.requests) == 3 and not any(name.startswith("parley-") for name in plain.requests[0].headers)
    meters = running.coordinator.client_keys.ledger.limiter._meters
    await running.wait_until(lambda: not any(meter.open_requests for meter in meters.values()))
    rows = running.coordinator.client_keys.ledger.usage_store.list_usage("0000-01-01", "9999-12-31", "alice", "", 10)
    assert sum(row.requests for row in rows) == 2 and sum(row.completion_tokens for row in rows) == 7 + 2
