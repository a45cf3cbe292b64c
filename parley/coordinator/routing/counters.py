"""The coordinator's request counters. The names of their series are in ``ports.metrics``."""

from __future__ import annotations

from parley.coordinator.routing.cost_model import ewma
from parley.metrics.recorded import FIRST_TOKEN, PER_TOKEN
from parley.metrics.series import Count, Distribution

MOVED = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Tally:
    """Counters of requests and placements. ``slo_ttft``, ``slo_tpot``: objectives in seconds; None: no objective."""

    def __init__(self, slo_ttft: float | None = None, slo_tpot: float | None = None):
        self.slo_ttft, self.slo_tpot = slo_ttft, slo_tpot
        self.ttft = Distribution(own=FIRST_TOKEN)
        self.tpot = Distribution(own=PER_TOKEN)
        self.transfer = Distribution(own=MOVED)
        self.ended = Count("ok", "failed")
        self.refusals = Count()
        self.choices = Count("separate", "whole")
        self.requests = self.retries = self.good = 0
        self.input = self.output = 0.0  # mean lengths in tokens
        self.output_tokens = 0

    def asked(self, attempt: int) -> None:
        """Count a request, or a retry."""
        self.requests += attempt == 0
        self.retries += attempt > 0

    def chosen(self, separate: bool) -> None:
        """Count a placement."""
        self.choices.add(value="separate" if separate else "whole")

    def refused(self, status: int) -> None:
        """Count a refusal by its HTTP status."""
        self.refusals.add(value=str(status))

    def first(self, seconds: float) -> None:
        """Record a time to first token."""
        self.ttft.observe(seconds)

    def moved(self, seconds: float) -> None:
        """Record the time from P's token to D's first."""
        self.transfer.observe(seconds)

    def end(self, ok: bool, first: float | None, each: float | None, input: int, output: int) -> None:
        """Record the end of an attempt.

        ``ttft``: time to first token, ``token_seconds``: mean seconds per token after the second; both None if unknown.
        ``input_tokens``, ``output_tokens``: lengths.
        """
        self.ended.add(value="ok" if ok else "failed")
        if each is not None:
            self.tpot.observe(each)
        if not ok:
            return
        self.input, self.output = ewma(self.input, input), ewma(self.output, output)
        self.output_tokens += output
        soon = self.slo_ttft is None or (first is not None and first <= self.slo_ttft)
        self.good += soon and (self.slo_tpot is None or each is None or each <= self.slo_tpot)
