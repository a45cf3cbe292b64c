"""Detects an output that repeats itself: the same pattern of tokens several times in a row at its end.

Handles token ids only, no text.
"""

from __future__ import annotations

from collections import defaultdict, deque

from parley.types import Repetition


class Repeats:
    """Watches one choice's tokens. The cost of a token grows with its recent occurrences, not with pattern sizes."""

    def __init__(self, wish: Repetition):
        self._wish = wish
        self._count = 0  # tokens so far
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)  # recent positions of each token
        self._runs: dict[int, int] = {}  # by pattern size: number of last tokens equal to the token that far before

    def push(self, id: int) -> bool:
        """Add one token. Return whether the last tokens are one pattern, repeated ``limits.count`` times."""
        places, here = self._places[id], self._count
        while places and here - places[0] > self._wish.most:
            places.popleft()
        sizes = (here - place for place in places)
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes if size >= self._wish.least}
        places.append(here)
        self._count += 1
        return any(run >= size * (self._wish.count - 1) for size, run in self._runs.items())
