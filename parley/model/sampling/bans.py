"""Bad words: tokens that the preceding tokens rule out, because they would end a banned phrase or repeat an n-gram.

Both classes look at a sequence's tokens and know nothing of logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class Phrases:
    """Token sequences that must not become complete in the output."""

    def __init__(self, phrases: Iterable[list[int]]):
        self._ends: dict[int, dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
        for phrase in filter(None, phrases):
            self._ends[len(phrase) - 1][tuple(phrase[:-1])].add(phrase[-1])

    def next(self, tokens: list[int], start: int) -> set[int]:
        """Return the tokens that must not follow ``tokens``, whose output begins at index ``start``."""
        found: set[int] = set()
        for length, ends in self._ends.items():
            if length <= len(tokens) - start:
                found |= ends.get(tuple(tokens[len(tokens) - length :]), set())
        return found


class Grams:
    """Bans every repetition of ``size`` consecutive tokens, in prompt and output combined."""

    def __init__(self, size: int):
        self._size = size
        self._seen: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self._read = 0  # number of tokens already indexed as ends of n-grams

    def next(self, tokens: list[int]) -> set[int]:
        """Return the tokens that must not follow ``tokens``. Between calls, the list may only grow at its end."""
        before = self._size - 1
        for end in range(max(self._read, before), len(tokens)):
            self._seen[tuple(tokens[end - before : end])].add(tokens[end])
        self._read = len(tokens)
        if len(tokens) < before:
            return set()
        return self._seen.get(tuple(tokens[len(tokens) - before :]), set())
