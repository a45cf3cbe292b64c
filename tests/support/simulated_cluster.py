"""A cluster without servers: the test sets the instances' status and turns the clock."""

from __future__ import annotations

import json
from typing import Any

from parley.coordinator.config import Options, read
from parley.coordinator.routing.admission import Choice
from parley.coordinator.routing.health import Unanswered
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import Table


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def options(*roles: str, **keys: Any) -> Options:
    """Return options with instances of these roles, numbered from 1."""
    places = [{"url": f"http://10.0.0.{k}:8000", "role": role} for k, role in enumerate(roles, 1)]
    return read({"instances": places, **keys}, "test")


def cluster(*roles: str, clock: Any = None, extended: bool = True, **keys: Any) -> tuple[Table, Choice]:
    """Return the table and the scheduler of a cluster whose instances are all ready."""
    table = Table(options(*roles, **keys), clock or Clock())
    for each in table:
        up(table, each, extended=extended)
    return table, Choice(table)


def up(table: Table, instance: Instance, *, extended: bool = True, epoch: str = "e1", **own: Any) -> None:
    """Record a status answer of the instance."""
    table.status(
        instance, status(instance.role, epoch, **own) if extended else {"service": {"roleStatus": "RoleReady"}}
    )


def lose(table: Table, instance: Instance) -> None:
    """Let the instance miss polls until it is lost."""
    for _ in range(table.options.misses):
        table.missed(instance)


def status(role: str, epoch: str = "e1", **own: Any) -> dict[str, Any]:
    return {
        "service": {"roleStatus": "RoleReady", "currentRole": role},
        "resource": {},
        "parley": {"epoch": epoch, "role": role, **own},
    }


class Net:
    """Stands in for HTTP: answers by URL; a URL without an answer does not respond."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | Any] = {}
        self.asked: list[tuple[str, str, bytes]] = []

    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        self.asked.append((method, url, body))
        answer = self.answers.get(url)
        if callable(answer):
            answer = answer(body)
        if answer is None:
            raise Unanswered
        return answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode())
