"""Whether an output has come to say the same over and over: a pattern of tokens, several times in a row, at its end.

Knows token ids and no text.
"""

from __future__ import annotations

from collections import defaultdict, deque

from parley.types import Repetition


class Repeats:
    """One choice's tokens, as they come. What a token costs grows with how often it came lately, not with sizes."""

    def __init__(self, wish: Repetition):
        self._wish = wish
        self._count = 0  # tokens so far
        self._places: defaultdict[int, deque[int]] = defaultdict(deque)  # of each token, no further back than matters
        self._runs: dict[int, int] = {}  # by size of pattern: how many tokens in a row are those of so far before

    def push(self, id: int) -> bool:
        """One more token: are the last ones ``wish.count`` times the same pattern?"""
        places, here = self._places[id], self._count
        while places and here - places[0] > self._wish.most:
            places.popleft()
        sizes = (here - place for place in places)
        self._runs = {size: self._runs.get(size, 0) + 1 for size in sizes if size >= self._wish.least}
        places.append(here)
        self._count += 1
        return any(run >= size * (self._wish.count - 1) for size, run in self._runs.items())
