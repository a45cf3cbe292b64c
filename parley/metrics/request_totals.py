"""Totals of a model's requests: their number, their outcomes, and their durations."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class RequestTotals:
    """Totals since the model's start. Counts are requests; seconds are sums over requests that succeeded."""

    succeeded: int = 0
    failed: int = 0  # ended by an engine error
    cancelled: int = 0  # the client left
    rejected: int = 0  # the queue was full
    last_end: float = 0.0  # end of the last one, seconds since the epoch
    total_seconds: float = 0.0  # from arrival to end
    failed_seconds: float = 0.0  # the same, over requests that did not succeed
    prepare_seconds: float = 0.0  # reading, rendering, tokenizing
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0

    def take_delta(self) -> RequestTotals:
        """Return the totals since the last call, for another process to add, and reset them."""
        delta = replace(self)
        for field in fields(self):
            setattr(self, field.name, field.default)
        return delta

    def add_delta(self, delta: RequestTotals) -> None:
        """Add the totals of another process."""
        last_end = max(self.last_end, delta.last_end)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(delta, field.name))
        self.last_end = last_end
