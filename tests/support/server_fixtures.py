"""Fixtures that run servers with the scripted engine in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster_of_servers import Cluster
from support.http_client import INFO, Served
from support.prefill_decode_pair import CREATED, UNIQUE, Pair, join
from support.tiny_models import write_tokenizer

from parley.boot import server as start
from parley.boot.parts import Parts
from parley.coordinator.config import Options, Static
from parley.coordinator.coordinator import Coordinator
from parley.disagg.kv.peer import Peer
from parley.engine.fake import FakeEngine, echo
from parley.serving.options import ServerOptions
from parley.serving.served_model import Model
from parley.types import Settings, Work
from parley.web import exchange
from parley.web.port import listen
from parley.worker.thread import LocalEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tokenizer(path)
    return path


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(folder: Path) -> AsyncIterator[Serve]:
    """Start servers.

    Engine options are given by name. ``beside``: further models; ``surfaces``: the mounted APIs, by default all;
    ``secret``: the secret of its peer; ``settings``: load a real model with them. The rest are server options.
    """
    running: list[tuple[Served, asyncio.Task[None]]] = []

    async def begin(
        reply: Callable[[Work, int], list[int]] = echo,
        tick: float = 0.0,
        load: float = 0.0,
        failure: str | None = None,
        max_batch: int = 256,
        wait: bool = True,
        info: Any = INFO,
        names: tuple[str, ...] = ("tiny",),
        beside: Sequence[Model] = (),
        surfaces: Any = (),
        settings: Settings | None = None,
        secret: bytes = b"s",
        **options: Any,
    ) -> Served:
        engine: Any = FakeEngine(reply, info=info, max_batch=max_batch, tick=tick, load=load, failure=failure)
        if settings is None:
            settings = Settings(model=str(folder), max_batch=max_batch)
        else:
            engine = LocalEngine(settings)
        given = ServerOptions(**({"port": 0, "access_log": False} | options))
        model = Model(names, settings, engine, given)
        parts = Parts(given, [model, *beside], Peer(secret=secret))
        service = parts.service
        sock = start.listen(given.host, given.port)
        server = start.Server(start.http(given, parts.build(surfaces)))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        served = Served(parts, engine, server, sock.getsockname()[1])
        running.append((served, task))
        await served.until(lambda: server.started)
        loading = asyncio.gather(*(each.load() for each in service.models))
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        if wait:
            await loading
        return served

    yield begin
    for served, task in running:  # cancel directly: uvicorn's own shutdown sleeps
        await served.parts.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for listener in served.server.servers:
            listener.close()
        for connection in list(served.server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*served.server.server_state.tasks, return_exceptions=True)


@pytest.fixture
async def alike(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Make a pair of servers and a single server whose requests have the same id and creation time."""
    pairs: list[Pair] = []

    async def make(settings: Callable[[], Settings | None] = lambda: None, **options: Any) -> tuple[Served, Pair]:
        pairs.append(await Pair.of(serve, settings=settings, **options))
        options.pop("here", None)
        return await serve(settings=settings(), **options), pairs[-1]

    made = Model.head
    monkeypatch.setattr(Model, "head", lambda self, *given: made(self, *given[:4], CREATED))
    monkeypatch.setattr(exchange, "draw", lambda: bytes.fromhex(UNIQUE))
    yield make
    for pair in pairs:
        await pair.close()


@pytest.fixture
async def live_cluster(serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Start a cluster with these roles, whose answers have the same id and creation time as those of single servers."""
    made: list[tuple[Cluster, asyncio.Task[int]]] = []

    async def begin(*roles: str, **options: Any) -> Cluster:
        instances = [await serve(role=role, **options) for role in roles]
        members = [await join(served) for served in instances]
        places = [
            Static(id=number, url=f"http://127.0.0.1:{served.port}", role=role)
            for number, (served, role) in enumerate(zip(instances, roles, strict=True), 1)
        ]
        sock = listen("127.0.0.1", 0)
        told = Options(
            instances=tuple(places),
            separate="always",
            heartbeat=0.05,
            max_requests=1000,
            secret=options.get("cluster_secret"),
        )
        coordinator = Coordinator(told, {"predict": ("127.0.0.1", sock)}, access_log=False)
        task = asyncio.create_task(coordinator.run(signals=False))
        each = Cluster(instances, members, coordinator, sock.getsockname()[1])
        made.append((each, task))
        await each.front.until(lambda: len(coordinator.table.usable()) == len(roles))
        return each

    head = Model.head
    monkeypatch.setattr(Model, "head", lambda self, *given: head(self, *given[:4], CREATED))
    monkeypatch.setattr(exchange, "draw", lambda: bytes.fromhex(UNIQUE))
    yield begin
    for each, task in made:
        each.coordinator.stop()
        await task
        for member in each.members:
            await member.close()
