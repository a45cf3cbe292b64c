"""A coordinator in the test's own event loop, in front of scripted instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.coordinator_client import Running
from support.scripted_instance import Scripted

from parley.coordinator.config import Options, Static
from parley.coordinator.coordinator import Coordinator
from parley.web.port import listen

Cluster = Callable[..., Awaitable[Running]]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Start a coordinator in front of the given instances; other keyword arguments are its options."""
    running: list[Running] = []
    scripted: list[Scripted] = []

    async def begin(*instances: Scripted, ready: bool = True, **given: Any) -> Running:
        places = []
        for number, each in enumerate(instances, 1):
            if not each.port:
                await each.start()
            scripted.append(each)
            places.append(Static(id=number, url=each.url, role=each.role, peer=each.target))
        for each in instances:
            each.peers = {other.target: other for other in instances}
        chosen = {"separate": "always", "heartbeat": 0.05, "predict_port": 0} | given
        options = Options(instances=tuple(places), **chosen)
        sock = listen("127.0.0.1", 0)
        coordinator = Coordinator(options, {"predict": ("127.0.0.1", sock)}, access_log=False)
        made = Running(coordinator, sock.getsockname()[1], asyncio.create_task(coordinator.run(signals=False)))
        running.append(made)
        if ready:
            await made.until(lambda: all(each.usable(coordinator.table.clock()) for each in coordinator.table))
        return made

    yield begin
    for each in running:
        each.coordinator.stop()
        await asyncio.gather(each.task, return_exceptions=True)
    for one in scripted:
        await one.stop()
