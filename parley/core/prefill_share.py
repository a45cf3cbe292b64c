"""Prefill share: the part of the compute time that prefill may take while requests decode.

An account in seconds. A step that has decodes charges prefill for the prompt tokens' part of its time, and every such
step pays the prefill share of its time back. Prefill may have rows as long as it owes nothing: then it gets as much as
the step budget allows, and afterwards steps only decode until the debt is paid. So no step gets longer, and over any
period prefill takes at most its share plus two steps' worth. If only prefill or only decodes have work, they get all
the time.

Knows no sequences, and reads no clock.
"""

from __future__ import annotations

LONGEST = 10.0  # seconds charged for a step at most: a longer pause is not caused by prefill


class Quota:
    """Account of prefill time in steps with decodes. ``share``: from 0 to 1. With 0, prefill waits until no request
    decodes; with 1 it never waits.

    For each step: ``begin_step``, then ``charge_prefill`` for its chunks if prefill is allowed, then ``observe_step``.
    """

    def __init__(self, part: float = 1.0):
        self.part = part
        self.open = True
        self._owed = 0.0  # seconds; negative: credit
        self._taken = 0
        self._beside = False

    def divide(self, part: float) -> None:
        """Change the share from now on; the debt is forgotten."""
        self.part, self._owed = part, 0.0

    def begin(self, answers: int) -> None:
        """Start planning a step with ``decodes`` decodes."""
        self._taken, self._beside = 0, answers > 0
        self.open = not answers or (self.part > 0 and self._owed <= 0)

    def take(self, count: int) -> None:
        """Record ``count`` prompt tokens in the step."""
        self._taken += count

    def observe(self, seconds: float, tokens: int) -> None:
        """Charge a step of ``seconds`` and ``tokens`` in all. An unused share is saved, at most one step's part."""
        if self._beside:
            seconds = min(seconds, LONGEST)
            owed = self._owed + seconds * (self._taken / tokens - self.part)
            self._owed = max(owed, min(self._owed, -seconds * self.part))
