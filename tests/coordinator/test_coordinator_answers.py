"""A coordinator and its servers, in one process over real sockets, give the bytes that a single server gives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.certificates import authority, certificate
from support.compare_answers import same
from support.http_client import Answer, Served, request
from support.random_requests import body, routes

from parley.coordinator.config import read
from parley.coordinator.coordinator import Coordinator
from parley.coordinator.routing.admission import policy
from parley.types import Work
from parley.web.port import listen

UNIQUE = "0123456789abcdef0123456789abcdef"
JSON = {"content-type": "application/json"}
NIGHTLY = bool(os.environ.get("PARLEY_NIGHTLY"))
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 40}


def scripted(work: Work, index: int) -> list[int]:
    """Random tokens that are the same for the same request; sometimes none."""
    rng = random.Random(f"{work.seed + index} {work.token_ids[-3:]}")
    return [rng.randrange(640) for _ in range(rng.choice((0, 1, 2, 9, 40)))]


async def compare(one: Served, many: Served, path: str, asked: bytes) -> None:
    expected, given = await one.call("POST", path, asked, JSON), await many.call("POST", path, asked, JSON)
    assert given.status == expected.status, (path, asked, given)
    assert headers(given) == headers(expected), (path, asked)
    equal = same(given.body, expected.body) or turned(given.body) == turned(expected.body)
    assert equal, (path, asked, given.body, expected.body)


def turned(body: bytes) -> Any:
    """Return an answer with its choices sorted: with several prompts they come in the order of their ends."""
    try:
        told = json.loads(body)
        told["choices"].sort(key=json.dumps)
    except (ValueError, TypeError, LookupError):
        return body
    return told


def headers(answer: Answer) -> dict[str, str]:
    """Return the headers that do not depend on time, nor on the length, which depends on it."""
    return {
        name: value
        for name, value in answer.headers.items()
        if name not in ("date", "content-length") and not any(word in name for word in ("time", "-ms", "duration"))
    }


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_cluster_answers_every_route_like_one_server(live_cluster, serve, roles: tuple[str, ...]) -> None:
    many, one = await live_cluster(*roles, reply=scripted), await serve(reply=scripted)
    rng = random.Random(f"routes {roles}")
    for path, _ in routes():
        for _ in range(40 if NIGHTLY else 1):
            await compare(one, many.front, path, body(path, rng))
    await many.idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/mindie/v1/chat/completions", "/tgi/generate", "/nowhere"])
@pytest.mark.parametrize("asked", [b"{", b"[]", b"{}", b'{"model":"no","messages":[],"max_tokens":0}', b"\xff"])
async def test_cluster_refuses_bad_requests_like_one_server(live_cluster, serve, path: str, asked: bytes) -> None:
    many, one = await live_cluster("prefill", "decode"), await serve()
    await compare(one, many.front, path, asked)
    await many.idle()


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_mindie_stream_sends_each_event_in_its_own_chunk(live_cluster, serve, roles: tuple[str, ...]) -> None:
    for served in (await serve(), (await live_cluster(*roles)).front):
        connection = await served.connect()
        await connection.send(request("POST", "/mindie/v1/chat/completions", CHAT | {"stream": True}))
        await connection.head()
        chunks = await connection.chunks()
        assert len(chunks) > 2 and chunks[-1] == b"data: [DONE]\n\n"
        assert all(chunk.startswith(b"data: ") and chunk.index(b"\n\n") == len(chunk) - 2 for chunk in chunks)
        connection.close()


async def test_mindie_client_can_name_and_stop_its_request(live_cluster) -> None:
    many = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.01)
    path, asked = "/mindie/v1/chat/completions", json.dumps(CHAT).encode()
    call = asyncio.create_task(many.front.call("POST", path, asked, JSON | {"req-id": "77"}))
    decoding = many.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running)
    again = await many.front.call("POST", path, asked, JSON | {"req-id": "77"})
    assert (again.status, again.body) == (400, b"Duplicate request id\r\n")
    stop = await many.front.call("POST", "/mindie/v2/models/tiny/stopInfer", b'{"id":"77"}', JSON)
    assert stop.status == 200
    answer = await call
    assert answer.json["id"] == "77" and answer.json["usage"]["completion_tokens"] < 40
    await many.idle()


@pytest.mark.parametrize("lost", ["its results", "its engine", "its server"])
async def test_stream_resumes_byte_for_byte_when_decode_ends(live_cluster, serve, lost: str) -> None:
    def reply(work: Work, index: int) -> list[int]:
        return [70 + k % 90 for k in range(40)]

    many = await live_cluster("prefill", "decode", "decode", reply=reply, tick=0.01, drain=0.05)
    one = await serve(reply=reply)
    asked = json.dumps(CHAT | {"stream": True, "n": 2, "logprobs": True}).encode()
    expected = await one.call("POST", "/v1/chat/completions", asked, JSON)
    calls = [asyncio.create_task(many.front.call("POST", "/v1/chat/completions", asked, JSON)) for _ in range(8)]
    decoding = many.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running)
    await asyncio.sleep(0.1)
    if lost == "its engine":
        decoding.engine.crash()
    elif lost == "its server":
        await decoding.service.drain()
    else:
        feed = many.coordinator.connections.feed(many.coordinator.table.instances[2])
        many.coordinator.table.fault(many.coordinator.table.instances[2])
        feed.fail("It is gone.")
    for answer in await asyncio.gather(*calls):
        assert same(answer.body, expected.body)
    assert many.coordinator.choice.tally.retries
    await many.idle()


async def test_stream_resumes_on_another_mixed_server(live_cluster, serve) -> None:
    def reply(work: Work, index: int) -> list[int]:
        return [70 + k % 90 for k in range(40)]

    many, one = await live_cluster("mixed", "mixed", reply=reply, tick=0.01, drain=0.05), await serve(reply=reply)
    choice = many.coordinator.choice
    choice._policy = policy(replace(choice.options, separate="never"))
    asked = json.dumps(CHAT | {"stream": True}).encode()
    expected = await one.call("POST", "/v1/chat/completions", asked, JSON)
    calls = [asyncio.create_task(many.front.call("POST", "/v1/chat/completions", asked, JSON)) for _ in range(8)]
    ending = many.instances[0]
    await ending.until(lambda: ending.engine.stats.running)
    await asyncio.sleep(0.05)
    await ending.service.drain()
    for answer in await asyncio.gather(*calls):
        assert same(answer.body, expected.body)
    assert choice.tally.retries
    await many.idle()


async def test_coordinator_shutdown_ends_open_requests_with_an_error(live_cluster) -> None:
    many = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.05)
    asked = json.dumps(CHAT | {"stream": True}).encode()
    streamed = asyncio.create_task(many.front.call("POST", "/v1/chat/completions", asked, JSON))
    whole = asyncio.create_task(many.front.call("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), JSON))
    decoding = many.instances[1]
    await decoding.until(lambda: decoding.engine.stats.running == 2)
    many.coordinator.stop()
    many.coordinator.stop()  # a second stop ends the wait for open requests
    answer = await streamed
    *_, last, done, _ = answer.body.split(b"\n\n")
    assert b"The server is shutting down." in last and b'"error"' in last and done == b"data: [DONE]", answer.body
    refused = await whole
    assert (refused.status, refused.json["error"]["type"]) == (503, "service_unavailable")
    await many.idle()


async def test_incoming_bodies_count_against_the_memory_limit(live_cluster) -> None:
    many = await live_cluster("mixed")
    many.coordinator.front._memory = 1 << 20
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, second = await many.front.connect(), await many.front.connect()
    await first.send(head + b"a0000\r\n" + b" " * 0xA0000)
    await many.front.until(lambda: many.coordinator.front.held == 0xA0000)
    await second.send(head + b"a0000\r\n" + b" " * 0xA0000)
    answer = await second.answer()
    assert (answer.status, answer.json["error"]["message"]) == (429, "Memory limit exceeded")
    first.close()
    await many.front.until(lambda: many.coordinator.front.held == 0)
    third = await many.front.connect()
    await third.send(head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % (1 << 40)))
    assert (await third.answer()).status == 413  # a retry would not help
    await many.idle()


async def test_coordinator_answers_only_clients_with_a_key(live_cluster) -> None:
    many = await live_cluster("prefill", "decode", api_keys=("k",), cluster_secret="s")
    strangers: list[dict[str, str]] = [{}, {"parley-secret": "s"}, {"authorization": "Bearer s"}]
    for method, path, asked in (
        ("POST", "/v1/chat/completions", json.dumps(CHAT).encode()),
        ("GET", "/v1/models", b""),
        ("GET", "/metrics", b""),
        ("GET", "/load", b""),
    ):
        for shown in strangers:
            assert (await many.front.call(method, path, asked, JSON | shown)).status == 401, (path, shown)
        assert (await many.front.call(method, path, asked, JSON | {"authorization": "Bearer k"})).status == 200, path
    await many.idle()


async def test_client_disconnect_leaves_nothing_open_in_the_cluster(live_cluster) -> None:
    many = await live_cluster("prefill", "decode", reply=lambda work, index: [70] * 40, tick=0.005)
    asked = json.dumps(CHAT | {"stream": True}).encode()
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        connection = await many.front.connect()
        await connection.send(request("POST", "/v1/chat/completions", asked, JSON))
        await asyncio.sleep(delay)
        connection.close()
        await many.idle()


async def test_coordinator_uses_tls_for_clients_and_instances(tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    certificate(tmp_path, "one", "ca")
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(tmp_path / "one.pem", tmp_path / "one.key")
    seen: list[bytes] = []

    async def instance(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                told = b'{"service":{"roleStatus":"RoleReady","currentRole":"mixed"}}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(told), told))

    server = await asyncio.start_server(instance, "127.0.0.1", 0, ssl=own)
    port = server.sockets[0].getsockname()[1]
    files = {"certificate": "one.pem", "key": "one.key", "ca": "ca.pem"}
    told = {"tls": files, "secret": "s", "heartbeat": 0.05, "instances": [{"url": f"https://127.0.0.1:{port}"}]}
    sock = listen("127.0.0.1", 0)
    coordinator = Coordinator(read(told, "test", tmp_path), {"predict": ("127.0.0.1", sock)}, access_log=False)
    task = asyncio.create_task(coordinator.run(signals=False))
    try:
        async with asyncio.timeout(10):
            while not coordinator.table.usable():
                await asyncio.sleep(0.01)
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1], ssl=trusting)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert b'"currentRole":"mixed"' in await reader.read()
        writer.close()
        asked = [head for head in seen if not head.startswith(b"GET /v1/models ")]
        assert len(asked) < len(seen) and all(b"parley-secret: s\r\n" in head for head in asked)
        assert not any(b"parley-secret" in head for head in seen if head not in asked)  # the client's own requests
    finally:
        coordinator.stop()
        await task
        server.close()
