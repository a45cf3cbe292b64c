"""Totals of a model's requests: how many there were, how they ended, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """A model's requests since its start. Counts are requests; seconds are summed over those that succeeded."""

    succeeded: int = 0
    failed: int = 0  # by the engine
    cancelled: int = 0  # the client left
    rejected: int = 0  # no place was free
    last: float = 0.0  # when the last one ended, seconds since the epoch
    whole: float = 0.0  # from arrival to end
    lost: float = 0.0  # the same, of those that did not succeed
    prepared: float = 0.0  # reading, rendering, tokenising
    queued: float = 0.0
    computed: float = 0.0
