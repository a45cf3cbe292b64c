"""A whole server process with the scripted engine, in the test's own event loop: its ports, signals and watchers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.http_client import MODEL_INFO

from parley.boot import engine_factories, server
from parley.boot.listening_places import listening_places
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.server_options import OfferedModel, ServerOptions
from parley.types import ParleySettings
from parley.web.port import open_listener
from parley.web.tls.contexts import server_tls_context


@contextlib.asynccontextmanager
async def run_instance(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: ServerOptions,
    read_options: Callable[[], ServerOptions] | None = None,
    tick: float = 0.001,
) -> AsyncIterator[tuple[server.ServerProcess, int]]:
    """Run a server of the model ``tiny`` until the end of the block. Yield it and its first port.

    ``read_options``: called by SIGHUP and when a watched file has changed. ``tick``: seconds of an engine's step.
    """
    monkeypatch.setitem(
        engine_factories.ENGINE_FACTORIES,
        "scripted",
        lambda settings, name: ScriptedEngine(info=MODEL_INFO, step_seconds=tick),
    )
    places = listening_places(options)
    sockets = [open_listener(place.host, place.port) for place in places]
    contexts = [server_tls_context(place.tls, http2=True) if place.tls else None for place in places]
    offers = [OfferedModel(("tiny",), ParleySettings(model=str(folder)), "scripted")]
    instance = server.ServerProcess(offers, options, sockets, contexts, read_options)
    running = asyncio.create_task(instance.serve_until_exit())
    while instance.registry.unready_error():
        await asyncio.sleep(0.01)
    try:
        yield instance, sockets[0].getsockname()[1]
    finally:
        instance.request_stop()
        assert await running == 0
