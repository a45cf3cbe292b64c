"""How many tokens of prompts a step may compute beside its decodes.

A long step stalls everybody who is waiting for a next token. On an accelerator a number of tokens is a good measure of
that; on a CPU nobody knows the right number, but everybody knows how long a stall may be, so there the measure is
milliseconds, and what tokens cost is learnt while serving. A step that stalls nobody may take longer, for larger
chunks are done sooner; not for ever, because cancels and new requests are looked at between steps.

Time only ever decides how prompts are cut into chunks, and chunks never change a result.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median, median_low
from typing import Protocol

from parley.core.sequence import BLOCK_SIZE

ALONE = 4  # times as long may be a step that has one prompt and no decodes
LEAST = 2 * BLOCK_SIZE  # however slow the machine: prompts must get on
MOST = 8192
FIRST = 2 * BLOCK_SIZE  # before anything is known
MEMORY = 15  # observations; their medians ignore pauses that have nothing to do with the step
DEPTH = 1024  # until it is known: a token so far into a prompt costs twice what the first one does
NEAREST = 128  # and never before this one
APART = 256  # positions between which a difference in cost is more than noise


class Pace(Protocol):
    """One step after another: ``begin``, then ``room`` and ``take`` for each chunk, then ``observe``."""

    def begin(self, decodes: int) -> None:
        """A step with so many decodes is planned; what was planned before does not count."""

    def room(self, start: int) -> int:
        """How many tokens of a prompt, from position ``start`` on, still fit. More than 0 as long as none was taken."""

    def take(self, start: int, count: int) -> None:
        """The step computes these."""

    def observe(self, seconds: float) -> None:
        """The step that was planned took so long."""


class Fixed:
    """``tokens`` in a step, decodes included."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.left = 0

    def begin(self, decodes: int) -> None:
        self.left = max(LEAST, whole(self.tokens - decodes))

    def room(self, start: int) -> int:
        return self.left

    def take(self, start: int, count: int) -> None:
        self.left -= count

    def observe(self, seconds: float) -> None:
        pass


class Timed:
    """Steps of at most about ``seconds``; ALONE times as long for one prompt that no decodes wait beside.

    Only the first prompt of a step may be so long: it comes first anyway, whereas others would delay its first token.

    A row at position p of a prompt is taken to cost ``each * (1 + slope * p)``, for attention looks at all that
    precedes it, and a decode as much as the first token of a prompt. Both numbers are learnt from recent steps that
    had prompts in them. What a step costs for itself thus counts as cost of its rows: fewer rows look dearer than they
    are, never more rows cheaper. The median is a low one: after a single slow step, such as the very first, one normal
    step is enough.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._each = 0.0  # seconds; 0: nothing is known
        self._slope = 1 / DEPTH
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=MEMORY)  # mean position, seconds per row, tokens
        self._tried = FIRST  # the most tokens of them
        self.begin(0)

    def begin(self, decodes: int) -> None:
        self._decodes = decodes
        self._tokens = 0
        self._positions = 0.0  # of the tokens taken, added up

    def room(self, start: int) -> int:
        if self._each:
            # n tokens cost each * (n * (1 + slope * start) + slope * n * n / 2), solved for n.
            alone = not (self._decodes or self._tokens)
            left = (
                self.seconds * (ALONE if alone else 1) / self._each
                - self._decodes
                - self._tokens
                - self._slope * self._positions
            )
            linear = 1 + self._slope * start
            fit = 2 * left / (linear + sqrt(linear * linear + 2 * self._slope * left)) if left > 0 else 0.0
            # Never more than twice what was tried: small chunks say little about large ones.
            fit = min(fit, min(2 * self._tried, MOST) - self._tokens)
        else:
            fit = FIRST - self._tokens
        return max(whole(int(fit)), 0 if self._tokens else LEAST)

    def take(self, start: int, count: int) -> None:
        self._tokens += count
        self._positions += count * (start + (count - 1) / 2)

    def observe(self, seconds: float) -> None:
        if self._tokens >= BLOCK_SIZE:  # less drowns in the fixed cost
            rows = self._decodes + self._tokens
            self._seen.append((self._positions / rows, max(seconds, 1e-9) / rows, self._tokens))
            self._tried = max(FIRST, max(tokens for _, _, tokens in self._seen))
            self._learn()

    def _learn(self) -> None:
        points = [(position, cost) for position, cost, _ in self._seen]
        rises = [
            (cost - other) / (position - before)
            for position, cost, tokens in self._seen
            for before, other, count in self._seen
            # Of like sizes, or the step's own cost, of which rows of larger chunks bear less, would pass for one of
            # depth; and the deeper chunk is the smaller one, or it would hide that.
            if position - before >= APART and tokens <= count <= 1.5 * tokens
        ]
        if rises:  # the slope of the line through most of the points, and where it begins (Theil, Sen)
            rise = max(0.0, median(rises))
            flat = median(cost - rise * position for position, cost in points)
            self._slope = min(rise / flat, 1 / NEAREST) if flat > 0 else 1 / NEAREST
        self._each = median_low([cost / (1 + self._slope * position) for position, cost in points])


def whole(tokens: int) -> int:
    """Down to whole pages, so that chunks end where pages do."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
