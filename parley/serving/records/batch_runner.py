"""Runs batches: their requests go to the same application as those of clients, with the key of the batch's client.

So keys, limits, logs and errors are the usual ones. Of each tenant one batch runs at a time, of all tenants a few, and
of all batches a few requests; the rest waits, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.types import ASGIApp, Scope

from parley.dialects.batch_job import BATCH_HEADER, BatchAnswer, BatchEnd, BatchJob, BatchRequest
from parley.dialects.dialect import HeaderList
from parley.errors import NotReady, RateLimited
from parley.serving.inherited_headers import inherited_headers
from parley.serving.records.background import BackgroundRuns, KeptEvents
from parley.web.exchange import TIMEOUT_HEADER
from parley.web.inner_cycle import InnerCycle

T = TypeVar("T")

log = logging.getLogger("parley.server")

OPEN_BATCHES = 100  # of a tenant, that wait or run
RUNNING_BATCHES = 4  # of all tenants; the input and the results of each are in memory
REQUESTS_AT_ONCE = 16  # of all batches
PROGRESS_SECONDS = 1.0  # between two looks at whether the progress has to be recorded
RETRY_STATUSES = (429, 503, 529)  # of refusals that say when to retry
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 60
# Headers of one request. Those that limit its time are not meant for its batch.
OWN_HEADERS = frozenset((b"accept", b"accept-encoding", b"idempotency-key", b"x-request-id", TIMEOUT_HEADER))
SCOPE_KEYS = ("type", "asgi", "http_version", "server", "client", "scheme", "root_path", "state")


class InnerSender:
    """Sends requests to ``app``, as the client whose request has this scope. ``prefix``: before their paths."""

    def __init__(self, app: ASGIApp, scope: Scope, prefix: str):
        self._app, self._prefix = app, prefix
        kept_headers = [header for header in inherited_headers(scope["headers"]) if header[0] not in OWN_HEADERS]
        self._headers: HeaderList = (*kept_headers, (BATCH_HEADER, b"1"))
        self._scope = {name: scope[name] for name in SCOPE_KEYS if name in scope}

    async def send_request(self, request: BatchRequest) -> InnerCycle:
        """Send a request. Return the cycle with its answer."""
        path = self._prefix + request.path
        length_header = (b"content-length", b"%d" % len(request.body))
        scope = self._scope | {
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*self._headers, length_header],
        }
        cycle = InnerCycle(scope, request.body)
        await cycle.run_app(self._app)
        return cycle


def retry_seconds(cycle: InnerCycle) -> float | None:
    """Return after how many seconds a refused request may be sent again; None if it may not."""
    header = cycle.headers.get(b"retry-after", b"")
    if cycle.status not in RETRY_STATUSES or not header.isdigit():
        return None
    return min(max(int(header), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


async def _to_end_in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, and return its result. If the caller is cancelled, it goes on after the work ends."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if (error := task.exception()) is not None:
            raise error from None
        raise


class BatchRunner:
    """All batches of one process. ``clock``: returns seconds since the epoch."""

    def __init__(self, runs: BackgroundRuns, *, clock: Callable[[], float] = time.time):
        self._runs, self._clock = runs, clock
        self._open_counts: Counter[str] = Counter()  # of each tenant
        self._tenant_locks: dict[str, asyncio.Lock] = {}
        self._batch_places = asyncio.Semaphore(RUNNING_BATCHES)
        self._request_places = asyncio.Semaphore(REQUESTS_AT_ONCE)

    def accept_batch(self, tenant: str, job: BatchJob, app: ASGIApp, scope: Scope) -> bytes:
        """Let a batch run, and return the answer to its client. ``scope``: of the request that created it. Raises
        RateLimited, NotReady."""
        if self._open_counts[tenant] >= OPEN_BATCHES:
            raise RateLimited(f"At most {OPEN_BATCHES} batches may wait or run at a time.", retry_after=60)
        sender = InnerSender(app, scope, scope["path"].removesuffix(job.creation_path))
        accepted = job.render_accepted()
        work = self._run_job(tenant, job, sender)
        run = self._runs.start_run(tenant, job.record_name, KeptEvents(), work, is_stream=False)
        self._open_counts[tenant] += 1
        run.task.add_done_callback(lambda task: self._count_end(tenant))
        return accepted

    async def _run_job(self, tenant: str, job: BatchJob, sender: InnerSender) -> None:
        end: BatchEnd = "failed"
        try:
            async with asyncio.timeout(job.deadline - self._clock()):
                async with self._tenant_locks.setdefault(tenant, asyncio.Lock()), self._batch_places:
                    requests = await _to_end_in_thread(partial(job.begin, int(self._clock())))
                    await self._send_requests(job, requests, sender)
            end = "completed"
        except TimeoutError:
            end = "expired"
        except asyncio.CancelledError:
            end = "stopped"
            raise
        except NotReady:  # the store has logged it
            pass
        except Exception:
            log.exception("A batch failed.")
        finally:
            with contextlib.suppress(NotReady):
                await _to_end_in_thread(partial(job.finish, end, int(self._clock())))

    def _count_end(self, tenant: str) -> None:
        self._open_counts[tenant] -= 1
        if not self._open_counts[tenant]:
            del self._open_counts[tenant]
            self._tenant_locks.pop(tenant, None)

    async def _send_requests(self, job: BatchJob, requests: Sequence[BatchRequest], sender: InnerSender) -> None:
        """Send all requests, and give their answers to the batch until no more fit."""
        remaining = iter(enumerate(requests))
        is_full = False

        async def send_remaining() -> None:
            nonlocal is_full
            for number, request in remaining:
                answer = await self._send_request(request, sender)
                is_full = is_full or not job.add_answer(number, answer)
                if is_full:
                    return

        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._record_progress(job))
            senders = [group.create_task(send_remaining()) for _ in range(min(REQUESTS_AT_ONCE, len(requests)))]
            if senders:
                await asyncio.wait(senders)
            progress.cancel()

    async def _send_request(self, request: BatchRequest, sender: InnerSender) -> BatchAnswer:
        """Send a request until it is not put off any more, and return the answer."""
        while True:
            async with self._request_places:
                cycle = await sender.send_request(request)
            seconds = retry_seconds(cycle)
            if seconds is None:
                status = cycle.status if cycle.response_complete else 500
                return BatchAnswer(status, cycle.headers.get(b"x-request-id", b"").decode(), bytes(cycle.answer_body))
            await asyncio.sleep(seconds)

    async def _record_progress(self, job: BatchJob) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            with contextlib.suppress(NotReady):  # the store has logged it, and the next one may succeed
                job.save_progress()
