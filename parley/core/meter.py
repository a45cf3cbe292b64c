"""What steps have taken: counts since the start, the last step's size and time, and what single tokens cost.

Knows numbers of steps and rows, and nothing of why a step is as it is.
"""

from __future__ import annotations

from time import perf_counter

from parley.core.sequence import Sequence, Step
from parley.types import Cost


class Meter:
    """``steps``, ``prompt_tokens`` and ``generated_tokens`` count from the start. ``tokens`` and ``rows`` are those of
    the last step, ``prompt`` its tokens in rows of several, ``seconds`` the time it took."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._ended = 0.0  # when the last step was computed
        self.clear()

    def clear(self) -> None:
        """A step begins, of which nothing is known."""
        self.tokens = self.prompt = self.rows = 0
        self.seconds = 0.0

    def observe(self, step: Step, began: float) -> None:
        """A step was computed just now; ``began``: when that began, time.perf_counter."""
        self._ended = perf_counter()
        self.seconds = self._ended - began
        self.tokens, self.rows = step.tokens, len(step.rows)
        self.prompt = sum(row.count for row in step.rows if row.count > 1)

    def costs(self, sequence: Sequence, count: int) -> list[Cost]:
        """What each of its newest tokens took, their step in equal shares; from here on the next one's time runs."""
        waited = max(0.0, self._ended - sequence.since - sequence.computing)
        cost = Cost(self.rows, waited / count, sequence.computing / count, count)
        sequence.since, sequence.computing = self._ended, 0.0
        return [cost] * count
