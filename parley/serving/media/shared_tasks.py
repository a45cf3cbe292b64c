"""Work that several requests want at the same time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _RunningTask(Generic[T]):
    def __init__(self, task: asyncio.Task[T]):
        self.task = task
        self.waiters = 0


class SharedTasks(Generic[T]):
    """Tasks by key. A task is cancelled when no request waits for it any more."""

    def __init__(self) -> None:
        self._running: dict[Hashable, _RunningTask[T]] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def join_task(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of the task of that key, which is started unless it runs; its error is raised."""
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _RunningTask(asyncio.ensure_future(start()))
            running.task.add_done_callback(lambda task: self._forget_task(key, task))
        running.waiters += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiters -= 1
            if not running.waiters and not running.task.done():
                self._forget_task(key, running.task)
                running.task.cancel()

    def _forget_task(self, key: Hashable, task: asyncio.Task[T]) -> None:
        if (running := self._running.get(key)) is not None and running.task is task:
            del self._running[key]
        if task.done() and not task.cancelled():
            task.exception()  # asyncio warns of errors that are never retrieved
