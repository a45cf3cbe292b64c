"""Health checks: each instance is asked for its status once per heartbeat, and the table records the answer or its
absence. This also detects an instance that stopped without closing its connections. An instance that is late because it
is busy is not taken for lost as long as it sends anything else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from parley.coordinator import lenient
from parley.coordinator.routing.instance import Instance
from parley.coordinator.routing.instance_table import News, Table

log = logging.getLogger("parley.cluster")

REASONS = {401: "it has API keys or another secret; give both sides the same secret", 404: "it has no such route"}


class Unanswered(Exception):
    """No answer came, or none that is valid HTTP."""


class Ask(Protocol):
    """Sends an HTTP request to an instance."""

    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises Unanswered."""


class Health:
    """Runs one task per instance that is checked.

    ``last_heard``: when an instance last sent anything, by time.monotonic.
    """

    def __init__(self, table: Table, ask: Ask, heard: Callable[[Instance], float] = lambda instance: 0.0):
        self._table, self._ask, self._heard = table, ask, heard
        self._tasks: dict[int, tuple[Instance, asyncio.Task[None]]] = {}
        self._wrong: dict[int, str] = {}  # the problem last logged for each instance; empty: none
        self._lack = ""  # the problem last logged for the cluster as a whole
        self._running = False

    def start(self) -> None:
        """Check the table's instances, and follow its changes from now on."""
        self._running = True
        self._table.watchers.append(self._changed)
        for instance in self._table:
            self._changed(instance, "joined")

    async def close(self) -> None:
        """Stop all checks."""
        self._running = False
        if self._changed in self._table.watchers:
            self._table.watchers.remove(self._changed)
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, instance: Instance) -> bool:
        """Check an instance once; True if it answered with a status."""
        period = max(self._table.options.heartbeat, 0.5)
        wrong, began = "", time.monotonic()
        try:
            status, body = await self._ask(f"{instance.management}/v1/status", timeout=period)
            told = lenient.members(body) if status == 200 else None
            if told is not None:
                self._table.status(instance, told)
                self._say(instance, "")
                self._complain()
                return True
            wrong = f"its /v1/status answers {status}: {REASONS.get(status, 'it is no instance')}"
        except Unanswered as error:
            if self._heard(instance) > began:
                return False
            wrong = f"it does not answer: {error}"
        self._table.missed(instance)
        if instance.misses >= self._table.options.misses:
            self._say(instance, wrong)
        return False

    def _say(self, instance: Instance, wrong: str) -> None:
        """Log the problem of an instance when it changes."""
        if self._wrong.get(instance.id) == wrong:
            return
        self._wrong[instance.id] = wrong
        if wrong:
            log.warning("Instance %d at %s is not used, for %s", instance.id, instance.url, wrong)
        else:
            log.info("Instance %d at %s answers; its role is %s.", instance.id, instance.url, instance.role)

    def _complain(self) -> None:
        """Log why ready instances cannot serve requests, when the reason changes."""
        before, self._lack = self._lack, self._table.lack() if len(self._table.usable()) == len(self._table) else ""
        if self._lack and self._lack != before:
            log.warning("No requests are taken: %s", self._lack)

    def _changed(self, instance: Instance, news: News) -> None:
        if news == "joined" and instance.asked:
            self._tasks[instance.id] = instance, asyncio.get_running_loop().create_task(self._watch(instance))
        elif news == "left" and self._tasks.get(instance.id, (None, None))[0] is instance:
            self._tasks.pop(instance.id)[1].cancel()
            self._wrong.pop(instance.id, None)

    async def _watch(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            began = loop.time()
            await self.look(instance)
            await asyncio.sleep(max(0.0, began + self._table.options.heartbeat - loop.time()))
