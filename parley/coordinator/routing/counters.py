"""The coordinator's request counters. The names of their series are in ``ports.metrics``."""

from __future__ import annotations

from typing import Literal, get_args

from parley.coordinator.routing.cost_model import moving_average
from parley.metrics.series import TPOT_BOUNDS, TTFT_BOUNDS, BucketHistogram, LabelledCounter

AttemptEnd = Literal["ok", "failed", "cancelled"]  # cancelled: its client has left

TRANSFER_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class RequestCounters:
    """Counters of requests and placements. ``slo_ttft``, ``slo_tpot``: objectives in seconds; None: no objective."""

    def __init__(self, slo_ttft: float | None = None, slo_tpot: float | None = None):
        self.slo_ttft, self.slo_tpot = slo_ttft, slo_tpot
        self.ttft = BucketHistogram(own=TTFT_BOUNDS)
        self.tpot = BucketHistogram(own=TPOT_BOUNDS)
        self.transfer = BucketHistogram(own=TRANSFER_BUCKETS)
        self.ended = LabelledCounter(*get_args(AttemptEnd))
        self.refusals = LabelledCounter()
        self.placements = LabelledCounter("separate", "whole")
        self.requests = self.retries = self.failures = self.good = 0
        self.mean_input = self.mean_output = 0.0  # mean lengths in tokens
        self.output_tokens = 0

    def count_request(self, attempt: int) -> None:
        """Count a request, or a retry."""
        self.requests += attempt == 0
        self.retries += attempt > 0

    def count_failure(self) -> None:
        """Count a placed request whose client gets an error of the cluster after all attempts."""
        self.failures += 1

    def count_placement(self, separate: bool) -> None:
        """Count a placement."""
        self.placements.add_count(value="separate" if separate else "whole")

    def count_refusal(self, status: int) -> None:
        """Count a refusal by its HTTP status."""
        self.refusals.add_count(value=str(status))

    def record_ttft(self, ttft: float) -> None:
        """Record a time to first token."""
        self.ttft.observe(ttft)

    def record_transfer(self, seconds: float) -> None:
        """Record the time from P's token to D's first."""
        self.transfer.observe(seconds)

    def record_end(
        self,
        outcome: AttemptEnd,
        ttft: float | None,
        token_seconds: float | None,
        input_tokens: int,
        output_tokens: int,
    ) -> None:
        """Record the end of an attempt.

        ``ttft``: seconds to the first token; ``token_seconds``: mean seconds per token after the second; None if
        unknown. ``input_tokens``, ``output_tokens``: the lengths of prompt and answer in tokens.
        """
        self.ended.add_count(value=outcome)
        if token_seconds is not None:
            self.tpot.observe(token_seconds)
        if outcome != "ok":
            return
        self.mean_input = moving_average(self.mean_input, input_tokens)
        self.mean_output = moving_average(self.mean_output, output_tokens)
        self.output_tokens += output_tokens
        in_time = self.slo_ttft is None or (ttft is not None and ttft <= self.slo_ttft)
        self.good += in_time and (self.slo_tpot is None or token_seconds is None or token_seconds <= self.slo_tpot)
