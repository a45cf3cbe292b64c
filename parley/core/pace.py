"""How many tokens of prompts a step may compute beside its decodes.

A long step stalls everybody who is waiting for a next token. On an accelerator a number of tokens is a good measure of
that; on a CPU nobody knows the right number, but everybody knows how long a stall may be, so there the measure is
milliseconds and the number is learnt while serving.

Time only ever decides how prompts are cut into chunks, and chunks never change a result.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Protocol

from parley.core.sequence import BLOCK_SIZE

LEAST = 2 * BLOCK_SIZE  # however slow the machine: prompts must get on
MOST = 8192
FIRST = 8 * BLOCK_SIZE  # before anything is known
MEMORY = 15  # observations; their median ignores pauses that have nothing to do with the step


class Pace(Protocol):
    def budget(self, decodes: int) -> int:
        """Prompt tokens that a step with this many decodes may have, at least 1."""

    def observe(self, decodes: int, prefill: int, seconds: float) -> None:
        """A step of so many decodes and prompt tokens took so long."""


class Fixed:
    """``tokens`` in a step, decodes included."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def budget(self, decodes: int) -> int:
        return max(LEAST, whole(self.tokens - decodes))

    def observe(self, decodes: int, prefill: int, seconds: float) -> None:
        pass


class Timed:
    """Steps of about ``seconds``. The cost of a step is taken to be that of its decodes plus so much per prompt token.

    The first part is the median of recent steps that only decoded (it holds the fixed cost, too), the second the median
    of what recent prompt tokens cost beyond it. Attention makes tokens dearer as contexts grow, which a short memory
    follows. Both medians are low ones: after a single slow step, such as the very first, one normal step is enough.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._decoding: deque[float] = deque(maxlen=MEMORY)  # seconds of steps without prompt tokens
        self._prefill: deque[tuple[float, int]] = deque(maxlen=MEMORY)  # seconds per prompt token, prompt tokens

    def budget(self, decodes: int) -> int:
        if not self._prefill:
            return FIRST
        left = self.seconds - (self._base() if decodes else 0.0)
        each = median_low(cost for cost, _ in self._prefill)
        # Never more than twice what was tried: small chunks say little about large ones.
        tried = max(FIRST, max(count for _, count in self._prefill))
        return min(MOST, max(LEAST, whole(min(int(left / each), 2 * tried))))

    def observe(self, decodes: int, prefill: int, seconds: float) -> None:
        if prefill == 0:
            self._decoding.append(seconds)
        elif prefill >= BLOCK_SIZE:  # less drowns in the fixed cost
            base = self._base() if decodes else 0.0
            # At least a quarter is the prompt's own, or one dear decode before would make prompts look free.
            self._prefill.append((max(seconds - base, seconds / 4, 1e-9) / prefill, prefill))

    def _base(self) -> float:
        return median_low(self._decoding) if self._decoding else 0.0


def whole(tokens: int) -> int:
    """Down to whole pages, so that chunks end where pages do."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE
