"""Step budget: how many prompt tokens a step may compute in addition to its decodes.

A long step delays the next token of every running request. On an accelerator, a number of tokens measures that well. On
a CPU the right number is unknown, but the acceptable delay is known, so there the budget is in milliseconds, and the
cost of tokens is learnt while serving. A step that delays no decode may take longer, because larger chunks finish the
prompt sooner. It is still limited, because cancels and new requests are handled between steps.

Time only decides how prompts are cut into chunks, and chunks never change a result.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median, median_low
from typing import Protocol

from parley.core.sequence import BLOCK_SIZE

ALONE = 4  # a step with a single prompt and no decodes may take this many times longer
LEAST = 2 * BLOCK_SIZE  # tokens of a chunk on any machine, so that prompts make progress
MOST = 8192  # tokens of prompts in a step
FIRST = 2 * BLOCK_SIZE  # tokens, before any step was measured
MEMORY = 15  # observations; their medians ignore pauses unrelated to the step
DEPTH = 1024  # initial estimate: a token this far into a prompt costs twice as much as the first one
NEAREST = 128  # lower bound of that distance
APART = 256  # positions between chunks; below this distance a difference in cost is noise


class Pace(Protocol):
    """Budget of one step after another: ``begin_step``, then ``tokens_left`` and ``spend_tokens`` for each chunk, then
    ``observe_step``."""

    def begin(self, decodes: int) -> None:
        """Start planning a step with ``decodes`` decodes; anything planned before is discarded."""

    def room(self, start: int) -> int:
        """Return how many prompt tokens from position ``start`` on still fit; more than 0 for the first chunk."""

    def take(self, start: int, count: int) -> None:
        """Add a chunk of ``count`` tokens from position ``start`` on to the step."""

    def observe(self, seconds: float) -> None:
        """Record the duration of the planned step."""


class Fixed:
    """A budget of ``max_tokens`` in each step, decodes included."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.left = 0

    def begin(self, decodes: int) -> None:
        """Start planning a step; decodes use up part of the budget."""
        self.left = max(LEAST, whole(self.tokens - decodes))

    def room(self, start: int) -> int:
        """Return the rest of the budget."""
        return self.left

    def take(self, start: int, count: int) -> None:
        """Deduct a chunk from the budget."""
        self.left -= count

    def observe(self, seconds: float) -> None:
        """Ignore the duration."""


class Timed:
    """A budget of about ``max_seconds`` for each step; SOLO_FACTOR times as much for a single prompt without decodes.

    Only the first prompt of a step may take that long: others would delay its first token.

    The model: a row at position p of a prompt costs ``row_seconds * (1 + slope * p)``, because attention reads all
    preceding tokens; a decode costs as much as the first token of a prompt. Both numbers are learnt from recent steps
    that had prompts. The fixed cost of a step is thus counted as cost of its rows: fewer rows look more expensive than
    they are, but more rows never look cheaper. The low median is used: after a single slow step, such as the very
    first, one normal step is enough to recover.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._each = 0.0  # seconds of a row; 0: not measured yet
        self._slope = 1 / DEPTH
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=MEMORY)  # mean position, seconds per row, tokens
        self._tried = FIRST  # largest number of tokens among those observations
        self.begin(0)

    def begin(self, decodes: int) -> None:
        """Start planning a step."""
        self._decodes = decodes
        self._tokens = 0
        self._positions = 0.0  # sum over the tokens taken

    def room(self, start: int) -> int:
        """Return how many tokens fit into the rest of the time, by the learnt costs."""
        if self._each:
            # n tokens cost row_seconds * (n * (1 + slope * start) + slope * n * n / 2), solved for n.
            alone = not (self._decodes or self._tokens)
            left = (
                self.seconds * (ALONE if alone else 1) / self._each
                - self._decodes
                - self._tokens
                - self._slope * self._positions
            )
            linear = 1 + self._slope * start
            fit = 2 * left / (linear + sqrt(linear * linear + 2 * self._slope * left)) if left > 0 else 0.0
            # At most twice the largest chunk measured: small chunks say little about large ones.
            fit = min(fit, min(2 * self._tried, MOST) - self._tokens)
        else:
            fit = FIRST - self._tokens
        return max(whole(int(fit)), 0 if self._tokens else LEAST)

    def take(self, start: int, count: int) -> None:
        """Add a chunk to the step."""
        self._tokens += count
        self._positions += count * (start + (count - 1) / 2)

    def observe(self, seconds: float) -> None:
        """Learn from the step, if it had enough prompt tokens."""
        if self._tokens >= BLOCK_SIZE:  # the fixed cost hides smaller chunks
            rows = self._decodes + self._tokens
            self._seen.append((self._positions / rows, max(seconds, 1e-9) / rows, self._tokens))
            self._tried = max(FIRST, max(tokens for _, _, tokens in self._seen))
            self._learn()

    def _learn(self) -> None:
        """Fit slope and cost of a row to the observations."""
        points = [(position, cost) for position, cost, _ in self._seen]
        rises = [
            (cost - other) / (position - before)
            for position, cost, tokens in self._seen
            for before, other, count in self._seen
            # Compare similar sizes only: rows of larger chunks bear less of the step's fixed cost, and that difference
            # would look like one of depth. The deeper chunk must be the smaller one, or it would hide that effect.
            if position - before >= APART and tokens <= count <= 1.5 * tokens
        ]
        if rises:  # slope and intercept of the line through most of the points (Theil-Sen estimator)
            rise = max(0.0, median(rises))
            flat = median(cost - rise * position for position, cost in points)
            self._slope = min(rise / flat, 1 / NEAREST) if flat > 0 else 1 / NEAREST
        self._each = median_low([cost / (1 + self._slope * position) for position, cost in points])


def whole(tokens: int) -> int:
    """Round down to whole pages, so that chunks end at page boundaries."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
