"""Starts a step of decodes before the results of the previous step are known, so that a device never waits for the
host (the field's *asynchronous scheduling*).

Without this, the device would compute nothing while the host appends the tokens of step n and schedules step n + 1. So
step n + 1 is started while n is computed: the tokens that n draws stay on the device, where n + 1 reads them. This is
done only for *plain* decodes (``StepStarter.can_follow``), and only if nothing else could get a row: whenever a waiting
request could start, the next step is scheduled as usual, after the results.

The rows of n + 1 are *assumed*: each sequence may turn out to have ended with its token of step n. ``confirm_rows``
drops the rows of those that have, after the results of n, and only then counts the tokens of the others as computed and
publishes their pages, as the scheduler does at once for a usual row. A row that is dropped has written to pages which
are free by then. The device computes steps in order, so pages that get a new owner are cleared and written afterwards.

A confirmed row whose sequence has been cancelled or preempted before the results arrive is ignored. The sequence is
recognized by the number of its preemptions, in case it runs again.

The module knows policy, and nothing of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from parley.core.scheduler import Scheduler
from parley.core.sequence import ModelRunner, RowResult, SequenceStatus, StartedStep, Step, StepRow, StepStarter


class _ConfirmedRow(NamedTuple):
    """A started row that counts: its index in ``_StepAhead.rows``, and the preemptions of its sequence by then."""

    row_index: int
    preemptions: int


@dataclass
class _StepAhead:
    """A step that has been started before the results of the one before. ``rows`` are all that were started."""

    step: Step
    started: StartedStep
    rows: list[StepRow]
    confirmed: list[_ConfirmedRow]


class RunAhead:
    """Runs the steps of a ``scheduler``'s sequences on a ``runner``, by its ``starter`` where that is possible."""

    def __init__(self, runner: ModelRunner, starter: StepStarter, scheduler: Scheduler):
        self._runner = runner
        self._starter = starter
        self._scheduler = scheduler
        self._current: _StepAhead | None = None  # the step that was taken
        self._next: _StepAhead | None = None
        self.steps_ahead = 0  # steps that were started ahead
        self._ended_at = 0.0  # when the last results came, time.perf_counter

    @property
    def has_started(self) -> bool:
        """Whether a step has been started whose results have not been asked for."""
        return self._next is not None

    def take_step(self) -> Step | None:
        """Return the step that has been started, with the rows that still count; None if there is none."""
        ahead, self._next = self._next, None
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
        self._current = ahead
        self._scheduler.begin_started_step(ahead.step)
        return ahead.step

    def started_at(self, step: Step) -> float:
        """Return when the device began with a step (time.perf_counter): now, or after the step before."""
        return perf_counter() if self._current is None or self._current.step is not step else self._ended_at

    def run_step(self, step: Step) -> list[RowResult]:
        """Compute a step, scheduled or taken, and start the one after it if that is possible. Raises if it failed."""
        current, self._current = self._current, None
        is_plain = self._is_plain(step)
        if current is None or current.step is not step:
            if not is_plain:
                return self._runner.run_step(step)
            started = self._starter.start_step(step, None)
            current = _StepAhead(step, started, step.rows, [_ConfirmedRow(index, 0) for index in range(len(step.rows))])
        next_step = self._scheduler.schedule_ahead(step) if is_plain else None
        if next_step is not None:
            started = self._starter.start_step(next_step, current.started)
            self._next = _StepAhead(next_step, started, next_step.rows, [])
            self.steps_ahead += 1
        results = current.started.wait()
        self._ended_at = perf_counter()
        if len(results) != len(current.rows):
            raise RuntimeError(f"{len(current.rows)} rows gave {len(results)} results")
        return [results[confirmed.row_index] for confirmed in current.confirmed]

    def confirm_rows(self) -> None:
        """Count the rows of the step that was started ahead whose sequences continue. Call it after the results of the
        step before have been processed."""
        if self._next is None:
            return
        for index, row in enumerate(self._next.rows):
            if row.sequence.status is SequenceStatus.RUNNING and len(row.sequence.tokens) == row.start + 1:
                self._scheduler.count_row(self._next.step, row)
                self._next.confirmed.append(_ConfirmedRow(index, row.sequence.preemptions))

    def abandon_next(self) -> None:
        """Ignore the step that was started ahead, because the one before failed."""
        self._next = None

    def _is_plain(self, step: Step) -> bool:
        """Whether each row is a decode whose token the next step can read on the device."""
        return bool(step.rows) and not step.page_copies and all(map(self._is_plain_row, step.rows))

    def _is_plain_row(self, row: StepRow) -> bool:
        request = row.sequence.request
        is_decode = row.count == 1 and row.sample and not row.drafts and row.score_from is None and not row.make_vector
        return is_decode and request.beam is None and not request.lease and self._starter.can_follow(row)
