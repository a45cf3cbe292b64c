"""The ``best_of`` option: of the choices generated for a prompt, delivers the most probable ones, best first.

The ranking is known when all choices have finished, so events are held until then. Knows no engine and no sockets.
"""

from __future__ import annotations

from parley.text import Choice
from parley.types import Delta, Done, Event


class Ranking:
    """Delivers the ``n`` best of ``candidates``, numbered from ``first_index`` on, when all of them have finished."""

    def __init__(self, choices: list[Choice], first: int, n: int):
        self.best: list[Choice] = []  # empty until all choices have finished
        self._choices = choices
        self._first = first
        self._n = n
        self._held: list[list[Event]] = [[] for _ in choices]

    def add(self, index: int, events: list[Event]) -> list[Event]:
        """Take events of a candidate. Return the events to deliver: none before all candidates have finished."""
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
        """Return the mean log-probability of a choice's tokens; minus infinity if it has none."""
        tokens = self._choices[k].usage.completion_tokens
        return self._choices[k].likelihood / tokens if tokens else float("-inf")
