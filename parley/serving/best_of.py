"""Of the choices that were made for a prompt the likeliest are given, the likeliest first.

Which they are is known when all have come to their end. Until then their events wait. Knows no engine and no sockets.
"""

from __future__ import annotations

from parley.text import Choice
from parley.types import Delta, Done, Event


class Ranking:
    """The ``n`` best of ``choices``; they are given with the indices ``first``, ``first`` + 1, …"""

    def __init__(self, choices: list[Choice], first: int, n: int):
        self.best: list[Choice] = []  # known at the end
        self._choices = choices
        self._first = first
        self._n = n
        self._held: list[list[Event]] = [[] for _ in choices]

    def add(self, index: int, events: list[Event]) -> list[Event]:
        """Events of choice ``index`` of this prompt came: what is given now, nothing before all choices have ended."""
        if self.best:
            return []
        self._held[index] += events
        if not all(choice.ended for choice in self._choices):
            return []
        order = sorted(range(len(self._choices)), key=lambda k: (-self._mean(k), k))[: self._n]
        self.best = [self._choices[k] for k in order]
        given: list[Event] = []
        for place, k in enumerate(order, self._first):
            for event in self._held[k]:
                if isinstance(event, Delta | Done):
                    event.index = place
            given += self._held[k]
        self._held.clear()
        return given

    def _mean(self, k: int) -> float:
        """Mean log-probability of a choice's tokens; of none, that of the impossible."""
        tokens = self._choices[k].usage.completion_tokens
        return self._choices[k].likelihood / tokens if tokens else float("-inf")
