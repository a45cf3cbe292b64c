"""Counts how much of a client's predicted output occurs in the answer, for OpenAI's usage.

Each token of the prediction counts once: as accepted if the answer contains it, else as rejected. The answer contains
tokens while it follows the prediction, from its beginning or from any position where a run of a few tokens matches. The
count thus depends on the two texts alone and not on how many draft tokens the engine tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

MATCHING_RUN = 4  # matching tokens before an answer that left the prediction counts as following it again


class PredictedTokens:
    """The tokens of a predicted output, with an index of where each run of them ends."""

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids = list(token_ids)
        self.run = min(MATCHING_RUN, len(self.token_ids))
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(self.run, len(self.token_ids) + 1):
            self._ends.setdefault(tuple(self.token_ids[end - self.run : end]), []).append(end)

    def find_run_end(self, run: tuple[int, ...], after: int) -> int | None:
        """Return the first end of this run at or after ``after``, else its first end; None if it does not occur."""
        ends = self._ends.get(run)
        if ends is None:
            return None
        index = bisect_left(ends, after)
        return ends[index] if index < len(ends) else ends[0]


class PredictionFollower:
    """Compares one answer with a prediction, token by token. ``accepted_count``: predicted tokens found."""

    def __init__(self, predicted: PredictedTokens):
        self.accepted_count = 0
        self._predicted = predicted
        self._accepted_flags = bytearray(len(predicted.token_ids))
        self._last_tokens: deque[int] = deque(maxlen=predicted.run)
        self._position = 0  # in the prediction, reached by the answer
        self._follows = True
        self._unaccepted = 0  # tokens since the last accepted one

    @property
    def rejected_count(self) -> int:
        """The number of predicted tokens that did not occur."""
        return len(self._accepted_flags) - self.accepted_count

    def follow_token(self, token_id: int) -> None:
        """Add one token of the answer."""
        ids, position = self._predicted.token_ids, self._position
        self._last_tokens.append(token_id)
        self._unaccepted += 1
        if self._follows and position < len(ids) and ids[position] == token_id:
            self._accept_range(position, position + 1)
            return
        end = self._predicted.find_run_end(tuple(self._last_tokens), position)
        self._follows = end is not None
        if end is not None:
            self._accept_range(end - min(self._predicted.run, self._unaccepted), end)

    def _accept_range(self, begin: int, end: int) -> None:
        self.accepted_count += self._accepted_flags.count(0, begin, end)
        self._accepted_flags[begin:end] = b"\1" * (end - begin)
        self._position = end
        self._unaccepted = 0
