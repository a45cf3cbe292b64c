"""Looking after instances: each is asked for its status once a heartbeat, and the table is told what it said or that it
said nothing. An instance that is stopped without its connections being closed is noticed in the same way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

import msgspec

from parley.cluster.table import Instance, News, Table


class Unanswered(Exception):
    """No answer came, or none that is HTTP."""


class Ask(Protocol):
    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """Status and body of an answer. Raises Unanswered."""


class Health:
    """One task for each instance that is to be asked."""

    def __init__(self, table: Table, ask: Ask):
        self._table, self._ask = table, ask
        self._tasks: dict[int, tuple[Instance, asyncio.Task[None]]] = {}
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
        with contextlib.suppress(Unanswered):
            status, body = await self._ask(f"{instance.management}/v1/status", timeout=period)
            said = _object(body) if status == 200 else None
            if said is not None:
                self._table.status(instance, said)
                return True
        self._table.missed(instance)
        return False

    def _changed(self, instance: Instance, news: News) -> None:
        if news == "joined" and instance.asked:
            self._tasks[instance.id] = instance, asyncio.get_running_loop().create_task(self._watch(instance))
        elif news == "left" and self._tasks.get(instance.id, (None, None))[0] is instance:
            self._tasks.pop(instance.id)[1].cancel()

    async def _watch(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            began = loop.time()
            await self.look(instance)
            options = self._table.options
            silent = self._table.clock() - instance.answered
            if instance.lost and instance.found == "controller" and silent > options.vanish_seconds:
                self._table.remove(instance.id)
                return
            await asyncio.sleep(max(0.0, began + options.heartbeat - loop.time()))


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) else None
