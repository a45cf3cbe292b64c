"""How fast an instance's engines are, measured while they work: tokens of prompts, and tokens of answers, per second.

A rate is a quotient of two sums that forget alike, so idle time has no part in it. Knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from parley.types import Stats

MEMORY = 10.0  # seconds of steps after which a measurement counts a third


class Rate:
    """Tokens per second of steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        keep = math.exp(-seconds / MEMORY)
        self._tokens, self._seconds = self._tokens * keep + tokens, self._seconds * keep + seconds

    @property
    def value(self) -> float:
        """0 as long as nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class Rates:
    """``prefill``: of steps that read prompts, by all the tokens that they computed, for a step with answers beside
    takes longer. ``decode``: tokens drawn in steps that read none."""

    def __init__(self) -> None:
        self.prefill, self.decode = Rate(), Rate()
        self._generated: dict[Hashable, int] = {}

    def step(self, engine: Hashable, stats: Stats) -> None:
        """An engine has made a step, if it had tokens."""
        if not stats.step_tokens:
            return
        drawn = stats.generated_tokens - self._generated.get(engine, 0)
        self._generated[engine] = stats.generated_tokens
        if stats.step_prompt:
            self.prefill.add(stats.step_tokens, stats.step_seconds)
        else:
            self.decode.add(max(0, drawn), stats.step_seconds)
