"""How connections are accepted: many at a time, and without an end because of an error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import uvloop
from support.loop_clock import pass_time

from parley.web import connection_limit, memory_trim
from parley.web import listener as listener_module
from parley.web.connection_limit import ConnectionLimit
from parley.web.http_options import HttpOptions
from parley.web.port import HttpServer, open_listener, uvicorn_config

CLIENTS = 60


async def app(scope, receive, send) -> None:
    raise AssertionError("no client sends a request")


async def listen_on(sock: socket.socket, options: HttpOptions | None = None) -> HttpServer:
    server = HttpServer(uvicorn_config(options or HttpOptions(), app))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.listen([sock])
    return server


async def end_connections(server: HttpServer) -> int:
    """End all connections of a server, and return how many it had."""
    server.stop_listening()
    connections = tuple(server.server_state.connections)
    for connection in connections:
        connection.transport.abort()  # type: ignore[union-attr]
    while server.server_state.connections:
        await asyncio.sleep(0)
    return len(connections)


@pytest.fixture(params=["TCP", "Unix"])
def waiting_clients(request: pytest.FixtureRequest, tmp_path) -> Iterator[socket.socket]:
    """A listening socket whose queue has clients."""
    unix_host = f"unix:{tmp_path}/s"
    with ExitStack() as stack:
        listener = stack.enter_context(open_listener(unix_host if request.param == "Unix" else "127.0.0.1", 0))
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket(listener.family))
            client.connect(listener.getsockname())
        yield listener


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_clients_that_wait_are_accepted_together(waiting_clients, new_loop: Callable[[], asyncio.AbstractEventLoop]):
    """An iteration of the loop may last long, if many clients send requests. One that connects needs few of them."""

    async def count_connections() -> int:
        server = await listen_on(waiting_clients)
        for _ in range(8):
            await asyncio.sleep(0)
        return await end_connections(server)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(count_connections()) == CLIENTS


async def test_clients_above_the_limit_are_accepted_one_by_one(waiting_clients):
    """Each of them closes a connection, so those of one iteration would close each other unread."""
    iterations, served_limit = 8, 10
    server = await listen_on(waiting_clients, HttpOptions(connection_limit=ConnectionLimit(served_limit)))
    (listener,) = server.servers
    for _ in range(iterations):
        await asyncio.sleep(0)
    listener.close()
    await listener.wait_closed()
    assert await end_connections(server) <= served_limit + iterations < CLIENTS


async def test_memory_returns_to_the_system_after_many_connections_have_ended(waiting_clients, monkeypatch):
    trims: list[int] = []
    trim_memory = memory_trim.trim_memory

    def count_trim() -> None:
        trims.append(1)
        trim_memory()

    monkeypatch.setattr(memory_trim, "trim_memory", count_trim)
    monkeypatch.setattr(connection_limit, "TRIM_COUNT", CLIENTS // 2)
    server = await listen_on(waiting_clients)
    for _ in range(8):
        await asyncio.sleep(0)
    assert await end_connections(server) == CLIENTS
    await pass_time(connection_limit.TRIM_DELAY)
    async with asyncio.timeout(60):
        while not trims:
            await asyncio.sleep(0.001)
    assert len(trims) == 1, "once for all connections that ended in the meantime"


async def test_a_listener_may_be_closed_twice(waiting_clients):
    server = await listen_on(waiting_clients)
    (listener,) = server.servers
    for _ in range(2):
        listener.close()
        await listener.wait_closed()


def test_accepting_goes_on_after_an_error(waiting_clients, monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "ACCEPT_RETRY_SECONDS", 0.0)
    errors = [OSError(24, "Too many open files"), ConnectionAbortedError(103, "aborted")]
    accept = socket.socket.accept

    def fail_first(sock: socket.socket):
        if errors:
            raise errors.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", fail_first)

    async def accept_all() -> None:
        server = await listen_on(waiting_clients)
        while len(server.server_state.connections) < CLIENTS:
            await asyncio.sleep(0)
        await end_connections(server)

    asyncio.run(accept_all())
    assert caplog.text.count("A connection could not be accepted") == 2
