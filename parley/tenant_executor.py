"""Threads that do the slow work of several tenants, by turns: one that floods them delays no other.

Each tenant has a queue. A free thread takes the next work of the tenant that has used the least time, and one
tenant gets all threads but one at most. So with two threads, the first work of a tenant starts at once, unless two
others have work. Work without a tenant ("") may use all threads. Knows nothing of the work itself.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class TenantExecutor:
    """``threads`` threads, started when they are first needed. ``clock`` returns seconds."""

    def __init__(self, threads: int, name: str, clock: Callable[[], float] = time.perf_counter):
        self._thread_limit, self._name, self._clock = threads, name, clock
        self._changed = threading.Condition()
        self._lines: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # by tenant; none is empty
        self._seconds_used: dict[str, float] = {}  # seconds used by tenants that wait or work
        self._virtual_time = 0.0  # seconds used by the last tenant whose turn it was, at that time
        self._working: Counter[str] = Counter()  # threads by the tenant that they work for
        self._thread_count = 0
        self._closed = False

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Queue work of a tenant. Cancelling the future takes it out of the line, unless it has begun."""
        future: Future[T] = Future()
        with self._changed:
            if tenant not in self._lines and not self._working[tenant]:
                self._seconds_used[tenant] = max(self._seconds_used.get(tenant, 0.0), self._virtual_time)
            self._lines.setdefault(tenant, deque()).append((future, work))
            if self._thread_count < self._thread_limit:
                self._thread_count += 1
                threading.Thread(target=self._run_thread, name=self._name, daemon=True).start()
            self._changed.notify()
        return future

    def shutdown(self) -> None:
        """Cancel the work that waits, and end the threads."""
        with self._changed:
            self._closed = True
            for line in self._lines.values():
                for future, _ in line:
                    future.cancel()
            self._lines.clear()
            self._changed.notify_all()

    def _run_thread(self) -> None:
        while (turn := self._wait_for_turn()) is not None:
            tenant, future, work = turn
            began = self._clock()
            try:
                if future.set_running_or_notify_cancel():
                    _run_work(future, work)
            finally:
                self._end_turn(tenant, self._clock() - began)
            del turn, future, work  # nothing of it is kept while the thread waits

    def _wait_for_turn(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        """Wait for work and return it, with its tenant; None at the end."""
        with self._changed:
            while (tenant := self._next_tenant()) is None:
                if self._closed:
                    return None
                self._changed.wait()
            line = self._lines[tenant]
            future, work = line.popleft()
            if not line:
                del self._lines[tenant]
            self._working[tenant] += 1
            self._virtual_time = max(self._virtual_time, self._seconds_used[tenant])
            return tenant, future, work

    def _next_tenant(self) -> str | None:
        """Return the waiting tenant below its limit that has used the least time; None if there is none."""
        share = max(1, self._thread_limit - 1)
        waiting = [tenant for tenant in self._lines if not tenant or self._working[tenant] < share]
        return min(waiting, key=self._seconds_used.__getitem__, default=None)

    def _end_turn(self, tenant: str, seconds: float) -> None:
        with self._changed:
            self._working[tenant] -= 1
            self._seconds_used[tenant] += seconds
            if not self._working[tenant]:
                del self._working[tenant]
                if tenant not in self._lines and self._seconds_used[tenant] <= self._virtual_time:
                    del self._seconds_used[tenant]
            self._changed.notify_all()


def _run_work(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
