"""Bodies from hostile clients: bombs, bodies that arrive slowly, and more bodies than memory."""

import asyncio
import gzip

import pytest
from support.http_client import HELLO_CHAT, build_request
from support.json_bombs import compress_bomb, compressed_bombs, write_bomb
from support.loop_clock import pass_time

from parley.web import exchange, request_body
from parley.web.content_coding import decompress_body
from parley.web.request_body import BodyBudget

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


async def begin_body(server, size: int, length: int = 1 << 20):
    """Send the head of a request and ``size`` bytes of its body of ``length`` bytes."""
    connection = await server.connect()
    await connection.send(HEAD + b"content-length: %d\r\n\r\n" % length + b" " * size)
    return connection


async def test_refuses_a_body_that_decompression_enlarges_too_much(serve):
    server = await serve()
    answer = await server.call("POST", CHAT, compress_bomb(write_bomb("arrays")), {"content-encoding": "gzip"})
    assert (answer.status, "100 times" in answer.error["message"]) == (413, True)
    repetitive = gzip.compress(write_bomb("one string", 1 << 19))
    assert (await server.call("POST", CHAT, repetitive, {"content-encoding": "gzip"})).status == 200
    assert server.parts.registry.options.body_budget.held_bytes == 0


@pytest.mark.parametrize("kind", ["arrays", "nesting", "one string"])
async def test_refuses_bombs_however_they_are_compressed(serve, monkeypatch, kind):
    decoded: list[int] = []
    monkeypatch.setattr(exchange, "decompress_body", lambda *body: note_size(decoded, decompress_body(*body)))
    server = await serve(body_limit=4 << 20)
    for name, body, coding in compressed_bombs(write_bomb(kind, 6 << 20)):
        answer = await server.call("POST", CHAT, body, {"content-encoding": coding})
        assert answer.status in (400, 413), name
        assert len(answer.body) < 1000, name
    assert all(size < 2 << 20 for size in decoded)  # the outer layers of nested ones
    assert server.parts.registry.options.body_budget.held_bytes == 0


def note_size(sizes: list[int], body: bytes) -> bytes:
    sizes.append(len(body))
    return body


async def test_slow_body_is_ended_although_it_keeps_coming(serve, monkeypatch):
    monkeypatch.setattr(request_body, "RATE_WINDOW", 60)
    server = await serve(body_rate=10_000, body_timeout=3600)
    connection = await begin_body(server, 100_000)
    answer = asyncio.create_task(connection.answer())
    while not answer.done():
        await connection.send(b" ")
        await pass_time(7)
    assert (answer.result().status, "10000 bytes per second" in answer.result().error["message"]) == (408, True)
    connection.close()
    assert await server.control()


async def test_body_that_keeps_its_rate_may_take_many_windows(serve, monkeypatch):
    monkeypatch.setattr(request_body, "RATE_WINDOW", 60)
    server = await serve(body_rate=4, header_timeout=3600, body_timeout=3600)
    data = build_request("POST", CHAT, {**HELLO_CHAT, "user": "a" * 2000})
    connection = await server.connect()
    for start in range(0, len(data), 100):
        await connection.send(data[start : start + 100])
        await pass_time(10)
    assert (await connection.answer()).status == 200
    connection.close()


async def test_bodies_over_the_common_memory_are_refused_with_429(serve):
    budget = BodyBudget(1 << 20)
    server = await serve(body_budget=budget)
    unfinished = [await begin_body(server, 400_000) for _ in range(2)]
    await server.until(lambda: budget.held_bytes == 800_000)
    newcomer = await begin_body(server, 400_000)
    answer = await newcomer.answer()
    assert (answer.status, answer.error["code"], "retry-after" in answer.headers) == (429, "rate_limit_exceeded", True)
    assert await server.control()  # small bodies find room
    for connection in (newcomer, *unfinished):
        connection.close()
    await server.until(lambda: budget.held_bytes == 0)


async def test_body_that_arrives_for_long_makes_room_for_others(serve):
    budget = BodyBudget(1 << 20)
    server = await serve(body_budget=budget)
    oldest, second = await begin_body(server, 400_000), await begin_body(server, 400_000)
    await server.until(lambda: budget.held_bytes == 800_000)
    await pass_time(request_body.SLOW_SECONDS)
    newcomer = await begin_body(server, 400_000)
    answer = await oldest.answer()
    assert (answer.status, "still arriving" in answer.error["message"]) == (429, True)
    await server.until(lambda: budget.held_bytes == 800_000)
    for connection in (oldest, second, newcomer):
        connection.close()
    await server.until(lambda: budget.held_bytes == 0)


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/nowhere"])
async def test_body_memory_is_given_back_after_every_answer(serve, path):
    server = await serve()
    budget = server.parts.registry.options.body_budget
    data = build_request("POST", path, {**HELLO_CHAT, "user": "a" * 200_000})
    for _ in range(3):
        connection = await server.connect()
        await connection.send(data[:150_000])
        await asyncio.sleep(0.01)
        await connection.send(data[150_000:])
        await connection.answer()
        connection.close()
    await server.until(lambda: budget.held_bytes == 0)
