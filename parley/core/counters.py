"""Step counters: totals since the start, size and time of the last step, and the time spent on each token.

Knows the numbers of steps and rows; nothing of scheduling decisions.
"""

from __future__ import annotations

from time import perf_counter

from parley.core.sequence import Sequence, Step
from parley.types import Cost


class Meter:
    """Counters of steps and tokens. ``steps``, ``prompt_tokens`` and ``generated_tokens`` count from the start.
    ``step_tokens`` and ``step_rows`` are those of the last step, ``step_prompt_tokens`` its tokens in rows of several
    tokens, ``step_seconds`` its duration."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._ended = 0.0  # end of the last step, time.perf_counter
        self.clear()

    def clear(self) -> None:
        """Reset the numbers of the last step, because a new step begins."""
        self.tokens = self.prompt = self.rows = 0
        self.seconds = 0.0

    def observe(self, step: Step, began: float) -> None:
        """Record a step that has just been computed; ``started_at``: its start, time.perf_counter."""
        self._ended = perf_counter()
        self.seconds = self._ended - began
        self.tokens, self.rows = step.tokens, len(step.rows)
        self.prompt = sum(row.count for row in step.rows if row.count > 1)

    def costs(self, sequence: Sequence, count: int) -> list[Cost]:
        """Return the cost of each of the sequence's ``count`` newest tokens, an equal share of their step; restart the
        clock for its next token."""
        waited = max(0.0, self._ended - sequence.since - sequence.computing)
        cost = Cost(self.rows, waited / count, sequence.computing / count, count)
        sequence.since, sequence.computing = self._ended, 0.0
        return [cost] * count
