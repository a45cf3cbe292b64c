"""The searches under way: those of works that want beams, from their first step until their choices have outputs.

After a step a search goes on if all of its beams have come as far (``beam`` says which go on, ``fork`` moves their
sequences), and ends when it is over, is told to, is cancelled, or fails. All of its choices end together.

Knows searches, and nothing of what a step computes or how other choices end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from parley.core.beam import Search
from parley.core.fork import branch
from parley.core.meter import Meter
from parley.core.scheduler import Scheduler
from parley.core.sequence import Candidate, Runner, Sequence
from parley.types import Finish, Output

log = logging.getLogger("parley.engine")


class Searches:
    """``give(outputs)`` is called with what a search that ends has for its choices, ``leave(search)`` when one ends,
    cancelled ones too. Beams' tokens cost what ``meter`` says.

    ``scheduler`` is to be set before anything is added.
    """

    scheduler: Scheduler

    def __init__(
        self, runner: Runner, meter: Meter, give: Callable[[list[Output]], None], leave: Callable[[Search], None]
    ):
        self._runner = runner
        self._meter = meter
        self._give = give
        self._leave = leave
        self._open: dict[str, Search] = {}  # by work
        self._broken: list[Search] = []

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: str) -> bool:
        return id in self._open

    def __getitem__(self, id: str) -> Search:
        return self._open[id]

    def add(self, search: Search) -> None:
        """Begin a search, the first of whose sequences is queued."""
        self._open[search.work.id] = search

    def cancel(self, id: str, index: int = -1) -> bool:
        """Forget one choice, or (-1) all. Whether the search has ended with it."""
        search = self._open[id]
        search.wanted = search.wanted - {index} if index >= 0 else set()
        if not search.wanted:
            self._drop(search)
        return not search.wanted

    def conclude(self, id: str, reason: Finish) -> None:
        """Give what was found by now; what goes on ends for this ``reason``."""
        self._open[id].conclude(reason)
        self._end(self._open[id])

    def report(self, sequence: Sequence, candidates: Iterable[Candidate]) -> None:
        """What may follow a beam, the likeliest first."""
        self._open[sequence.id].report(sequence, list(candidates))

    def advance(self, sequences: Iterable[Sequence], error: str) -> None:
        """Go on with the searches of those that had rows, where all beams have come as far; end those that are over.

        ``error``: what the choices end with of a search whose beams cannot fork.
        """
        for id in dict.fromkeys(each.id for each in sequences if each.id in self._open):
            search = self._open[id]
            if not search.ready:
                continue
            if search.work.costs:
                costs = [self._meter.costs(beam.sequence, 1) for beam in search.beams]
                search.costs += costs[0]
            moves = search.advance()
            if search.over:
                self._end(search)
                continue
            try:
                branch(search, moves, self.scheduler, self._runner)
            except Exception:
                log.exception("beams could not fork")
                self.fail(id, error)

    def fail(self, id: str, reason: str) -> None:
        """End all choices of a search with an error."""
        search = self._open[id]
        self._give([Output(id, index, finish="error", error=reason) for index in sorted(search.wanted)])
        self._drop(search)

    def doom(self, id: str) -> None:
        """A beam could not be admitted. Others of its search may have rows in the step at hand, so it fails after it:
        ``sweep``."""
        self._broken.append(self._open[id])

    def sweep(self, reason: str) -> None:
        """End what was doomed, unless it has ended by itself."""
        while self._broken:
            search = self._broken.pop()
            if self._open.get(search.work.id) is search:
                self.fail(search.work.id, reason)

    @property
    def doomed(self) -> bool:
        """Does one wait for its end?"""
        return bool(self._broken)

    def _end(self, search: Search) -> None:
        self._give(search.outputs())
        self._drop(search)

    def _drop(self, search: Search) -> None:
        """Take a search out of all books."""
        del self._open[search.work.id]
        self._leave(search)
