"""A cluster without servers: the test sets the instances' status and turns the clock."""

from __future__ import annotations

import json
from typing import Any

from parley.coordinator.config import CoordinatorOptions, parse_coordinator_config
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_scheduler import InstanceScheduler
from parley.coordinator.routing.instance_table import InstanceTable


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulated_options(*roles: str, **keys: Any) -> CoordinatorOptions:
    """Return options with instances of these roles, numbered from 1."""
    instances = [{"url": f"http://10.0.0.{k}:8000", "role": role} for k, role in enumerate(roles, 1)]
    return parse_coordinator_config({"instances": instances, **keys}, "test")


def simulated_cluster(
    *roles: str, clock: Any = None, native: bool = True, **keys: Any
) -> tuple[InstanceTable, InstanceScheduler]:
    """Return the table and the scheduler of a cluster whose instances are all ready."""
    table = InstanceTable(simulated_options(*roles, **keys), clock or ManualClock())
    for instance in table:
        report_status(table, instance, native=native)
    return table, InstanceScheduler(table)


def report_status(
    table: InstanceTable, instance: ClusterInstance, *, native: bool = True, epoch: str = "e1", **native_members: Any
) -> None:
    """Record a status answer of the instance."""
    table.record_status(
        instance,
        status_body(instance.role, epoch, **native_members) if native else {"service": {"roleStatus": "RoleReady"}},
    )


def lose_instance(table: InstanceTable, instance: ClusterInstance) -> None:
    """Let the instance miss polls until it is lost."""
    for _ in range(table.options.misses):
        table.record_miss(instance)


def status_body(role: str, epoch: str = "e1", **native_members: Any) -> dict[str, Any]:
    return {
        "service": {"roleStatus": "RoleReady", "currentRole": role},
        "resource": {},
        "parley": {"epoch": epoch, "role": role, **native_members},
    }


class FakeHttp:
    """Stands in for HTTP: answers by URL; a URL without an answer does not respond."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | Any] = {}
        self.requests: list[tuple[str, str, bytes]] = []

    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        self.requests.append((method, url, body))
        answer = self.answers.get(url)
        if callable(answer):
            answer = answer(body)
        if answer is None:
            raise Unanswered
        return answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode())
