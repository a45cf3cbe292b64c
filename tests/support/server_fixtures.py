"""Fixtures that run servers with the scripted engine in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster_of_servers import Cluster
from support.http_client import MODEL_INFO, RunningServer
from support.prefill_decode_pair import CREATED, REQUEST_UUID, ServerPair, join_cluster
from support.tiny_models import write_tokenizer

from parley.boot.server_parts import ServerParts
from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.coordinator import Coordinator
from parley.dialects.reasoning_seal import ReasoningSeal
from parley.disagg.kv.peer import KVPeer
from parley.engine.scripted_engine import ScriptedEngine, echo_prompt
from parley.serving import model_facts, model_registry, served_model
from parley.serving.media.workers import MediaWorkerPool
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import AttachedSettings, EngineRequest, EngineSettings, ParleySettings
from parley.web import exchange
from parley.web import port as http_port
from parley.web.port import open_listener
from parley.worker.attached.attached_engine import AttachedEngine
from parley.worker.thread_engine import ThreadEngine

NO_CLIENT_KEYS: Mapping[str, Any] = {}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tokenizer(path)
    return path


class SharedMediaWorkers(MediaWorkerPool):
    """Media processes that survive their server: each imports Transformers when it starts, which takes seconds."""

    def close(self) -> None:
        """Leave the processes to the next server."""

    def close_shared(self) -> None:
        """End the processes."""
        super().close()


@pytest.fixture(scope="session")
def share_media_workers() -> Iterator[Callable[[str, int], MediaWorkerPool]]:
    """Return the media workers of a model folder, the same for all tests; those of the last three folders are kept."""
    shared_workers: dict[tuple[str, int], SharedMediaWorkers] = {}

    def find_workers(model_folder: str, count: int = 1, command: list[str] | None = None) -> MediaWorkerPool:
        assert command is None, "an engine with media processes of its own"
        key = (model_folder, count)
        shared_workers[key] = shared_workers.pop(key, None) or SharedMediaWorkers(model_folder, count)
        if len(shared_workers) > 3:
            shared_workers.pop(next(iter(shared_workers))).close_shared()
        return shared_workers[key]

    yield find_workers
    for workers in shared_workers.values():
        workers.close_shared()


Serve = Callable[..., Awaitable[RunningServer]]


@pytest.fixture
async def serve(
    folder: Path, share_media_workers: Callable[[str, int], MediaWorkerPool], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Serve]:
    """Start servers.

    Engine options are given by name. ``beside``: further models; ``surfaces``: the mounted APIs, by default all;
    ``secret``: the secret of its peer; ``settings``: load a real model with them; ``attached``: compute with the server
    at this address. The rest are server options.
    """
    running: list[tuple[RunningServer, asyncio.Task[None]]] = []
    monkeypatch.setattr(served_model, "MediaWorkerPool", share_media_workers)

    async def start_server(
        reply: Callable[[EngineRequest, int], list[int]] = echo_prompt,
        tick: float = 0.0,
        load: float = 0.0,
        failure: str | None = None,
        max_batch: int = 256,
        wait: bool = True,
        info: Any = MODEL_INFO,
        names: tuple[str, ...] = ("tiny",),
        beside: Sequence[ServedModel] = (),
        surfaces: Any = (),
        settings: ParleySettings | None = None,
        secret: bytes = b"s",
        attached: str = "",
        **options: Any,
    ) -> RunningServer:
        engine: Any = ScriptedEngine(
            reply, info=info, max_batch=max_batch, step_seconds=tick, load_seconds=load, load_failure=failure
        )
        engine_settings: EngineSettings = settings or ParleySettings(model=str(folder), max_batch=max_batch)
        if attached:
            engine_settings = AttachedSettings(model=engine_settings.model, max_batch=max_batch, url=attached)
            engine = AttachedEngine(engine_settings, name=names[0])
        elif settings is not None:
            engine = ThreadEngine(settings)
        server_options = ServerOptions(**({"port": 0, "access_log": False} | options))
        model = ServedModel(names, engine_settings, engine, server_options)
        parts = ServerParts(server_options, [model, *beside], KVPeer(secret=secret))
        service = parts.registry
        sock = http_port.open_listener(server_options.host, server_options.port)
        server = http_port.HttpServer(http_port.uvicorn_config(server_options, parts.build_app(surfaces)))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        running_server = RunningServer(parts, engine, server, sock.getsockname()[1])
        running.append((running_server, task))
        await running_server.until(lambda: server.started)
        loading = asyncio.gather(*(model.load_engine() for model in service.models))
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        if wait:
            await loading
        return running_server

    yield start_server
    for running_server, task in running:  # cancel directly: uvicorn's own shutdown sleeps
        await running_server.parts.registry.close_models()
        await running_server.parts.close_parts()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        running_server.close_connections()
        for listener in running_server.server.servers:
            listener.close()
        for connection in list(running_server.server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*running_server.server.server_state.tasks, return_exceptions=True)


def fix_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all requests the same id and creation time, and all servers the same key for seals."""
    make_context = model_facts.model_request_context
    monkeypatch.setattr(
        model_facts,
        "model_request_context",
        lambda *arguments, **options: make_context(*arguments, **{**options, "created": CREATED}),
    )
    monkeypatch.setattr(exchange, "draw_id", lambda: bytes.fromhex(REQUEST_UUID))
    monkeypatch.setattr(model_registry, "ReasoningSeal", lambda secret: ReasoningSeal(secret or "one for all"))


@pytest.fixture
async def alike(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Make a pair of servers and a single server whose requests have the same id and creation time."""
    pairs: list[ServerPair] = []

    async def make_pair(
        settings: Callable[[], ParleySettings | None] = lambda: None, **options: Any
    ) -> tuple[RunningServer, ServerPair]:
        pairs.append(await ServerPair.of(serve, settings=settings, **options))
        options.pop("here", None)
        return await serve(settings=settings(), **options), pairs[-1]

    fix_identities(monkeypatch)
    yield make_pair
    for pair in pairs:
        await pair.close()


@pytest.fixture
async def live_cluster(serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Start a cluster with these roles, whose answers have the same id and creation time as those of single servers.

    ``settings`` returns the settings of an instance that loads a real model; ``instance_options`` has
    further options of each instance, where they differ; ``separate``, ``strict``, ``memory_limit``, ``max_running`` and
    ``client_keys`` are options of the coordinator; the rest are options of ``serve``.
    """
    running: list[tuple[Cluster, asyncio.Task[int]]] = []

    async def start_cluster(
        *roles: str,
        separate: str = "always",
        strict: bool = False,
        memory_limit: int = CoordinatorOptions.memory_limit,
        settings: Callable[[], ParleySettings | None] = lambda: None,
        client_keys: Mapping[str, Any] = NO_CLIENT_KEYS,
        max_running: int = CoordinatorOptions.single_node_max_requests,
        instance_options: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Cluster:
        own_options = instance_options or [{}] * len(roles)
        instances = [
            await serve(role=role, settings=settings(), **options, **own)
            for role, own in zip(roles, own_options, strict=True)
        ]
        members = [await join_cluster(running_server) for running_server in instances]
        static_instances = [
            InstanceConfig(id=number, url=f"http://127.0.0.1:{running_server.port}", role=role)
            for number, (running_server, role) in enumerate(zip(instances, roles, strict=True), 1)
        ]
        sock = open_listener("127.0.0.1", 0)
        coordinator_options = CoordinatorOptions(
            instances=tuple(static_instances),
            separate=separate,
            strict=strict,
            memory_limit=memory_limit,
            single_node_max_requests=max_running,
            heartbeat=0.05,
            max_requests=1000,
            secret=options.get("cluster_secret", ""),
            **client_keys,
        )
        coordinator = Coordinator(coordinator_options, {"predict": ("127.0.0.1", sock)}, access_log=False)
        task = asyncio.create_task(coordinator.run_until_stopped(signals=False))
        cluster = Cluster(instances, members, coordinator, sock.getsockname()[1])
        running.append((cluster, task))
        await cluster.front.until(lambda: len(coordinator.table.usable_instances()) == len(roles))
        return cluster

    fix_identities(monkeypatch)
    yield start_cluster
    for cluster, task in running:
        cluster.front.close_connections()
        cluster.coordinator.request_stop()
        await task
        for member in cluster.members:
            await member.close_member()
