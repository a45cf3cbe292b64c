"""The HTTP client for instances: every way an answer ends, answers cut anywhere, connections closed while idle."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from parley.coordinator.config import CoordinatorOptions
from parley.coordinator.proxy.upstream.connections import InstanceConnections
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceTable
from parley.web.http_client import (
    ConnectionBroken,
    HttpClientConnection,
    InstanceAnswer,
    InstanceHttpClient,
    InstanceUnreachable,
)
from parley.web.port import open_listener

SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nX-A: b\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n"
WITHOUT_LENGTH = b"HTTP/1.1 200 OK\r\n\r\nabc"
WITH_100_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


class ScriptedServer:
    """Answers each request with the next of ``answers``, in pieces of ``cut`` bytes; None closes the connection."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.cut = 1 << 20
        self.connections = 0
        self.close_after_answer = False  # whether to close after an answer

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
                if self.close_after_answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server_and_client() -> AsyncIterator[tuple[ScriptedServer, InstanceHttpClient]]:
    server = ScriptedServer()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    upstream = InstanceHttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    yield server, upstream
    upstream.close_idle()
    listening.close()


@pytest.mark.parametrize("answer", [SIZED, CHUNKED, WITH_100_CONTINUE])
async def test_http_client_reads_answers_cut_anywhere_on_one_connection(server_and_client, answer):
    server, upstream = server_and_client
    for cut in range(1, len(answer) + 1, 3):
        server.cut, server.answers = cut, [answer]
        response = await upstream.request_answer(b"GET", b"/")
        assert (response.status, response.body) == (200, b"abc")
    assert server.connections == 1


async def test_answer_without_length_ends_with_its_connection(server_and_client):
    server, upstream = server_and_client
    server.answers, server.close_after_answer = [WITHOUT_LENGTH], True
    assert (await upstream.request_answer(b"GET", b"/")).body == b"abc"


async def test_head_answer_has_no_body(server_and_client):
    server, upstream = server_and_client
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"]
    assert await upstream.request_answer(b"HEAD", b"/") == InstanceAnswer(200, [(b"content-length", b"99")], b"")


@pytest.mark.parametrize("size", range(len(SIZED)))
async def test_http_client_raises_on_a_truncated_answer(server_and_client, size):
    server, upstream = server_and_client
    server.answers, server.close_after_answer = [SIZED[:size]], True
    with pytest.raises(ConnectionBroken):
        await upstream.request_answer(b"GET", b"/")


async def test_closed_idle_connection_is_replaced_once(server_and_client):
    server, upstream = server_and_client
    server.answers = [SIZED, None, SIZED]
    await upstream.request_answer(b"GET", b"/")
    assert (await upstream.request_answer(b"GET", b"/")).body == b"abc"
    server.answers = [None]
    with pytest.raises(ConnectionBroken):
        await upstream.request_answer(b"GET", b"/", resend=False)
    server.answers = [None]
    with pytest.raises(ConnectionBroken):
        await upstream.request_answer(b"GET", b"/")


class PausingSink:
    """Pauses the connection at the first part of the body, as for a client that reads slowly."""

    def __init__(self, connection: HttpClientConnection):
        self.connection = connection
        self.ended = asyncio.Event()

    def receive_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        pass

    def receive_data(self, data: bytes) -> None:
        self.connection.set_reading_paused(self, True)

    def receive_end(self, error: ConnectionBroken | None) -> None:
        self.ended.set()


async def test_pause_ends_with_the_answer_and_does_not_delay_the_next_request(server_and_client):
    server, upstream = server_and_client
    server.answers = [SIZED, SIZED]
    connection = await upstream.open_connection()
    slow = PausingSink(connection)
    connection.send_request([b"GET / HTTP/1.1\r\n\r\n"], slow)
    await slow.ended.wait()  # the connection is back in the pool, and the slow client has not read its answer
    async with asyncio.timeout(60):
        assert (await upstream.request_answer(b"GET", b"/")).body == b"abc"
    assert server.connections == 1


async def test_sink_of_an_earlier_answer_does_not_resume_a_paused_connection(server_and_client):
    server, upstream = server_and_client
    server.answers = [SIZED]
    connection = await upstream.open_connection()
    earlier, current = PausingSink(connection), PausingSink(connection)
    connection.send_request([b"GET / HTTP/1.1\r\n\r\n"], earlier)
    await earlier.ended.wait()
    assert upstream.take_idle() is connection
    connection.send_request([b"GET / HTTP/1.1\r\n"], current)  # its answer is still to come
    connection.set_reading_paused(current, True)
    earlier.connection.set_reading_paused(earlier, False)
    assert not connection.transport.is_reading()
    connection.abort_silently(earlier)
    assert not connection.transport.is_closing()
    connection.abort_silently(current)
    assert connection.transport.is_closing()


async def test_a_request_that_is_cancelled_after_its_answer_leaves_the_connection_to_the_next_one(server_and_client):
    server, upstream = server_and_client
    server.answers = [SIZED, SIZED]

    class NextRequest(PausingSink):
        """Uses the connection as soon as it is idle, and cancels the request before, which has not seen its answer."""

        def receive_data(self, data: bytes) -> None:
            pass

    connection = await upstream.open_connection()
    upstream.return_connection(connection)
    following = NextRequest(connection)
    first = asyncio.create_task(upstream.request_answer(b"GET", b"/"))
    return_connection = upstream.return_connection

    def begin_next(idle: HttpClientConnection) -> None:
        upstream.return_connection = return_connection  # type: ignore[method-assign]
        return_connection(idle)
        loop.call_soon(send_next)

    def send_next() -> None:
        assert upstream.take_idle() is connection
        connection.send_request([b"GET / HTTP/1.1\r\n\r\n"], following)
        first.cancel()

    loop = asyncio.get_running_loop()
    upstream.return_connection = begin_next  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await first
    async with asyncio.timeout(60):
        await following.ended.wait()
    assert not connection.transport.is_closing()


async def test_http_client_rejects_an_answer_that_is_not_http(server_and_client):
    server, upstream = server_and_client
    server.answers = [b"hello\r\n\r\n"]
    with pytest.raises(ConnectionBroken):
        await upstream.request_answer(b"GET", b"/")


async def test_http_client_reports_a_refused_connection():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    with pytest.raises(InstanceUnreachable) as raised:
        await InstanceHttpClient(f"http://127.0.0.1:{port}").request_answer(b"GET", b"/")
    assert raised.value.refused


async def test_http_client_fails_all_pending_requests(server_and_client):
    server, upstream = server_and_client
    server.answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"] * 3
    calls: list[asyncio.Task[InstanceAnswer]] = [
        asyncio.create_task(upstream.request_answer(b"GET", b"/")) for _ in range(3)
    ]
    while server.answers:
        await asyncio.sleep(0.001)
    upstream.fail_all("gone")
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, ConnectionBroken)
    assert not upstream.busy_connections


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".b", "例え.invalid"])
async def test_impossible_host_name_is_unreachable(name):
    with pytest.raises(InstanceUnreachable):
        await InstanceHttpClient(f"http://{name}").open_connection()


async def test_removed_instance_leaves_no_open_connection():
    disconnected = asyncio.Event()

    async def serve_once(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()
        disconnected.set()
        writer.close()

    server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
    base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = CoordinatorOptions()
    table = InstanceTable(options)
    connections = InstanceConnections(table, options, "a seat")
    connections.start_connections()
    table.add_instance(ClusterInstance(1, "http://127.0.0.1:9", "prefill", metrics=base_url))
    assert await connections.ask_instance(f"{base_url}/metrics") == (200, b"ok")
    table.remove_instance(1)
    await asyncio.wait_for(disconnected.wait(), 60)
    await connections.close_connections()
    server.close()


def test_connections_of_a_listener_send_small_writes_at_once():
    with open_listener("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
