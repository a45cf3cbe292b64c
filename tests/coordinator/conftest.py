"""A coordinator in the test's own event loop, in front of scripted instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.coordinator_client import RunningCoordinator
from support.scripted_instance import ScriptedInstance

from parley.coordinator.config import CoordinatorOptions, InstanceConfig
from parley.coordinator.coordinator import Coordinator
from parley.web.port import open_listener

StartCluster = Callable[..., Awaitable[RunningCoordinator]]


@pytest.fixture
async def cluster() -> AsyncIterator[StartCluster]:
    """Start a coordinator in front of the given instances; other keyword arguments are its options."""
    running: list[RunningCoordinator] = []
    scripted: list[ScriptedInstance] = []

    async def start_cluster(*instances: ScriptedInstance, ready: bool = True, **keys: Any) -> RunningCoordinator:
        instance_configs = []
        for number, scripted_instance in enumerate(instances, 1):
            if not scripted_instance.port:
                await scripted_instance.start_serving()
            scripted.append(scripted_instance)
            instance_configs.append(
                InstanceConfig(
                    id=number, url=scripted_instance.url, role=scripted_instance.role, peer=scripted_instance.target
                )
            )
        for instance in instances:
            instance.peers = {other.target: other for other in instances}
        placement = {"separate": "always", "heartbeat": 0.05, "predict_port": 0} | keys
        options = CoordinatorOptions(instances=tuple(instance_configs), **placement)
        sock = open_listener("127.0.0.1", 0)
        coordinator = Coordinator(options, {"predict": ("127.0.0.1", sock)}, access_log=False)
        started = RunningCoordinator(
            coordinator, sock.getsockname()[1], asyncio.create_task(coordinator.run_until_stopped(signals=False))
        )
        running.append(started)
        if ready:
            await started.wait_until(
                lambda: all(instance.is_usable(coordinator.table.clock()) for instance in coordinator.table)
            )
        return started

    yield start_cluster
    for running_cluster in running:
        running_cluster.close_connections()
        running_cluster.coordinator.request_stop()
        await asyncio.gather(running_cluster.task, return_exceptions=True)
    for one in scripted:
        await one.kill_instance()
