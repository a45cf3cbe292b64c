"""Speed of an instance's engines, measured as they work: prompt tokens and output tokens per second.

A rate is the quotient of two sums with equal exponential decay, so idle time does not count. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from parley.types import EngineStats

RATE_MEMORY = 10.0  # seconds of steps until a measurement's weight falls to about a third


class TokenRate:
    """Tokens per second of step time."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add_step(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        keep = math.exp(-seconds / RATE_MEMORY)
        self._tokens, self._seconds = self._tokens * keep + tokens, self._seconds * keep + seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds else 0.0


class EngineRates:
    """``prefill``: all tokens of steps with prefill, since decoding in the same step takes time too. ``decode``: tokens
    drawn in steps without prefill."""

    def __init__(self) -> None:
        self.prefill, self.decode = TokenRate(), TokenRate()
        self._generated_totals: dict[Hashable, int] = {}

    def record_step(self, engine: Hashable, stats: EngineStats) -> None:
        """Record a step of an engine, if the step had tokens."""
        if not stats.step_tokens:
            return
        new_tokens = stats.generated_tokens - self._generated_totals.get(engine, 0)
        self._generated_totals[engine] = stats.generated_tokens
        if stats.step_prompt_tokens:
            self.prefill.add_step(stats.step_tokens, stats.step_seconds)
        else:
            self.decode.add_step(max(0, new_tokens), stats.step_seconds)
