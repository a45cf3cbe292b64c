"""The ``best_of`` option: of the choices generated for a prompt, delivers the most probable ones, best first.

The ranking is known when all choices have finished, so events are held until then. Knows no engine and no sockets.
"""

from __future__ import annotations

from parley.text.answer_choice import AnswerChoice
from parley.types import ChoiceDelta, ChoiceDone, Event


class BestOfRanking:
    """Delivers the ``n`` best of ``candidates``, numbered from ``first_index`` on, when all of them have finished."""

    def __init__(self, candidates: list[AnswerChoice], first_index: int, n: int):
        self.best_choices: list[AnswerChoice] = []  # empty until all choices have finished
        self._candidates = candidates
        self._first_index = first_index
        self._n = n
        self._held_events: list[list[Event]] = [[] for _ in candidates]

    def rank_events(self, candidate_index: int, events: list[Event]) -> list[Event]:
        """Take events of a candidate. Return the events to deliver: none before all candidates have finished."""
        if self.best_choices:
            return []
        self._held_events[candidate_index] += events
        if not all(choice.finished for choice in self._candidates):
            return []
        order = sorted(range(len(self._candidates)), key=lambda k: (-self._mean_logprob(k), k))[: self._n]
        self.best_choices = [self._candidates[k] for k in order]
        ranked_events: list[Event] = []
        for delivered_index, k in enumerate(order, self._first_index):
            for event in self._held_events[k]:
                if isinstance(event, ChoiceDelta | ChoiceDone):
                    event.index = delivered_index
            ranked_events += self._held_events[k]
        self._held_events.clear()
        return ranked_events

    def _mean_logprob(self, k: int) -> float:
        """Return the mean log-probability of a choice's tokens; minus infinity if it has none."""
        tokens = self._candidates[k].usage.completion_tokens
        return self._candidates[k].logprob_sum / tokens if tokens else float("-inf")
