"""The HTTP client for instances: every way an answer ends, answers cut anywhere, connections closed while idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from parley.coordinator.config import Options
from parley.coordinator.proxy.connections import Connections
from parley.coordinator.proxy.http_client import Broken, Response, Unreachable, Upstream
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import Table

SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nX-A: b\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\nabc"
WARNED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


class Server:
    """Answers each request with the next of ``answers``, in pieces of ``cut`` bytes; None closes the connection."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.cut = 1 << 20
        self.connections = 0
        self.end = False  # whether to close after an answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for begin in range(0, len(answer), self.cut):
                    writer.write(answer[begin : begin + self.cut])
                    await asyncio.sleep(0)
                if self.end:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Server, Upstream]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    yield server, upstream
    upstream.close()
    listening.close()


@pytest.mark.parametrize("answer", [SIZED, CHUNKED, WARNED])
async def test_http_client_reads_answers_cut_anywhere_on_one_connection(pair, answer):
    server, upstream = pair
    for cut in range(1, len(answer) + 1, 3):
        server.cut, server.answers = cut, [answer]
        told = await upstream.ask(b"GET", b"/")
        assert (told.status, told.body) == (200, b"abc")
    assert server.connections == 1


async def test_answer_without_length_ends_with_its_connection(pair):
    server, upstream = pair
    server.answers, server.end = [ENDLESS], True
    assert (await upstream.ask(b"GET", b"/")).body == b"abc"


async def test_head_answer_has_no_body(pair):
    server, upstream = pair
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"]
    assert await upstream.ask(b"HEAD", b"/") == Response(200, [(b"content-length", b"99")], b"")


@pytest.mark.parametrize("size", range(len(SIZED)))
async def test_http_client_raises_on_a_truncated_answer(pair, size):
    server, upstream = pair
    server.answers, server.end = [SIZED[:size]], True
    with pytest.raises(Broken):
        await upstream.ask(b"GET", b"/")


async def test_closed_idle_connection_is_replaced_once(pair):
    server, upstream = pair
    server.answers = [SIZED, None, SIZED]
    await upstream.ask(b"GET", b"/")
    assert (await upstream.ask(b"GET", b"/")).body == b"abc"
    server.answers = [None]
    with pytest.raises(Broken):
        await upstream.ask(b"GET", b"/", again=False)
    server.answers = [None]
    with pytest.raises(Broken):
        await upstream.ask(b"GET", b"/")


async def test_http_client_rejects_an_answer_that_is_not_http(pair):
    server, upstream = pair
    server.answers = [b"hello\r\n\r\n"]
    with pytest.raises(Broken):
        await upstream.ask(b"GET", b"/")


async def test_http_client_reports_a_refused_connection():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    with pytest.raises(Unreachable) as raised:
        await Upstream(f"http://127.0.0.1:{port}").ask(b"GET", b"/")
    assert raised.value.refused


async def test_http_client_fails_all_pending_requests(pair):
    server, upstream = pair
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"] * 3
    asked: list[asyncio.Task[Response]] = [asyncio.create_task(upstream.ask(b"GET", b"/")) for _ in range(3)]
    while server.answers:
        await asyncio.sleep(0.001)
    upstream.fail("gone")
    for result in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(result, Broken)
    assert not upstream.busy


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".b", "例え.invalid"])
async def test_impossible_host_name_is_unreachable(name):
    with pytest.raises(Unreachable):
        await Upstream(f"http://{name}").connect()


async def test_removed_instance_leaves_no_open_connection():
    left = asyncio.Event()

    async def tell(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()
        left.set()
        writer.close()

    server = await asyncio.start_server(tell, "127.0.0.1", 0)
    place = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = Options()
    table = Table(options)
    connections = Connections(table, options, "a seat")
    connections.start()
    table.add(Instance(1, "http://127.0.0.1:9", "prefill", metrics=place))
    assert await connections.ask(f"{place}/metrics") == (200, b"ok")
    table.remove(1)
    await asyncio.wait_for(left.wait(), 10)
    await connections.stop()
    server.close()
