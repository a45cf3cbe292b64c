"""Detects that vLLM's processes hang although the host runs: an engine core that is stopped sends no steps.

The API process watches only the host, which continues to send heartbeats. So the host watches its descendants in the
same way (``engine/watchdog.py``): by vLLM's steps, and by the processor time of all these processes. A worker may
compile for many seconds, with compilers as child processes, while everything else waits for it. A process that waits
for a stopped one may spin for a second; so while one of them is stopped, processor time is no sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from parley.engine.watchdog import TICK_SECONDS, Watchdog, read_processor_seconds

LOSS_SECONDS = 8.0  # limit for an engine core that has lost a worker, which never continues, if there is no other limit
WORKER_DIED = "vLLM ended: one of its workers died."


class CoreWatch:
    """Watches the processes below this one. ``timeout``: seconds without a sign of life; 0: no limit.

    ``expects_steps()``: whether vLLM has choices to compute. Without any it waits, and need not show that it lives.
    ``has_lost_worker()``: whether vLLM says that a worker died. Its engine core ends then, or waits for ever if the
    worker was on another machine; so it is given ``timeout``, too.
    """

    def __init__(
        self, timeout: float, expects_steps: Callable[[], bool], has_lost_worker: Callable[[], bool] = lambda: False
    ):
        self._timeout = timeout
        self._expects_steps = expects_steps
        self._has_lost_worker = has_lost_worker
        self._signs = 0  # steps, and ticks without anything to compute
        self._seconds: dict[int, float] = {}  # processor time of each process below this one

    def note_step(self) -> None:
        """Note that vLLM has sent a step."""
        self._signs += 1

    async def wait_for_hang(self) -> str:
        """Return why vLLM counts as hung, as soon as it does."""
        watchdog, own_id, seconds, ticks_of_loss = Watchdog(self._timeout), os.getpid(), 0.0, 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            ticks_of_loss += self._has_lost_worker()
            if ticks_of_loss * TICK_SECONDS > (self._timeout or LOSS_SECONDS):
                return WORKER_DIED
            self._signs += not self._expects_steps()
            seconds += self._used_seconds(processes_below(own_id))
            if self._timeout and (hang := watchdog.explain_hang(self._signs, seconds, is_serving=True)):
                return f"The engine process hung: it {hang}, and is ended."

    def _used_seconds(self, processes: list[int]) -> float:
        """Return the processor time that these processes have used since the last call, 0 if one is stopped."""
        earlier, self._seconds = self._seconds, {process: _processor_seconds(process) for process in processes}
        if any(map(is_stopped, processes)):
            return 0.0
        return sum(max(0.0, seconds - earlier.get(process, 0.0)) for process, seconds in self._seconds.items())


def children_of(process_id: int) -> list[int]:
    """Return the children of a process."""
    core_processes: list[int] = []
    for file in Path(f"/proc/{process_id}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            core_processes += map(int, file.read_text().split())
    return core_processes


def processes_below(process_id: int) -> list[int]:
    """Return the children of a process, and theirs."""
    children = children_of(process_id)
    return children + [below for child in children for below in processes_below(child)]


def is_stopped(process_id: int) -> bool:
    """Whether a process was stopped by a signal."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text("utf-8", "replace")
    except OSError:  # it has just ended
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _processor_seconds(process_id: int) -> float:
    try:
        return read_processor_seconds(process_id)
    except OSError:  # it has just ended
        return 0.0
