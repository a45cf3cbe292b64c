"""Speed of an instance's engines, measured as they work: prompt tokens and output tokens per second.

A rate is the quotient of two sums with equal exponential decay, so idle time does not count. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from parley.types import Stats

MEMORY = 10.0  # seconds of steps after which a measurement's weight has fallen to about a third


class Rate:
    """Tokens per second of step time."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        keep = math.exp(-seconds / MEMORY)
        self._tokens, self._seconds = self._tokens * keep + tokens, self._seconds * keep + seconds

    @property
    def value(self) -> float:
        """Tokens per second; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Rates:
    """``prefill``: all tokens of steps with prefill, since decoding in the same step takes time too. ``decode``: tokens
    drawn in steps without prefill."""

    def __init__(self) -> None:
        self.prefill, self.decode = Rate(), Rate()
        self._generated: dict[Hashable, int] = {}

    def step(self, engine: Hashable, stats: Stats) -> None:
        """Record a step of an engine, if the step had tokens."""
        if not stats.step_tokens:
            return
        drawn = stats.generated_tokens - self._generated.get(engine, 0)
        self._generated[engine] = stats.generated_tokens
        if stats.step_prompt:
            self.prefill.add(stats.step_tokens, stats.step_seconds)
        else:
            self.decode.add(max(0, drawn), stats.step_seconds)
