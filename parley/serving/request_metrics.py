"""Metrics and access log data of one request. All times are from ``time.perf_counter``, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from parley.dialects.dialect import Timings
from parley.metrics.recorded import Metrics
from parley.types import Reason, Request, Usage
from parley.web.logs import Note

REASONS: dict[Reason, str] = {
    "stop": "stop",
    "tool": "stop",
    "length": "length",
    "repetition": "repetition",
    "cancel": "abort",
    "error": "error",
}


class Tally:
    """Records one request: ``record_submit`` first, then the other events as they happen, then ``record_end``."""

    def __init__(self, metrics: Metrics, note: Note, arrived: float):
        self.note = note
        self._metrics = metrics
        self._arrived = arrived
        self._submitted = 0.0
        self._began = 0.0  # start of the engine's first step with the request
        self._first = 0.0
        self._last: dict[int, float] = {}  # choice -> time of its last token
        self._preempted: dict[int, int] = {}  # choice -> number of preemptions
        self._usage = Usage()
        self._skipped = 0  # tokens that arrived in the same output as the one before
        self._elsewhere = False  # another instance has counted the current outputs
        self._begun = False  # another instance has counted the prompts

    @property
    def waits(self) -> bool:
        """Whether no token has arrived yet."""
        return not self._first

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Within this context, outputs are replayed that another instance has counted."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def submit(self, request: Request, usage: Usage, *, begun: bool = False) -> None:
        """Record that the engine has the request. ``usage`` grows later. ``resumed``: another instance counted it."""
        self._submitted = time.perf_counter()
        self._usage, self._begun = usage, begun
        if begun:
            return
        metrics = self._metrics
        metrics.prepared.observe(self._submitted - self._arrived)
        metrics.prompt_length.observe(usage.prompt_tokens)
        metrics.choices.observe(request.n)
        if request.stop.max_tokens is not None:
            metrics.max_tokens.observe(request.stop.max_tokens)

    def found(self, cached: int, length: int) -> None:
        """Record that ``cached_tokens`` of a prompt's ``prompt_tokens`` tokens were in the prefix cache."""
        if self._begun:
            self._metrics.moved.add(cached)
            self._metrics.repeated.add(length - cached)
        else:
            self._metrics.cached.add(cached)

    def tokens(self, choice: int, count: int, now: float, waited: float) -> None:
        """Record new tokens of a choice. ``queue_seconds``: its wait in the engine's queue, read with the first."""
        if self._elsewhere:
            self._first, self._began = self._first or now, self._submitted
            return
        if not self._first:
            self._first = now
            self._began = self._submitted + waited
            self._metrics.waited.observe(waited)
            self._metrics.queued.observe(self._began - self._arrived)
            self._metrics.prefill.observe(now - self._began)
            self.note.first_token = now - self._arrived
            self._metrics.first_token.observe(now - self._arrived)
            self._metrics.first_tokens.append(now - self._arrived)
        self._skipped += max(0, count - 1)
        before = self._last.get(choice)
        if before is not None:
            gap = (now - before) / count
            self._metrics.between_tokens.observe(gap, count)
            self._metrics.gaps.append(gap)
        self._last[choice] = now

    def preempt(self, choice: int, times: int) -> None:
        """Record that a choice has been preempted ``times`` times so far."""
        self._preempted[choice] = times

    def end(self, reason: Reason) -> None:
        """Record that a choice has finished."""
        self.note.finish = reason
        if not self._elsewhere:
            self._metrics.finished.add(value=REASONS[reason])

    def timings(self) -> Timings:
        """Return how long each phase took until now; call it after the last token."""
        now = time.perf_counter()
        began = self._began or now
        return Timings(now - self._arrived, self._submitted - self._arrived, began - self._submitted, now - began)

    def close(self, lengths: list[int], left: int, *, failed: bool, onward: bool = False) -> None:
        """Record the end of the request.

        ``lengths``: delivered tokens of each choice. ``unfinished``: choices that never finished. ``handed_over``: the
        request continues on another instance, which counts it at its end.
        """
        if not self._submitted:
            return
        now, metrics, usage, delivered = time.perf_counter(), self._metrics, self._usage, sum(lengths)
        self.note.prompt_tokens, self.note.completion_tokens = usage.prompt_tokens, delivered
        if onward:
            self.note.finish = "onward"
            return
        if left:
            self.note.finish = "error" if failed else "abort"
            metrics.finished.add(left, self.note.finish)
        self._total(now, left > 0, failed)
        metrics.whole.observe(now - self._arrived)
        metrics.output_length.observe(delivered)
        metrics.skipped.observe(self._skipped)
        metrics.preempted.observe(sum(self._preempted.values()))
        metrics.longest_output.observe(max(lengths, default=0))
        metrics.computed_length.observe(usage.prompt_tokens - usage.cached_tokens)
        if self._first:
            metrics.inference.observe(now - self._began)
            metrics.decode.observe(now - self._first)
            if delivered > 1:
                metrics.per_token.observe((now - self._first) / (delivered - 1))

    def _total(self, now: float, lost: bool, failed: bool) -> None:
        """Add the request to the totals. ``incomplete``: some of its choices never finished."""
        totals = self._metrics.totals
        totals.last = time.time()
        if lost:
            totals.lost += now - self._arrived
            totals.failed += failed
            totals.cancelled += not failed
            return
        began = self._began or self._submitted
        totals.succeeded += 1
        totals.whole += now - self._arrived
        totals.prepared += self._submitted - self._arrived
        totals.queued += began - self._submitted
        totals.computed += now - began
