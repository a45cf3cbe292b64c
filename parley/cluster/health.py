"""Looking after instances: each is asked for its status once a heartbeat, and the table is told what it said or that it
said nothing. An instance that is stopped without its connections being closed is noticed in the same way; one that is
late because it has much to do is not taken for it, as long as it sends anything else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from parley.cluster import lenient
from parley.cluster.instance import Instance
from parley.cluster.table import News, Table

log = logging.getLogger("parley.cluster")

REASONS = {401: "it has API keys or another secret; give both sides the same secret", 404: "it has no such route"}


class Unanswered(Exception):
    """No answer came, or none that is HTTP."""


class Ask(Protocol):
    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """Status and body of an answer. Raises Unanswered."""


class Health:
    """One task for each instance that is to be asked. ``heard``: when anything came of it last, by time.monotonic."""

    def __init__(self, table: Table, ask: Ask, heard: Callable[[Instance], float] = lambda instance: 0.0):
        self._table, self._ask, self._heard = table, ask, heard
        self._tasks: dict[int, tuple[Instance, asyncio.Task[None]]] = {}
        self._wrong: dict[int, str] = {}  # what is wrong with instances, as it was said last; empty if nothing
        self._lack = ""  # of all together
        self._running = False

    def start(self) -> None:
        self._running = True
        self._table.watchers.append(self._changed)
        for instance in self._table:
            self._changed(instance, "joined")

    async def close(self) -> None:
        self._running = False
        if self._changed in self._table.watchers:
            self._table.watchers.remove(self._changed)
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self, instance: Instance) -> bool:
        """Ask once. Did it answer?"""
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
        """Log what is wrong with it when that is news."""
        if self._wrong.get(instance.id) == wrong:
            return
        self._wrong[instance.id] = wrong
        if wrong:
            log.warning("Instance %d at %s is not used, for %s", instance.id, instance.url, wrong)
        else:
            log.info("Instance %d at %s answers; its role is %s.", instance.id, instance.url, instance.role)

    def _complain(self) -> None:
        """Log why instances that are ready are of no use, when that is news."""
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
