"""Runs batches: their requests go to the same application as those of clients, with the key of the batch's client.

So keys, limits, logs and errors are the usual ones. A tenant runs one batch at a time, all tenants together a few
batches, and all batches together send a few requests at a time; the rest waits. If other batches wait, a batch pauses
after its turn and queues for the next one, with its answers in the store. If another server can resume the batch, its
answers are stored as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from parley.dialects.batch_job import BatchAnswer, BatchEnd, BatchJob, BatchRequest
from parley.errors import NotReady, RateLimited
from parley.serving.records.background import BackgroundRunner, KeptEvents
from parley.serving.records.batch_log import Answers, BatchLog, BatchTaken, ResumeInfo
from parley.serving.records.inner_sender import InnerSender
from parley.serving.records.open_store import AnyRecordStore
from parley.web.inner_cycle import InnerCycle

T = TypeVar("T")

log = logging.getLogger("parley.server")

OPEN_BATCHES = 100  # batches of a tenant that may wait or run
RUNNING_BATCHES = 4  # batches of all tenants; the input and the results of each are in memory
REQUESTS_AT_ONCE = 16  # requests of all batches that run at a time
TURN_SECONDS = 60.0  # seconds that a batch runs while others wait
PROGRESS_SECONDS = 1.0  # seconds between two checks whether the progress has to be recorded
PROGRESS_SHARE = 0.01  # or this share of the batch's run time, if longer: so that few records have all answers
RETRY_STATUSES = (408, 429, 503, 529)  # statuses of refusals that say when to retry
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 60


def retry_seconds(cycle: InnerCycle) -> float | None:
    """Return after how many seconds a refused request may be sent again; None if it may not."""
    header = cycle.headers.get(b"retry-after", b"")
    if cycle.status not in RETRY_STATUSES or not header.isdigit():
        return None
    return min(max(int(header), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


async def _to_end_in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, and return its result. A caller that is cancelled ends after the work."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:  # an error of the work must not take its place: the caller has to end
        await asyncio.wait([task])
        error = task.exception()
        if error is not None and not isinstance(error, NotReady | BatchTaken):
            log.error("A batch that was being stopped had an error.", exc_info=error)
        raise


@dataclass
class BatchRun:
    """A batch that waits or runs. ``is_paused``: its answers so far are only in the store. ``new_answers``: those that
    are not there yet. ``survives_server``: another server can resume it."""

    tenant: str
    job: BatchJob
    sender: InnerSender
    survives_server: bool = False
    is_paused: bool = False
    answered: set[int] = field(default_factory=set)
    new_answers: Answers = field(default_factory=list)
    is_full: bool = False
    turn_end: float = 0.0  # in the time of the event loop

    def take_new_answers(self) -> Answers:
        """Return the answers that are not in the store yet. They count as stored, unless they are given back: a request
        whose answer the store loses is sent again."""
        answers, self.new_answers = self.new_answers, []
        return answers


class BatchRunner:
    """All batches of one process. ``clock``: returns seconds since the epoch. ``is_ending``: whether the server ends,
    so that requests fail for no fault of theirs."""

    def __init__(
        self,
        runs: BackgroundRunner,
        store: AnyRecordStore,
        *,
        clock: Callable[[], float] = time.time,
        is_ending: Callable[[], bool] = lambda: False,
    ):
        self.batch_log = BatchLog(store)
        self._runs, self._clock, self._is_ending = runs, clock, is_ending
        self._open_counts: Counter[str] = Counter()  # of each tenant
        self._tenant_locks: dict[str, asyncio.Lock] = {}
        self._batch_places = asyncio.Semaphore(RUNNING_BATCHES)
        self._waiting_batches = 0  # for a place
        self._request_places = asyncio.Semaphore(REQUESTS_AT_ONCE)

    def accept_batch(
        self, tenant: str, job: BatchJob, sender: InnerSender, resume_info: ResumeInfo | None = None
    ) -> bytes:
        """Let a batch run, and return the answer to its client. ``resume_info``: how another server resumes it; None:
        it cannot. Raises RateLimited, NotReady."""
        if self._open_counts[tenant] >= OPEN_BATCHES:
            raise RateLimited(f"At most {OPEN_BATCHES} batches may wait or run at a time.", retry_after=60)
        accepted = job.render_accepted()
        if resume_info is not None:
            self.batch_log.save_resume_info(tenant, job.record_name, resume_info)
        survives_server = resume_info is not None and self.batch_log.outlives_server
        self.start_batch(BatchRun(tenant, job, sender, survives_server))
        return accepted

    def start_batch(self, batch: BatchRun) -> None:
        """Let a batch run when its turn comes."""
        tenant, name = batch.tenant, batch.job.record_name
        prefixes = (batch.job.input_name, *self.batch_log.record_prefixes(name))
        work = self._run_batch(batch)
        run = self._runs.start_run(tenant, name, KeptEvents(), work, is_stream=False, touched_prefixes=prefixes)
        self._open_counts[tenant] += 1
        run.task.add_done_callback(lambda task: self._count_end(tenant))

    def runs_batch(self, tenant: str, name: str) -> bool:
        """Whether a batch waits or runs in this process. ``name``: of its record."""
        run = self._runs.find_run(tenant, name)
        return run is not None and not run.task.done()

    async def _run_batch(self, batch: BatchRun) -> None:
        end: BatchEnd = "failed"
        try:
            async with asyncio.timeout(batch.job.deadline - self._clock()):
                end = await self._run_turns(batch)
        except TimeoutError:
            end = "expired"
        except asyncio.CancelledError:
            end = "stopped"
            raise
        except NotReady:  # the store has logged it
            pass
        except BatchTaken:
            log.info("Another server has resumed the batch %s.", batch.job.record_name.rpartition("/")[2])
        except Exception:
            log.exception("A batch failed.")
        finally:
            is_left = end == "stopped" and batch.survives_server and self._runs.is_closing
            with contextlib.suppress(NotReady, BatchTaken):
                await _to_end_in_thread(partial(self._leave_batch if is_left else self._finish_batch, batch, end))

    async def _run_turns(self, batch: BatchRun) -> BatchEnd:
        """Send the requests of a batch, in one turn or several. Return how it has ended."""
        if batch.job.is_cancelled:
            return "stopped"
        is_done = False
        async with self._tenant_locks.setdefault(batch.tenant, asyncio.Lock()):
            while not is_done:
                self._waiting_batches += 1
                try:
                    await self._batch_places.acquire()
                finally:
                    self._waiting_batches -= 1
                try:
                    requests = await _to_end_in_thread(partial(self._begin_batch, batch))
                    batch.turn_end = asyncio.get_running_loop().time() + TURN_SECONDS
                    if not batch.is_full:
                        await self._send_requests(batch, requests)
                    is_done = batch.is_full or len(batch.answered) >= len(requests)
                    if not is_done:
                        await _to_end_in_thread(partial(self._pause_batch, batch))
                finally:
                    self._batch_places.release()
        return "completed"

    def _begin_batch(self, batch: BatchRun) -> Sequence[BatchRequest]:
        """Return the requests of a batch, and reload the answers of a paused one. Raises NotReady, BatchTaken."""
        self.batch_log.check_owner(batch.tenant, batch.job.record_name)
        requests = batch.job.begin(int(self._clock()))
        if batch.is_paused:
            answers = self.batch_log.load_answers(batch.tenant, batch.job.record_name)
            batch.is_paused = False
            batch.answered.clear()
            for number, answer in answers:
                if number not in batch.answered:
                    batch.answered.add(number)
                    batch.is_full = not batch.job.add_answer(number, answer) or batch.is_full
        return requests

    def _save_answers(self, batch: BatchRun, answers: Answers) -> None:
        """Store answers. Raises BatchTaken, and NotReady if they could not be stored."""
        try:
            if answers:
                self.batch_log.save_answers(batch.tenant, batch.job.record_name, answers)
        except NotReady:
            batch.new_answers[:0] = answers
            raise

    def _pause_batch(self, batch: BatchRun) -> None:
        """Move the answers from memory to the store; if the store cannot be used, they stay in memory."""
        try:
            self._save_answers(batch, batch.take_new_answers())
        except NotReady:  # the store has logged it
            return
        batch.is_paused = True
        batch.job.forget_answers()

    def _finish_batch(self, batch: BatchRun, end: BatchEnd) -> None:
        self.batch_log.check_owner(batch.tenant, batch.job.record_name)
        if not (batch.survives_server and batch.job.has_ended()):  # otherwise another server has resumed and ended it
            if batch.is_paused:
                self._begin_batch(batch)
            batch.job.finish(end, int(self._clock()))
        self.batch_log.drop_batch(batch.tenant, batch.job.record_name)

    def _leave_batch(self, batch: BatchRun, end: BatchEnd) -> None:
        """Leave a batch to the next server."""
        self.batch_log.check_owner(batch.tenant, batch.job.record_name)
        self._save_answers(batch, batch.take_new_answers())
        self.batch_log.release_batch(batch.tenant, batch.job.record_name)

    def _count_end(self, tenant: str) -> None:
        self._open_counts[tenant] -= 1
        if not self._open_counts[tenant]:
            del self._open_counts[tenant]
            self._tenant_locks.pop(tenant, None)

    async def _send_requests(self, batch: BatchRun, requests: Sequence[BatchRequest]) -> None:
        """Send the requests without an answer, and give their answers to the batch until no more fit, or its turn ends
        while others wait."""
        remaining = iter([number for number in range(len(requests)) if number not in batch.answered])

        async def send_remaining() -> None:
            for number in remaining:
                answer = await self._send_request(batch, requests[number])
                if answer is None:
                    return
                batch.answered.add(number)
                batch.new_answers.append((number, answer))
                batch.is_full = not batch.job.add_answer(number, answer) or batch.is_full
                if batch.is_full or self._has_had_turn(batch):
                    return

        try:
            async with asyncio.TaskGroup() as group:
                sender_count = min(REQUESTS_AT_ONCE, len(requests))
                await self._record_progress(batch, {group.create_task(send_remaining()) for _ in range(sender_count)})
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _has_had_turn(self, batch: BatchRun) -> bool:
        return self._waiting_batches > 0 and asyncio.get_running_loop().time() >= batch.turn_end

    async def _send_request(self, batch: BatchRun, request: BatchRequest) -> BatchAnswer | None:
        """Send a request, again after each refusal that allows a retry, and return the answer; None if the turn of its
        batch ended before that.
        """
        while True:
            async with self._request_places:
                cycle = await batch.sender.send_request(request)
            if cycle.status >= 500 and self._is_ending():
                await asyncio.Event().wait()  # until the batch is stopped
            seconds = retry_seconds(cycle)
            if seconds is None:
                status = cycle.status if cycle.response_complete else 500
                request_id = cycle.headers.get(b"x-request-id", b"").decode()
                return BatchAnswer(status, request_id, bytes(cycle.answer_body), request.custom_id)
            if self._has_had_turn(batch):
                return None
            await asyncio.sleep(seconds)

    async def _record_progress(self, batch: BatchRun, senders: set[asyncio.Task[None]]) -> None:
        """Record the progress of a batch until its senders have ended. Raises BatchTaken."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while senders:
            pause = max(PROGRESS_SECONDS, PROGRESS_SHARE * (loop.time() - begun))
            _, senders = await asyncio.wait(senders, timeout=pause)
            if senders:
                with contextlib.suppress(NotReady):  # the store has logged it, and the next one may succeed
                    batch.job.save_progress()
                    if batch.survives_server:  # else they are not needed before the next pause
                        await _to_end_in_thread(partial(self._save_answers, batch, batch.take_new_answers()))
