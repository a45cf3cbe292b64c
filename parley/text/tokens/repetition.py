"""Detects an output that repeats itself: the same pattern of tokens several times in a row at its end.

Handles token ids only, no text.
"""

from __future__ import annotations

from collections import defaultdict, deque

from parley.types import RepetitionPattern


class RepetitionDetector:
    """Watches one choice's tokens. The cost of a token grows with its recent occurrences, not with pattern sizes."""

    def __init__(self, limits: RepetitionPattern):
        self._limits = limits
        self._count = 0  # tokens so far
        self._positions: defaultdict[int, deque[int]] = defaultdict(deque)  # recent positions of each token
        self._runs: dict[int, int] = {}  # by pattern size: number of last tokens equal to the token that far before

    def add_token_id(self, token_id: int) -> bool:
        """Add one token. Return whether the last tokens are one pattern, repeated ``limits.min_count`` times."""
        positions, position = self._positions[token_id], self._count
        while positions and position - positions[0] > self._limits.max_pattern_size:
            positions.popleft()
        sizes = (position - earlier for earlier in positions)
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes if size >= self._limits.min_pattern_size}
        positions.append(position)
        self._count += 1
        return any(run >= size * (self._limits.min_count - 1) for size, run in self._runs.items())
