"""Starts a step of decodes before the results of the previous step are known, so that a device never waits for the
host (*asynchronous scheduling*).

Without this, the device would compute nothing while the host appends the tokens of step n and schedules step n + 1. So
step n + 1 is started while n is computed: the tokens that n draws stay on the device, where n + 1 reads them. This is
done only for *plain* decodes (``StepStarter.can_follow``), and only if nothing else could get a row: whenever a waiting
request could start, the next step is scheduled as usual, after the results.

The rows of n + 1 are *assumed*: each sequence may turn out to have ended with its token of step n. ``confirm_rows``
drops the rows of those that have, after the results of n, and only then counts the tokens of the others as computed and
publishes their pages, as the scheduler does at once for a usual row. A row that is dropped has written to pages which
are free by then. The device computes steps in order, so pages that get a new owner are cleared and written afterwards.

The result of a confirmed row is ignored if its sequence was cancelled or preempted before the result arrived. If the
sequence runs again by then, its number of preemptions has changed.

This module decides which steps are started, and knows nothing of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from parley.core.scheduler import Scheduler
from parley.core.sequence import ModelRunner, RowResult, SequenceStatus, StartedStep, Step, StepRow, StepStarter


class _ConfirmedRow(NamedTuple):
    """A started row whose result is used: its index in ``_StepAhead.rows``, and how often its sequence had been
    preempted when it was confirmed."""

    row_index: int
    preemptions: int


@dataclass
class _StepAhead:
    """A started step. ``rows``: all that were started; ``step.rows`` may have fewer. ``handle``: gives the results."""

    step: Step
    handle: StartedStep
    rows: list[StepRow]
    confirmed: list[_ConfirmedRow]


class RunAhead:
    """Runs the steps of a ``scheduler``'s sequences on a ``runner``, by its ``starter`` where that is possible."""

    def __init__(self, runner: ModelRunner, starter: StepStarter, scheduler: Scheduler):
        self._runner = runner
        self._starter = starter
        self._scheduler = scheduler
        self._taken_step: _StepAhead | None = None  # the step that ``take_step`` returned, until it is run
        self._next_step: _StepAhead | None = None  # a step that was started and not taken
        self.steps_ahead = 0  # steps that were started ahead
        self._ended_at = 0.0  # when the last results came, time.perf_counter

    @property
    def has_started(self) -> bool:
        """Whether a step was started ahead and has not been taken."""
        return self._next_step is not None

    def take_step(self) -> Step | None:
        """Return the step that was started ahead, with the confirmed rows whose sequences still run; None if there is
        none."""
        ahead, self._next_step = self._next_step, None
        if ahead is None:
            return None
        ahead.confirmed = [
            confirmed
            for confirmed in ahead.confirmed
            if (sequence := ahead.rows[confirmed.row_index].sequence).status is SequenceStatus.RUNNING
            and sequence.preemptions == confirmed.preemptions
        ]
        ahead.step.rows = [ahead.rows[confirmed.row_index] for confirmed in ahead.confirmed]
        if not ahead.step.rows:
            return None
        self._taken_step = ahead
        self._scheduler.begin_started_step(ahead.step)
        return ahead.step

    def started_at(self, step: Step) -> float:
        """Return when the device started to compute a step (time.perf_counter): now, or at the end of the step before
        if it was started ahead."""
        return perf_counter() if self._taken_step is None or self._taken_step.step is not step else self._ended_at

    def run_step(self, step: Step) -> list[RowResult]:
        """Compute a step that was scheduled or returned by ``take_step``, and start the next one if possible. Returns a
        result for each row; raises any exception of the runner."""
        current, self._taken_step = self._taken_step, None
        is_plain = self._is_plain(step)
        if current is None or current.step is not step:
            if not is_plain:
                return self._runner.run_step(step)
            handle = self._starter.start_step(step, None)
            current = _StepAhead(step, handle, step.rows, [_ConfirmedRow(index, 0) for index in range(len(step.rows))])
        next_step = self._scheduler.schedule_ahead(step) if is_plain else None
        if next_step is not None:
            handle = self._starter.start_step(next_step, current.handle)
            self._next_step = _StepAhead(next_step, handle, next_step.rows, [])
            self.steps_ahead += 1
        results = current.handle.wait()
        self._ended_at = perf_counter()
        if len(results) != len(current.rows):
            raise RuntimeError(f"{len(current.rows)} rows gave {len(results)} results")
        return [results[confirmed.row_index] for confirmed in current.confirmed]

    def confirm_rows(self) -> None:
        """Confirm the rows of the step that was started ahead whose sequences continue, and count their tokens as
        computed. Call it after the results of the step before have been processed."""
        if self._next_step is None:
            return
        for index, row in enumerate(self._next_step.rows):
            if row.sequence.status is SequenceStatus.RUNNING and len(row.sequence.tokens) == row.start + 1:
                self._scheduler.mark_row_computed(self._next_step.step, row)
                self._next_step.confirmed.append(_ConfirmedRow(index, row.sequence.preemptions))

    def abandon_next(self) -> None:
        """Ignore the step that was started ahead, because the one before failed."""
        self._next_step = None

    def _is_plain(self, step: Step) -> bool:
        """Whether each row is a decode whose token the next step can read on the device."""
        return bool(step.rows) and not step.page_copies and all(map(self._is_plain_row, step.rows))

    def _is_plain_row(self, row: StepRow) -> bool:
        request = row.sequence.request
        is_decode = row.count == 1 and row.sample and not row.drafts and row.score_from is None and not row.make_vector
        return is_decode and request.beam is None and not request.lease and self._starter.can_follow(row)
