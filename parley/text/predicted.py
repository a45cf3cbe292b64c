"""How much of a text that a client predicted stands in the answer, as OpenAI's usage tells it.

A token of the prediction counts as accepted where the answer has it, once, and as rejected where it does not. The
answer has it while it follows the prediction, from its beginning or from any place where a run of a few tokens of both
agrees. So the number depends on the two texts alone, and not on how many drafts an engine found worth their time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

RUN = 4  # tokens that agree before an answer that has left the prediction counts as following it again


class Predicted:
    """The tokens of a prediction, and where each run of them ends."""

    def __init__(self, token_ids: Sequence[int]):
        self.token_ids = list(token_ids)
        self.run = min(RUN, len(self.token_ids))
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(self.run, len(self.token_ids) + 1):
            self._ends.setdefault(tuple(self.token_ids[end - self.run : end]), []).append(end)

    def end(self, run: tuple[int, ...], after: int) -> int | None:
        """Where this run ends: at the first place from ``after`` on, or else the first of all; None: nowhere."""
        ends = self._ends.get(run)
        if ends is None:
            return None
        place = bisect_left(ends, after)
        return ends[place] if place < len(ends) else ends[0]


class Follower:
    """One answer beside a prediction, token by token. ``accepted``: of the prediction, so many are in it."""

    def __init__(self, predicted: Predicted):
        self.accepted = 0
        self._predicted = predicted
        self._found = bytearray(len(predicted.token_ids))
        self._last: deque[int] = deque(maxlen=predicted.run)
        self._place = 0  # how far the answer has come in the prediction
        self._follows = True
        self._loose = 0  # tokens since the last that was accepted

    @property
    def rejected(self) -> int:
        return len(self._found) - self.accepted

    def push(self, id: int) -> None:
        ids, place = self._predicted.token_ids, self._place
        self._last.append(id)
        self._loose += 1
        if self._follows and place < len(ids) and ids[place] == id:
            self._accept(place, place + 1)
            return
        end = self._predicted.end(tuple(self._last), place)
        self._follows = end is not None
        if end is not None:
            self._accept(end - min(self._predicted.run, self._loose), end)

    def _accept(self, begin: int, end: int) -> None:
        self.accepted += self._found.count(0, begin, end)
        self._found[begin:end] = b"\1" * (end - begin)
        self._place = end
        self._loose = 0
