"""Health checks: each instance is asked for its status once per heartbeat, and the table records the answer or its
absence. This also detects an instance that stopped without closing its connections. An instance that is late because it
is busy is not taken for lost as long as it sends anything else."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from parley.coordinator import tolerant_json
from parley.coordinator.routing.instance import ClusterInstance
from parley.coordinator.routing.instance_table import InstanceEvent, InstanceTable
from parley.dialects.mounts import INSTANCE_PLANE

log = logging.getLogger("parley.cluster")

RECHECK_TIMEOUT = 1.0  # seconds that a check may take for which requests wait

STATUS_HINTS = {401: "it has API keys or another secret; give both sides the same secret", 404: "it has no such route"}


class Unanswered(Exception):
    """No answer came, or none that is valid HTTP. ``responded``: the machine at least ended or refused the
    connection."""

    def __init__(self, message: str = "", *, responded: bool = False):
        super().__init__(message)
        self.responded = responded


class AskInstance(Protocol):
    """Sends an HTTP request to an instance."""

    async def __call__(
        self, url: str, method: str = "GET", body: bytes = b"", timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises Unanswered."""


class HealthChecker:
    """Runs one task per instance that is checked.

    ``last_heard``: when an instance last sent anything, by time.monotonic.
    """

    def __init__(
        self,
        table: InstanceTable,
        ask_instance: AskInstance,
        last_heard: Callable[[ClusterInstance], float] = lambda instance: 0.0,
    ):
        self._table, self._ask_instance, self._last_heard = table, ask_instance, last_heard
        self._tasks: dict[int, tuple[ClusterInstance, asyncio.Task[None]]] = {}
        self._logged_problems: dict[int, str] = {}  # the problem last logged for each instance; empty: none
        self._logged_lack = ""  # the problem last logged for the cluster as a whole
        self._running = False

    def start_checks(self) -> None:
        """Check the table's instances, and follow its changes from now on."""
        self._running = True
        self._table.watchers.append(self._instance_changed)
        for instance in self._table:
            self._instance_changed(instance, "joined")

    async def stop_checks(self) -> None:
        """Stop all checks."""
        self._running = False
        if self._instance_changed in self._table.watchers:
            self._table.watchers.remove(self._instance_changed)
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check_instance(self, instance: ClusterInstance, *, is_regular: bool = True) -> bool:
        """Check an instance once; True if it answered with a status, or that it is about to stop.

        ``is_regular``: otherwise, it is neither closer to being lost if it does not answer, nor to the end of a fault
        if it does. If the outcome of a check that began later is known, that one counts. Nothing changes if the
        instance has left.
        """
        period = max(self._table.options.heartbeat, 0.5)
        problem, began = "", time.monotonic()
        try:
            status, body = await self._ask_instance(
                f"{instance.management}/v1/status", timeout=period if is_regular else min(period, RECHECK_TIMEOUT)
            )
            if self._table.get_instance(instance.id) is not instance:
                return False
            if began < instance.checked_at:
                return instance.answers_checks
            instance.checked_at, instance.responds, instance.answers_checks = began, True, False
            status_body = tolerant_json.parse_object(body) if status == 200 else None
            if status_body is not None:
                self._table.record_status(instance, status_body, is_regular=is_regular)
                self._log_problem(instance, "")
                self._log_cluster_problem()
                instance.answers_checks = True
                return True
            if (status, body) == (INSTANCE_PLANE.stopping_answer.status, INSTANCE_PLANE.stopping_answer.body):
                self._table.record_stopping(instance, is_regular=is_regular)
                instance.answers_checks = True
                return True
            problem = f"its /v1/status answers {status}: {STATUS_HINTS.get(status, 'it is no instance')}"
        except Unanswered as error:
            if began < instance.checked_at:
                return instance.answers_checks
            if self._last_heard(instance) > began:
                return False
            instance.checked_at, instance.responds, instance.answers_checks = began, error.responded, False
            problem = f"it does not answer: {error}"
        if not is_regular:
            return False
        self._table.record_miss(instance)
        if instance.missed_checks >= self._table.options.misses:
            self._log_problem(instance, problem)
        return False

    def _log_problem(self, instance: ClusterInstance, problem: str) -> None:
        """Log the problem of an instance when it changes."""
        if self._logged_problems.get(instance.id) == problem:
            return
        self._logged_problems[instance.id] = problem
        if problem:
            log.warning("Instance %d at %s is not used, for %s", instance.id, instance.url, problem)
        else:
            log.info("Instance %d at %s answers; its role is %s.", instance.id, instance.url, instance.role)

    def _log_cluster_problem(self) -> None:
        """Log why ready instances cannot serve requests, when the reason changes."""
        earlier_lack = self._logged_lack
        self._logged_lack = (
            self._table.explain_lack() if len(self._table.usable_instances()) == len(self._table) else ""
        )
        if self._logged_lack and self._logged_lack != earlier_lack:
            log.warning("No requests are taken: %s", self._logged_lack)

    def _instance_changed(self, instance: ClusterInstance, event: InstanceEvent) -> None:
        if event == "joined" and instance.polled:
            self._tasks[instance.id] = instance, asyncio.get_running_loop().create_task(self._check_loop(instance))
        elif event == "left" and self._tasks.get(instance.id, (None, None))[0] is instance:
            self._tasks.pop(instance.id)[1].cancel()
            self._logged_problems.pop(instance.id, None)

    async def _check_loop(self, instance: ClusterInstance) -> None:
        loop = asyncio.get_running_loop()
        while self._running:
            began = loop.time()
            await self.check_instance(instance)
            await asyncio.sleep(max(0.0, began + self._table.options.heartbeat - loop.time()))
