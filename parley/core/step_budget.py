"""Step budget: how many prompt tokens a step may compute in addition to its decodes.

A long step delays the next token of every running request. On an accelerator, its number of tokens is a good measure of
that delay. On a CPU the right number is unknown, but the acceptable delay is known, so there the budget is in
milliseconds, and the cost of tokens is learnt while serving. A step that delays no decode may take longer, because
larger chunks finish the prompt sooner. It is still limited, because cancels and new requests are handled between steps.

Time only decides how prompts are cut into chunks, and chunks never change a result.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median, median_low
from typing import Protocol

from parley.core.sequence import PAGE_SIZE

SOLO_FACTOR = 4  # a step with a single prompt and no decodes may take this many times longer
MIN_CHUNK = 2 * PAGE_SIZE  # tokens of a chunk on any machine, so that prompts make progress
MAX_CHUNK = 8192  # tokens of prompts in a step
INITIAL_CHUNK = 2 * PAGE_SIZE  # tokens, before any step was measured
MAX_OBSERVATIONS = 15  # newest steps that the costs are fitted to; medians over them ignore single slow steps
INITIAL_DEPTH = 1024  # initial estimate: a token this far into a prompt costs twice as much as the first one
MIN_DEPTH = 128  # lower bound of that distance
RATE_WINDOW = 1.0  # seconds of the newest steps that show how fast the machine is now
PAUSE_FACTOR = 3.0  # a step this many times slower than expected was interrupted, and says nothing about the rate
MIN_DISTANCE = 256  # positions between chunks; below this distance a difference in cost is noise


class StepBudget(Protocol):
    """Budget of one step after another: ``begin_step``, then ``tokens_left`` and ``spend_tokens`` for each chunk, then
    ``observe_step``."""

    def begin_step(self, decodes: int) -> None:
        """Start planning a step with ``decodes`` decodes; anything planned before is discarded."""

    def tokens_left(self, start: int) -> int:
        """Return how many prompt tokens from position ``start`` on still fit; more than 0 for the first chunk."""

    def spend_tokens(self, start: int, count: int) -> None:
        """Add a chunk of ``count`` tokens from position ``start`` on to the step."""

    def observe_step(self, seconds: float) -> None:
        """Record the duration of the planned step."""


class FixedBudget:
    """A budget of ``max_tokens`` in each step, decodes included."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.remaining = 0

    def begin_step(self, decodes: int) -> None:
        """Start planning a step; decodes use up part of the budget."""
        self.remaining = max(MIN_CHUNK, floor_to_pages(self.max_tokens - decodes))

    def tokens_left(self, start: int) -> int:
        """Return the rest of the budget."""
        return self.remaining

    def spend_tokens(self, start: int, count: int) -> None:
        """Deduct a chunk from the budget."""
        self.remaining -= count

    def observe_step(self, seconds: float) -> None:
        """Ignore the duration."""


class TimedBudget:
    """A budget of about ``max_seconds`` for each step; SOLO_FACTOR times as much for a single prompt without decodes.

    Only the first prompt of a step may take that long: others would delay its first token.

    The model: a row at position p of a prompt costs ``row_seconds * (1 + slope * p)``, because attention reads all
    preceding tokens; a decode costs as much as the first token of a prompt. Both numbers are learnt from recent steps
    that had prompts. The fixed cost of a step is thus counted as cost of its rows: fewer rows look more expensive than
    they are, but more rows never look cheaper. The low median is used: after a single slow step, such as the very
    first, one normal step is enough to recover.

    Other programs slow the machine down for a second or two, and few of the observations are from that time. So costs
    are multiplied by the slowdown of the last second of such steps: their median, or that of the last step if it was
    slower. Overestimating the slowdown only makes the next step short; underestimating it makes the next tokens late.
    """

    def __init__(self, max_seconds: float):
        self.max_seconds = max_seconds
        self._row_seconds = 0.0  # seconds of a row; 0: not measured yet
        self._slope = 1 / INITIAL_DEPTH
        # Of each step: mean position of its rows, seconds per row, prompt tokens.
        self._observations: deque[tuple[float, float, int]] = deque(maxlen=MAX_OBSERVATIONS)
        self._recent_steps: deque[tuple[float, float]] = deque()  # of the last RATE_WINDOW: seconds, slowdown
        self._slowdown = 1.0
        self._largest_chunk = INITIAL_CHUNK  # largest number of tokens among those observations
        self.begin_step(0)

    def begin_step(self, decodes: int) -> None:
        """Start planning a step."""
        self._decodes = decodes
        self._chunk_tokens = 0
        self._position_sum = 0.0  # sum of the positions of the chunks' tokens

    def tokens_left(self, start: int) -> int:
        """Return how many tokens fit into the rest of the time, by the learnt costs."""
        if self._row_seconds:
            # n tokens cost row_seconds * (n * (1 + slope * start) + slope * n * n / 2), solved for n.
            is_solo = not (self._decodes or self._chunk_tokens)
            rows_left = (
                self.max_seconds * (SOLO_FACTOR if is_solo else 1) / (self._row_seconds * self._slowdown)
                - self._decodes
                - self._chunk_tokens
                - self._slope * self._position_sum
            )
            first_cost = 1 + self._slope * start
            chunk = (
                2 * rows_left / (first_cost + sqrt(first_cost * first_cost + 2 * self._slope * rows_left))
                if rows_left > 0
                else 0.0
            )
            # At most twice the largest chunk measured: small chunks say little about large ones.
            chunk = min(chunk, min(2 * self._largest_chunk, MAX_CHUNK) - self._chunk_tokens)
        else:
            chunk = INITIAL_CHUNK - self._chunk_tokens
        return max(floor_to_pages(int(chunk)), 0 if self._chunk_tokens else MIN_CHUNK)

    def spend_tokens(self, start: int, count: int) -> None:
        """Add a chunk to the step."""
        self._chunk_tokens += count
        self._position_sum += count * (start + (count - 1) / 2)

    def observe_step(self, seconds: float) -> None:
        """Learn from the step, if it had enough prompt tokens."""
        if self._chunk_tokens >= PAGE_SIZE:  # the fixed cost hides smaller chunks
            rows = self._decodes + self._chunk_tokens
            self._measure_slowdown(seconds, self._row_seconds * (rows + self._slope * self._position_sum))
            self._observations.append((self._position_sum / rows, max(seconds, 1e-9) / rows, self._chunk_tokens))
            self._largest_chunk = max(INITIAL_CHUNK, max(tokens for _, _, tokens in self._observations))
            self._fit_costs()

    def _measure_slowdown(self, seconds: float, expected: float) -> None:
        """Compare a step with the time expected from the observations before it."""
        if not 0 < seconds < PAUSE_FACTOR * expected:
            return
        self._recent_steps.append((seconds, seconds / expected))
        window = sum(step_seconds for step_seconds, _ in self._recent_steps)
        while len(self._recent_steps) > 1 and window - self._recent_steps[0][0] >= RATE_WINDOW:
            window -= self._recent_steps.popleft()[0]
        slowdowns = [slowdown for _, slowdown in self._recent_steps]
        self._slowdown = max(1.0, median(slowdowns), slowdowns[-1])

    def _fit_costs(self) -> None:
        """Fit slope and cost of a row to the observations."""
        points = [(position, cost) for position, cost, _ in self._observations]
        slopes = [
            (cost - other_cost) / (position - other_position)
            for position, cost, tokens in self._observations
            for other_position, other_cost, other_tokens in self._observations
            # Compare similar sizes only: rows of larger chunks bear less of the step's fixed cost, and that difference
            # would look like one of depth. The deeper chunk must be the smaller one, or it would hide that effect.
            if position - other_position >= MIN_DISTANCE and tokens <= other_tokens <= 1.5 * tokens
        ]
        if slopes:  # slope and intercept of the line through most of the points (Theil-Sen estimator)
            slope = max(0.0, median(slopes))
            base_cost = median(cost - slope * position for position, cost in points)
            self._slope = min(slope / base_cost, 1 / MIN_DEPTH) if base_cost > 0 else 1 / MIN_DEPTH
        self._row_seconds = median_low([cost / (1 + self._slope * position) for position, cost in points])


def floor_to_pages(tokens: int) -> int:
    """Round down to whole pages, so that chunks end at page boundaries."""
    return tokens // PAGE_SIZE * PAGE_SIZE
