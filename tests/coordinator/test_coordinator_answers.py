"""A coordinator and its servers, in one process over real sockets, give the bytes that a single server gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from support.certificates import make_authority, make_certificate
from support.compare_answers import same_answer
from support.http_client import Answer, RunningServer, build_request
from support.loop_clock import pass_time
from support.random_requests import generating_routes, random_body

from parley.coordinator.config import parse_coordinator_config
from parley.coordinator.coordinator import Coordinator
from parley.types import EngineRequest
from parley.web import request_body as bodies
from parley.web.exchange import Exchange
from parley.web.port import open_listener

UNIQUE = "0123456789abcdef0123456789abcdef"
JSON = {"content-type": "application/json"}
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 40}


def scripted_reply(work: EngineRequest, index: int) -> list[int]:
    """Random tokens that are the same for the same request; sometimes none."""
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(rng.choice((0, 1, 2, 9, 40)))]


async def compare_to_one_server(server: RunningServer, cluster: RunningServer, path: str, body: bytes) -> None:
    expected, answer = await server.call("POST", path, body, JSON), await cluster.call("POST", path, body, JSON)
    assert answer.status == expected.status, (path, body, answer)
    assert stable_headers(answer) == stable_headers(expected), (path, body)
    equal = same_answer(answer.body, expected.body) or sort_choices(answer.body) == sort_choices(expected.body)
    assert equal, (path, body, answer.body, expected.body)


def sort_choices(body: bytes) -> Any:
    """Return an answer with its choices sorted: with several prompts they come in the order of their ends."""
    try:
        answer = json.loads(body)
        answer["choices"].sort(key=json.dumps)
    except (ValueError, TypeError, LookupError):
        return body
    return answer


def stable_headers(answer: Answer) -> dict[str, str]:
    """Return the headers that do not depend on time, nor on the length, which depends on it.

    Strict MindIE servers close their connections; coordinators keep them, and count the requests on each.
    """
    return {
        name: value
        for name, value in answer.headers.items()
        if name not in ("date", "content-length", "connection")
        and not any(word in name for word in ("time", "-ms", "duration"))
    }


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_cluster_answers_every_route_like_one_server(live_cluster, serve, roles: tuple[str, ...]) -> None:
    cluster, server = await live_cluster(*roles, reply=scripted_reply), await serve(reply=scripted_reply)
    rng = random.Random(f"routes {roles}")
    for path, _ in generating_routes():
        for _ in range(40 if NIGHTLY else 1):
            await compare_to_one_server(server, cluster.front, path, random_body(path, rng))
    await cluster.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/mindie/v1/chat/completions", "/tgi/generate", "/nowhere"])
@pytest.mark.parametrize("bad_body", [b"{", b"[]", b"{}", b'{"model":"no","messages":[],"max_tokens":0}', b"\xff"])
async def test_cluster_refuses_bad_requests_like_one_server(live_cluster, serve, path: str, bad_body: bytes) -> None:
    cluster, server = await live_cluster("prefill", "decode"), await serve()
    await compare_to_one_server(server, cluster.front, path, bad_body)
    await cluster.wait_until_idle()


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_mindie_stream_sends_each_event_in_its_own_chunk(live_cluster, serve, roles: tuple[str, ...]) -> None:
    for running_server in (await serve(), (await live_cluster(*roles)).front):
        connection = await running_server.connect()
        await connection.send(build_request("POST", "/mindie/v1/chat/completions", CHAT | {"stream": True}))
        await connection.head()
        chunks = await connection.chunks()
        assert len(chunks) > 2 and chunks[-1] == b"data: [DONE]\n\n"
        assert all(chunk.startswith(b"data: ") and chunk.index(b"\n\n") == len(chunk) - 2 for chunk in chunks)
        connection.close()


STREAMS: list[tuple[str, dict[str, Any], re.Pattern[bytes]]] = [  # each with the form of a chunk
    ("/mindie/generate", {"prompt": "Hi", "max_tokens": 9}, re.compile(rb'\{"text":\["[^"]*"\]\}\0')),
    ("/mindie/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 9}, re.compile(rb"data: [^\n]+\n\n")),
    ("/vllm/generate", {"prompt": "Hi", "max_tokens": 9}, re.compile(rb'\{"text": \["[^"]*"\]\}\n')),
    ("/vllm-0.6.3/generate", {"prompt": "Hi", "max_tokens": 9}, re.compile(rb'\{"text": \["[^"]*"\]\}\0')),
    ("/vllm/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 9}, re.compile(rb"data: [^\n]+\n\n")),
]


@pytest.mark.parametrize("roles", [(), ("mixed",), ("prefill", "decode")], ids=str)
@pytest.mark.parametrize(("path", "body", "chunk_form"), STREAMS, ids=[path for path, _, _ in STREAMS])
async def test_delayed_tokens_are_sent_in_separate_chunks(
    live_cluster,
    serve,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    chunk_form: re.Pattern[bytes],
    roles: tuple[str, ...],
) -> None:
    """Outputs pile up while a write waits, as they do for a client that reads slowly."""
    write_stream = Exchange.write_stream

    async def write_late(exchange: Exchange, *arguments: Any, **options: Any) -> None:
        await write_stream(exchange, *arguments, **options)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Exchange, "write_stream", write_late)
    options: dict[str, Any] = {"reply": lambda work, index: [70] * 9}
    running_server = (await live_cluster(*roles, **options)).front if roles else await serve(**options)
    connection = await running_server.connect()
    await connection.send(build_request("POST", path, body | {"stream": True}))
    await connection.head()
    chunks = [chunk for chunk in await connection.chunks() if chunk != b"data: [DONE]\n\n"]
    assert len(chunks) == 9 and all(map(chunk_form.fullmatch, chunks)), chunks
    connection.close()


@pytest.mark.parametrize("taken_out", [False, True])
async def test_mindie_client_can_name_and_stop_its_request(live_cluster, taken_out: bool) -> None:
    cluster = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.01)
    path, chat_body = "/mindie/v1/chat/completions", json.dumps(CHAT).encode()
    call = asyncio.create_task(cluster.front.call("POST", path, chat_body, JSON | {"req-id": "77"}))
    decoding = cluster.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running)
    decoding.engine.step_gate.clear()  # it runs until it is stopped
    duplicate = await cluster.front.call("POST", path, chat_body, JSON | {"req-id": "77"})
    assert (duplicate.status, duplicate.body) == (400, b"Duplicate request id\r\n")
    if taken_out:  # the instance finishes its requests
        table = cluster.coordinator.table
        table.set_instance_offline(table.instances[2], offline=True)
    stop = await cluster.front.call("POST", "/mindie/v2/models/tiny/stopInfer", b'{"id":"77"}', JSON)
    assert stop.status == 200
    answer = await call
    assert answer.json["id"] == "77" and answer.json["usage"]["completion_tokens"] < 40
    decoding.engine.step_gate.set()
    await cluster.wait_until_idle()


@pytest.mark.parametrize("lost", ["its results", "its engine", "its server"])
async def test_stream_resumes_byte_for_byte_when_decode_ends(live_cluster, serve, lost: str) -> None:
    def reply(work: EngineRequest, index: int) -> list[int]:
        return [70 + k % 90 for k in range(40)]

    cluster = await live_cluster("prefill", "decode", "decode", reply=reply, tick=0.01, drain=0.05)
    server = await serve(reply=reply)
    chat_body = json.dumps(CHAT | {"stream": True, "n": 2, "logprobs": True}).encode()
    expected = await server.call("POST", "/v1/chat/completions", chat_body, JSON)
    calls = [asyncio.create_task(cluster.front.call("POST", "/v1/chat/completions", chat_body, JSON)) for _ in range(8)]
    decoding = cluster.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running)
    await asyncio.sleep(0.1)
    if lost == "its engine":
        decoding.engine.crash_engine()
    elif lost == "its server":
        await decoding.service.drain_models()
    else:
        feed = cluster.coordinator.connections.result_stream(cluster.coordinator.table.instances[2])
        cluster.coordinator.table.mark_faulty(cluster.coordinator.table.instances[2])
        feed.fail_requests("It is gone.")
    for answer in await asyncio.gather(*calls):
        assert same_answer(answer.body, expected.body)
    assert cluster.coordinator.scheduler.counters.retries
    await cluster.wait_until_idle()


async def test_stream_resumes_on_another_mixed_server(live_cluster, serve) -> None:
    def reply(work: EngineRequest, index: int) -> list[int]:
        return [70 + k % 90 for k in range(40)]

    cluster = await live_cluster("mixed", "mixed", separate="never", reply=reply, tick=0.01, drain=0.05)
    server, scheduler = await serve(reply=reply), cluster.coordinator.scheduler
    chat_body = json.dumps(CHAT | {"stream": True}).encode()
    expected = await server.call("POST", "/v1/chat/completions", chat_body, JSON)
    calls = [asyncio.create_task(cluster.front.call("POST", "/v1/chat/completions", chat_body, JSON)) for _ in range(8)]
    ending = cluster.instances[0]
    await ending.until(lambda: ending.engine.stats.running)
    await asyncio.sleep(0.05)
    await ending.service.drain_models()
    for answer in await asyncio.gather(*calls):
        assert same_answer(answer.body, expected.body)
    assert scheduler.counters.retries
    await cluster.wait_until_idle()


async def test_coordinator_shutdown_ends_open_requests_with_an_error(live_cluster) -> None:
    cluster = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.05)
    chat_body = json.dumps(CHAT | {"stream": True}).encode()
    streamed_call = asyncio.create_task(cluster.front.call("POST", "/v1/chat/completions", chat_body, JSON))
    unstreamed_call = asyncio.create_task(
        cluster.front.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), JSON)
    )
    decoding = cluster.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running == 2)
    cluster.coordinator.request_stop()
    cluster.coordinator.request_stop()  # a second stop ends the wait for open requests
    answer = await streamed_call
    *_, last, done, _ = answer.body.split(b"\n\n")
    assert b"The server is shutting down." in last and b'"error"' in last and done == b"data: [DONE]", answer.body
    refused = await unstreamed_call
    assert (refused.status, refused.json["error"]["type"]) == (503, "service_unavailable")
    await cluster.wait_until_idle()


async def test_incoming_bodies_count_against_the_memory_limit(live_cluster) -> None:
    cluster = await live_cluster("mixed", memory_limit=1 << 20)
    cluster.instances[0].engine.step_gate.clear()
    body = json.dumps(CHAT).encode().ljust(400_000)
    running = [await cluster.front.connect() for _ in range(2)]
    for number, connection in enumerate(running, 1):
        await connection.send(build_request("POST", "/v1/chat/completions", body))
        await cluster.front.until(lambda number=number: cluster.coordinator.front.load.body_bytes == number * len(body))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    incoming = await cluster.front.connect()
    await incoming.send(head + b"60000\r\n" + b" " * 0x60000)
    answer = await incoming.answer()
    assert (answer.status, answer.json["error"]["message"]) == (
        429,
        "The coordinator's memory for request bodies is full.",
    )
    for connection in running:
        connection.close()
    await cluster.front.until(lambda: cluster.coordinator.front.load.body_bytes == 0)
    cluster.instances[0].engine.step_gate.set()
    huge = await cluster.front.connect()
    await huge.send(head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % (1 << 40)))
    assert (await huge.answer()).status == 413  # a retry would not help
    await cluster.wait_until_idle()


async def test_unfinished_bodies_leave_room_for_others(live_cluster) -> None:
    """Unfinished bodies may take half of the memory; the slowest one is ended to make room for the next."""
    cluster = await live_cluster("mixed", memory_limit=1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n"
    unfinished = []
    for _ in range(2):
        unfinished.append(await cluster.front.connect())
        await unfinished[-1].send(head + b" " * 250_000)
        size = 250_000 * len(unfinished)
        await cluster.front.until(lambda size=size: cluster.coordinator.front.load.body_bytes == size)
    await pass_time(bodies.SLOW_SECONDS)
    body = json.dumps(CHAT).encode().ljust(300_000)
    running_server = await cluster.front.connect()
    await running_server.send(build_request("POST", "/v1/chat/completions", body))
    assert (await running_server.answer()).status == 200
    answer = await unfinished[0].answer()
    assert (answer.status, "still arriving" in answer.json["error"]["message"]) == (429, True)
    for connection in (running_server, *unfinished):
        connection.close()
    await cluster.front.until(lambda: cluster.coordinator.front.load.body_bytes == 0)
    await cluster.wait_until_idle()


async def test_coordinator_answers_only_clients_with_a_key(live_cluster) -> None:
    cluster = await live_cluster("prefill", "decode", api_keys=("k",), cluster_secret="s")
    strangers: list[dict[str, str]] = [{}, {"parley-secret": "s"}, {"authorization": "Bearer s"}]
    for method, path, request_body in (
        ("POST", "/v1/chat/completions", json.dumps(CHAT).encode()),
        ("GET", "/v1/models", b""),
        ("GET", "/metrics", b""),
        ("GET", "/load", b""),
    ):
        for headers in strangers:
            assert (await cluster.front.call(method, path, request_body, JSON | headers)).status == 401, (path, headers)
        assert (
            await cluster.front.call(method, path, request_body, JSON | {"authorization": "Bearer k"})
        ).status == 200, path
    await cluster.wait_until_idle()


async def test_foreign_scheduler_works_next_to_the_coordinator(live_cluster) -> None:
    """The scheduler uses MindIE's documented protocol, and knows the secret."""
    cluster = await live_cluster("prefill", "decode", cluster_secret="s")
    p, d = cluster.instances
    results = await d.connect()
    await results.send(build_request("GET", "/dresult", headers={"parley-secret": "s"}))
    assert (await results.head())[0] == 200

    async def command_prefill(target: str, **secret: str) -> Answer:
        command = {"req-id": "77", "req-type": "prefill", "d-target": target}
        return await p.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), JSON | command | secret)

    secret = {"parley-secret": "s"}
    answer = await command_prefill(f"127.0.0.1;{cluster.members[1].peer.port}", **secret)
    assert (answer.status, answer.json["isLastResp"]) == (200, False), answer.body
    async with asyncio.timeout(20):
        assert b"reqId:77\0" in await results.reader.readuntil(b"lastData:")
    assert (await cluster.front.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), JSON)).status == 200
    wrong_port = await command_prefill(f"127.0.0.1;{d.port}", **secret)
    assert wrong_port.status == 500 and b"is another kind of server: give the --peer-port" in wrong_port.body
    stranger = await command_prefill(f"127.0.0.1;{cluster.members[1].peer.port}")
    assert stranger.status == 401 and b"--cluster-network" in stranger.body
    results.close()
    await cluster.wait_until_idle()


async def test_client_disconnect_leaves_nothing_open_in_the_cluster(live_cluster) -> None:
    cluster = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.005)
    chat_body = json.dumps(CHAT | {"stream": True}).encode()
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        connection = await cluster.front.connect()
        await connection.send(build_request("POST", "/v1/chat/completions", chat_body, JSON))
        await asyncio.sleep(delay)
        connection.close()
        await cluster.wait_until_idle()
    ended = cluster.coordinator.scheduler.counters.ended.by_label
    assert ended["cancelled"] and not ended["failed"]


async def test_coordinator_uses_tls_for_clients_and_instances(tmp_path: Path) -> None:
    make_authority(tmp_path, "ca")
    make_certificate(tmp_path, "one", "ca")
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "one.pem", tmp_path / "one.key")
    heads: list[bytes] = []

    async def instance(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                status = b'{"service":{"roleStatus":"RoleReady","currentRole":"mixed"}}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(status), status))

    server = await asyncio.start_server(instance, "127.0.0.1", 0, ssl=server_context)
    port = server.sockets[0].getsockname()[1]
    files = {"certificate": "one.pem", "key": "one.key", "ca": "ca.pem"}
    file_content = {"tls": files, "secret": "s", "heartbeat": 0.05, "instances": [{"url": f"https://127.0.0.1:{port}"}]}
    sock = open_listener("127.0.0.1", 0)
    coordinator = Coordinator(
        parse_coordinator_config(file_content, "test", tmp_path), {"predict": ("127.0.0.1", sock)}, access_log=False
    )
    task = asyncio.create_task(coordinator.run_until_stopped(signals=False))
    try:
        async with asyncio.timeout(60):
            while not coordinator.table.usable_instances():
                await asyncio.sleep(0.01)
        client_context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1], ssl=client_context)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert b'"currentRole":"mixed"' in await reader.read()
        writer.close()
        coordinator_heads = [head for head in heads if not head.startswith(b"GET /v1/models ")]
        assert len(coordinator_heads) < len(heads) and all(
            b"parley-secret: s\r\n" in head for head in coordinator_heads
        )
        assert not any(
            b"parley-secret" in head for head in heads if head not in coordinator_heads
        )  # the client's own requests
    finally:
        coordinator.request_stop()
        await task
        server.close()
