"""Beam searches in progress: from the first step of a request with beams until its choices have outputs.

After a step, a search continues if all of its beams have reported (``core.search.beam`` chooses the next beams,
``core.search.fork`` moves their sequences). It ends when it is over, is finished early, is cancelled, or fails. All of
its choices end together.

Knows searches; nothing of the content of a step or of how other choices end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from parley.core.counters import Meter
from parley.core.scheduler import Scheduler
from parley.core.search.beam import Search
from parley.core.search.fork import branch
from parley.core.sequence import Candidate, Runner, Sequence
from parley.types import Finish, Output

log = logging.getLogger("parley.engine")


class Searches:
    """Searches by request id. ``add_outputs(outputs)`` is called with the outputs of a search that ends,
    ``on_search_end(search)`` when one ends, also when it is cancelled. ``counters`` provides the cost of tokens.

    ``scheduler`` must be set before a search is added.
    """

    scheduler: Scheduler

    def __init__(
        self, runner: Runner, meter: Meter, give: Callable[[list[Output]], None], leave: Callable[[Search], None]
    ):
        self._runner = runner
        self._meter = meter
        self._give = give
        self._leave = leave
        self._open: dict[str, Search] = {}  # by request id
        self._broken: list[Search] = []

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: str) -> bool:
        return id in self._open

    def __getitem__(self, id: str) -> Search:
        return self._open[id]

    def add(self, search: Search) -> None:
        """Start a search whose first sequence is queued."""
        self._open[search.work.id] = search

    def cancel(self, id: str, index: int = -1) -> bool:
        """Cancel one choice, or (-1) all. Returns whether the search has ended with it."""
        search = self._open[id]
        search.wanted = search.wanted - {index} if index >= 0 else set()
        if not search.wanted:
            self._drop(search)
        return not search.wanted

    def conclude(self, id: str, reason: Finish) -> None:
        """End a search with the outputs found so far; unfinished beams end for ``reason``."""
        self._open[id].conclude(reason)
        self._end(self._open[id])

    def report(self, sequence: Sequence, candidates: Iterable[Candidate]) -> None:
        """Record the candidates that may follow a beam, most probable first."""
        self._open[sequence.id].report(sequence, list(candidates))

    def advance(self, sequences: Iterable[Sequence], error: str) -> None:
        """Advance the searches of sequences that had rows, where all beams have reported; end those that are over.

        ``error``: the error of choices whose beams cannot fork.
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
                log.exception("the beams of a search could not fork")
                self.fail(id, error)

    def fail(self, id: str, reason: str) -> None:
        """End all choices of a search with an error."""
        search = self._open[id]
        self._give([Output(id, index, finish="error", error=reason) for index in sorted(search.wanted)])
        self._drop(search)

    def doom(self, id: str) -> None:
        """Mark a search as failed because a beam could not be admitted. Others of its beams may have rows in the
        current step, so ``fail_pending`` ends it afterwards."""
        self._broken.append(self._open[id])

    def sweep(self, reason: str) -> None:
        """Fail the marked searches that have not ended by themselves."""
        while self._broken:
            search = self._broken.pop()
            if self._open.get(search.work.id) is search:
                self.fail(search.work.id, reason)

    @property
    def doomed(self) -> bool:
        """Whether a search is marked as failed."""
        return bool(self._broken)

    def _end(self, search: Search) -> None:
        self._give(search.outputs())
        self._drop(search)

    def _drop(self, search: Search) -> None:
        """Remove a search and report its end."""
        del self._open[search.work.id]
        self._leave(search)
