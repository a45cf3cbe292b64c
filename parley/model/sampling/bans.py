"""Banned next tokens: those that would complete a banned phrase (bad words) or repeat an n-gram.

Both classes read a sequence's tokens and know nothing of logits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class BannedPhrases:
    """Token sequences that must not become complete in the output."""

    def __init__(self, phrases: Iterable[list[int]]):
        self._last_tokens: dict[int, dict[tuple[int, ...], set[int]]] = defaultdict(lambda: defaultdict(set))
        for phrase in filter(None, phrases):
            self._last_tokens[len(phrase) - 1][tuple(phrase[:-1])].add(phrase[-1])

    def banned_next(self, tokens: list[int], start: int) -> set[int]:
        """Return the tokens that must not follow ``tokens``, whose output begins at index ``start``."""
        banned: set[int] = set()
        for length, ends in self._last_tokens.items():
            if length <= len(tokens) - start:
                banned |= ends.get(tuple(tokens[len(tokens) - length :]), set())
        return banned


class RepeatedNgrams:
    """Bans every repetition of ``size`` consecutive tokens, in prompt and output combined."""

    def __init__(self, size: int):
        self._size = size
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self._indexed = 0  # number of tokens already indexed as ends of n-grams

    def repeating_next(self, tokens: list[int]) -> set[int]:
        """Return the tokens that must not follow ``tokens``. Between calls, the list may only grow at its end."""
        prefix_length = self._size - 1
        for end in range(max(self._indexed, prefix_length), len(tokens)):
            self._followers[tuple(tokens[end - prefix_length : end])].add(tokens[end])
        self._indexed = len(tokens)
        if len(tokens) < prefix_length:
            return set()
        return self._followers.get(tuple(tokens[len(tokens) - prefix_length :]), set())
