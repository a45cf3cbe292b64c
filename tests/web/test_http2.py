"""HTTP/2: every API over one connection, with the limits, errors and disconnects of HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.http2_client import Http2Client
from support.http_client import HELLO_CHAT, build_request
from support.loop_clock import pass_time

from parley.web.framing import http2_protocol, http2_stream
from parley.web.framing.frame_guard import ENHANCE_YOUR_CALM, PROTOCOL_ERROR

CALLS = [
    ("GET", "/v1/models", None),
    ("HEAD", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/no/such/path", None),
    ("DELETE", "/v1/chat/completions", None),
    ("POST", "/v1/chat/completions", HELLO_CHAT),
    ("POST", "/v1/chat/completions", HELLO_CHAT | {"stream": True}),
    ("POST", "/v1/chat/completions", {"model": "tiny"}),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "stream": True}),
    ("POST", "/v1/messages", HELLO_CHAT | {"stream": True}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 8, "stream": True}),
    ("POST", "/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
    ("POST", "/api/chat", {"model": "tiny", "messages": HELLO_CHAT["messages"]}),
    ("POST", "/v2/models/tiny/generate_stream", {"text_input": "Hello", "max_tokens": 4}),
]
CHANGING_HEADERS = {"date", "x-request-id", "openai-processing-ms", "connection", "transfer-encoding", "x-total-time"}
LONG_CHAT = HELLO_CHAT | {"max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture
async def connect(serve):
    """Open connections of the frame-by-frame client, and close them."""
    clients: list[Http2Client] = []

    async def open_client(server: Any, **options: Any) -> Http2Client:
        clients.append(await Http2Client.connect(server, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


async def test_bodies_and_headers_are_those_of_http1(serve, alike, monkeypatch):
    server, pair = await alike()
    await pair.close()
    async with (
        httpx.AsyncClient(base_url=server.url, http1=False, http2=True, trust_env=False) as two,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as one,
    ):
        for method, path, body in CALLS:
            answers = [await client.request(method, path, json=body) for client in (one, two)]
            assert [answer.http_version for answer in answers] == ["HTTP/1.1", "HTTP/2"]
            first, second = (
                (
                    answer.status_code,
                    {
                        name: value
                        for name, value in answer.headers.items()
                        if name not in CHANGING_HEADERS and not name.endswith(("time", "duration", "per-token"))
                    },
                )
                for answer in answers
            )
            assert first == second, path
            bodies = [answer.content for answer in answers]
            if path not in ("/api/chat", "/v1/responses"):  # these tell times
                assert bodies[0] == bodies[1], path
            assert bool(bodies[0]) == bool(bodies[1])


async def test_many_requests_share_one_connection(serve):
    server = await serve()
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(
        base_url=server.url, http1=False, http2=True, limits=limits, timeout=60, trust_env=False
    ) as client:
        bodies = [HELLO_CHAT | {"max_tokens": 3 + number % 5, "stream": bool(number % 2)} for number in range(100)]
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * 100
        for body, answer in zip(bodies, answers, strict=True):
            assert body["stream"] == answer.text.endswith("data: [DONE]\n\n")
        assert len(server.server.server_state.connections) == 1
    await server.wait_until_idle()


async def test_http2_reset_aborts_only_its_request(serve, connect):
    server = await serve(tick=0.002)
    client = await connect(server)
    cancelled, kept = (client.begin("/v1/chat/completions", LONG_CHAT) for _ in range(2))
    await client.flush()
    while not (client.bodies[cancelled] and client.bodies[kept]):
        await client.step()
    assert server.engine.open_stream_count == 2
    client.h2.reset_stream(cancelled, 8)
    await client.flush()
    await server.until(lambda: server.engine.open_stream_count == 1)
    size = len(client.bodies[kept])
    while len(client.bodies[kept]) == size:
        await client.step()
    client.close()
    await server.wait_until_idle()


async def test_unread_stream_pauses_its_request_and_ends_it_after_the_write_timeout(serve, connect, monkeypatch):
    monkeypatch.setattr(http2_stream, "HIGH_WATER_LIMIT", 4096)
    server = await serve(write_timeout=0.5)
    client = await connect(server, reads_bodies=False)
    stuck = client.begin("/v1/chat/completions", LONG_CHAT)
    await client.flush()
    assert await client.reset_code(stuck) in (http2_stream.CANCEL, http2_stream.INTERNAL_ERROR)
    assert len(client.bodies[stuck]) <= 65535
    await server.wait_until_idle()
    assert (await client.call("/health", method="HEAD")).status == 200  # the connection goes on


async def test_response_waits_for_the_window_of_its_stream(serve, connect):
    server = await serve()
    client = await connect(server, initial_window_size=0)
    number = client.begin("/v1/models")
    other = client.begin("/v1/models", method="HEAD")
    await client.flush()
    assert (await client.answer(other)).status == 200
    assert client.bodies[number] == b""
    client.h2.increment_flow_control_window(1, number)
    await client.flush()
    while not client.bodies[number]:
        await client.step()
    assert client.bodies[number] == b"{"
    client.h2.increment_flow_control_window(10_000, number)
    await client.flush()
    assert (await client.answer(number)).json["data"]


async def test_large_bodies_pass_the_windows_both_ways(serve):
    server = await serve()
    text = "word " * 200_000
    async with httpx.AsyncClient(base_url=server.url, http1=False, http2=True, timeout=60, trust_env=False) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json={"model": "tiny", "prompt": text[n:]}) for n in range(2))
        )
        assert {answer.status_code for answer in answers} == {400}  # too long for the model, so it was read
    await server.wait_until_idle()


async def test_limits_of_heads_and_bodies_have_the_errors_of_the_api(serve, connect):
    server = await serve(header_limit=2000, body_limit=5000, header_count=20)
    client = await connect(server)
    assert (await client.call("/v1/models", x="a" * 2500)).status == 431
    assert "20 are allowed" in (await client.call("/v1/models", **{f"x{n}": "a" for n in range(30)})).error["message"]
    refused = client.begin("/v1/chat/completions", b" " * 4000, end=False)
    client.h2.send_data(refused, b" " * 4000)
    await client.flush()
    answer = await client.answer(refused)  # the body has no end yet
    assert answer.status == 413 and "limit of 5000 bytes" in answer.error["message"]
    odd_host = [(":method", "GET"), (":scheme", "http"), (":path", "/v1/models"), ("host", "a@b")]
    number = client.h2.get_next_available_stream_id()
    client.h2.send_headers(number, odd_host, end_stream=True)
    await client.flush()
    assert "Host header" in (await client.answer(number)).error["message"]


async def test_client_that_expects_100_gets_it_before_it_sends_the_body(serve, connect):
    client = await connect(await serve())
    number = client.begin("/v1/chat/completions", method="POST", end=False, expect="100-continue")
    await client.flush()
    while not client.interim:
        await client.step()
    client.h2.send_data(number, json.dumps(HELLO_CHAT).encode(), end_stream=True)
    await client.flush()
    assert (await client.answer(number)).status == 200
    assert client.interim == [100]


MALFORMED_HEADS = [
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/v1/models HTTP/1.1")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "v1/models")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/v1/models#a")],
    [(":method", "G T"), (":scheme", "http"), (":authority", "h"), (":path", "/v1/models")],
    [(":method", "CONNECT"), (":authority", "h:80")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("a", "b\r\nc: d")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("a", " b")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("A", "b")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("a b", "c")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("host", "g")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("connection", "close")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("transfer-encoding", "a")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), ("a", "b"), (":path", "/c")],
    [(":method", "GET"), (":method", "PUT"), (":scheme", "http"), (":authority", "h"), (":path", "/")],
    [(":method", "GET"), (":scheme", "http"), (":authority", "h"), (":path", "/"), (":protocol", "websocket")],
    [(":method", "GET"), (":authority", "h"), (":path", "/")],
]


async def test_malformed_heads_end_their_stream_alone(serve, connect):
    client = await connect(await serve())
    for fields in MALFORMED_HEADS:
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, fields, end_stream=True)
        await client.flush()
        assert await client.reset_code(number) == PROTOCOL_ERROR, fields
    assert (await client.call("/health")).status == 200


async def test_shutdown_lets_streams_end_and_closes_the_connection(serve, connect, monkeypatch):
    monkeypatch.setattr(http2_protocol, "LINGER_SECONDS", 0.05)
    server = await serve(tick=0.002)
    client, idle = await connect(server), await connect(server)
    assert (await idle.call("/health")).status == 200
    number = client.begin("/v1/chat/completions", HELLO_CHAT | {"max_tokens": 40, "stream": True})
    await client.flush()
    while not client.bodies[number]:
        await client.step()
    server.server.announce_shutdown()
    for connection in tuple(server.server.server_state.connections):
        connection.shutdown()
    client.h2.clear_outbound_data_buffer()
    rest = await asyncio.wait_for(client.reader.read(), 20)
    assert b"[DONE]" in rest
    assert await idle.closed() == 0


async def test_goaway_of_a_client_does_not_end_its_streams(serve, connect, monkeypatch):
    monkeypatch.setattr(http2_protocol, "LINGER_SECONDS", 0.05)
    server = await serve(tick=0.002)
    client = await connect(server)
    number = client.begin("/v1/chat/completions", HELLO_CHAT | {"max_tokens": 40, "stream": True})
    await client.flush()
    while not client.bodies[number]:
        await client.step()
    await client.send_raw(b"\0\0\10\7\0\0\0\0\0" + bytes(8))
    assert b"[DONE]" in await asyncio.wait_for(client.reader.read(), 20)


async def test_idle_connection_is_closed(serve, connect, monkeypatch):
    monkeypatch.setattr(http2_protocol, "LINGER_SECONDS", 0.05)
    client, silent = await connect(await serve(keep_alive=60)), await connect(await serve(header_timeout=60))
    assert (await client.call("/health")).status == 200
    await pass_time(60)
    assert await client.closed() == 0
    assert await silent.closed() == ENHANCE_YOUR_CALM  # it has not sent a request in time


async def test_http1_goes_on_beside_it_and_alone_where_http2_is_off(serve, connect):
    server = await serve(http2=False)
    client = await connect(server)
    assert (await client.reader.read()).startswith(b"HTTP/1.1 400 ")
    connection = await server.connect()
    await connection.send(b"P")
    await asyncio.sleep(0.01)
    request = build_request("POST", "/v1/chat/completions", HELLO_CHAT)
    await connection.send(request[1:])
    assert (await connection.answer()).status == 200


async def test_coordinator_passes_streams_and_resets_on(live_cluster, connect):
    cluster = await live_cluster("mixed", tick=0.002)
    client = await connect(cluster.front)
    stream, plain = (client.begin("/v1/chat/completions", HELLO_CHAT | {"stream": flag}) for flag in (True, False))
    await client.flush()
    assert (await client.answer(stream)).body.endswith(b"data: [DONE]\n\n")
    assert (await client.answer(plain)).json["choices"]
    left = client.begin("/v1/chat/completions", LONG_CHAT)
    await client.flush()
    while not client.bodies[left]:
        await client.step()
    client.h2.reset_stream(left, 8)
    await client.flush()
    await cluster.instances[0].wait_until_idle()
    assert (await client.call("/v1/models")).status == 200
