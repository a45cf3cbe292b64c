"""A further check of instances that could not be used when they were last checked, for requests that would otherwise be
refused: an instance that has just become ready is found without waiting for its next regular check."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from math import inf

from parley.coordinator.routing.health import HealthChecker
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceTable

PAUSE_SECONDS = 0.1  # between two rounds of checks, however many requests ask for them


class InstanceRecheck:
    """Checks the unusable instances of a table when asked to.

    ``connect_results`` tries to connect to the results of an instance, and returns when that has succeeded or failed.
    """

    def __init__(
        self,
        table: InstanceTable,
        health: HealthChecker,
        connect_results: Callable[[ClusterInstance], Awaitable[None]],
    ):
        self._table, self._health, self._connect_results = table, health, connect_results
        self._running: asyncio.Task[list[ClusterInstance]] | None = None
        self._next: asyncio.Task[list[ClusterInstance]] | None = None  # begins some time after the running one's end
        self._next_at = 0.0  # when a round may begin, by the loop's clock

    async def check_unusable(self) -> Collection[ClusterInstance]:
        """Check the instances that may have become usable, all at once, and return those that answered when the table
        knows the result. Their faults remain.

        An answer to an earlier question may be out of date. So callers that come while a round of checks runs, or in
        the pause after it, share the next one.
        """
        if self._next is None:
            if not self._table.possibly_usable_instances():
                return ()
            self._next = asyncio.get_running_loop().create_task(self._run_round(self._running))
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Stop all checks."""
        tasks = [task for task in (self._running, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_round(self, earlier_round: asyncio.Task[list[ClusterInstance]] | None) -> list[ClusterInstance]:
        if earlier_round is not None:
            await asyncio.wait((earlier_round,))
        loop = asyncio.get_running_loop()
        if (pause := self._next_at - loop.time()) > 0:
            await asyncio.sleep(pause)
        self._running, self._next = self._next, None
        instances = self._table.possibly_usable_instances()
        answers = await asyncio.gather(*(self._check_again(instance) for instance in instances))
        self._next_at = loop.time() + PAUSE_SECONDS
        return [instance for instance, has_answered in zip(instances, answers, strict=True) if has_answered]

    async def _check_again(self, instance: ClusterInstance) -> bool:
        # Many requests may ask in a short time, so the outcome says no more than the last one did.
        has_answered = await self._health.check_instance(instance, is_regular=False)
        if not instance.has_result_stream and instance.phase_at(inf) == "ready":  # but for its fault
            await self._connect_results(instance)
        return has_answered
