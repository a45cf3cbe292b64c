"""A device for tests of the loop: it computes steps in order, but later than they are started, as a GPU does.

A step sees what its sequences were when it was started, and the tokens that the step before drew on the device.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque

from support.invariant_ledger import InjectedFailure, LedgerRunner, LoopHarness, require

from parley.core.run_ahead import RunAhead
from parley.core.sequence import RowResult, Sequence, StartedStep, Step, StepRow

UNKNOWN = 0  # the token that follows a row without a result


class DelayedStep:
    """A step on the device. ``step`` is what the host knows, ``rows`` and the rest a copy from when it was started."""

    def __init__(self, device: DelayedDevice, step: Step, previous: DelayedStep | None):
        self.device, self.step, self.previous = device, step, previous
        self.sequences = [row.sequence for row in step.rows]
        self.rows = [copy_row(row) for row in step.rows]
        self.fresh_pages = list(step.fresh_pages)
        self.results: list[RowResult] | None = None

    def compute(self) -> None:
        """Compute the step on the ledger, which then checks the pages that it reads and writes."""
        if self.previous is not None:
            if self.previous.results is None:
                raise InjectedFailure("the step before")
            for original, row in zip(self.sequences, self.rows, strict=True):
                if row.start == len(row.sequence.tokens):
                    place = self.previous.sequences.index(original)
                    row.sequence.tokens.append((self.previous.results[place].tokens or [UNKNOWN])[0])
        require(all(row.start + 1 == len(row.sequence.tokens) for row in self.rows), "a token is not known")
        runner, slots = self.device.runner, self.device.runner.slots
        runner.slots = {row.sequence.slot: row.sequence for row in self.rows}  # type: ignore[assignment]
        try:
            self.results = LedgerRunner.run_step(runner, Step(self.rows, self.fresh_pages))
        finally:
            runner.slots = slots
        runner.steps.pop()

    def wait(self) -> list[RowResult]:
        self.device.compute_until(self)
        if self.results is None:
            raise InjectedFailure("the device")
        rows = [(row.sequence.request_id, row.sequence.index, row.start, row.count) for row in self.step.rows]
        self.device.runner.steps.append(rows)
        return self.results


def copy_row(row: StepRow) -> StepRow:
    sequence = copy.copy(row.sequence)
    sequence.tokens, sequence.block_table = list(sequence.tokens), list(sequence.block_table)
    return StepRow(sequence, row.start, row.count, row.sample)


class DelayedDevice:
    """``core.sequence.StepStarter`` of a ``DelayedRunner``; with ``is_eager`` steps are computed when they start."""

    def __init__(self, runner: DelayedRunner, is_eager: bool):
        self.runner, self.is_eager = runner, is_eager
        self.queue: deque[DelayedStep] = deque()

    def can_follow(self, row: StepRow) -> bool:
        return row.sequence.request.logprobs < 0 and not row.sequence.request.media

    def start_step(self, step: Step, previous: StartedStep | None) -> StartedStep:
        for row in step.rows:
            require(self.runner.slots[row.sequence.slot] is row.sequence, "a row without a slot")
            require(self.can_follow(row) and row.count == 1 and row.sample, "a row that is not plain")
        assert previous is None or isinstance(previous, DelayedStep)
        started = DelayedStep(self, step, previous)
        self.queue.append(started)
        if self.is_eager:
            with contextlib.suppress(InjectedFailure):  # a device reports it when it is asked
                self.compute_until(started)
        return started

    def compute_until(self, last: DelayedStep | None) -> None:
        """Compute all steps up to ``last``, or all. After a failure the device has lost the others."""
        while self.queue and (last is None or last in self.queue):
            started = self.queue.popleft()
            try:
                started.compute()
            except InjectedFailure:
                self.queue.clear()
                raise


class DelayedRunner(LedgerRunner):
    def __init__(self, *args, is_eager: bool = False):
        super().__init__(*args)
        self.device = DelayedDevice(self, is_eager)
        self.starter = self.device

    def run_step(self, step: Step) -> list[RowResult]:
        with contextlib.suppress(InjectedFailure):  # of a step that was dropped
            self.device.compute_until(None)
        return super().run_step(step)


class DelayedHarness(LoopHarness):
    """A loop whose steps of decodes run on a ``DelayedDevice``."""

    is_eager = False

    def make_runner(self, *args) -> LedgerRunner:
        return DelayedRunner(*args, is_eager=self.is_eager)

    @property
    def run_ahead(self) -> RunAhead:
        assert self.loop.run_ahead is not None
        return self.loop.run_ahead

    def _next_due(self) -> Sequence | None:
        """A step that has been started comes first, and everything else has its turn after it."""
        return None if self.run_ahead.has_started else super()._next_due()


class EagerHarness(DelayedHarness):
    is_eager = True
