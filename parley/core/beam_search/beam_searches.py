"""Beam searches in progress: from the first step of a request with beams until its choices have outputs.

After a step, a search continues if all of its beams have reported (``core.beam_search.beam`` chooses the next beams,
``core.beam_search.fork`` moves their sequences). It ends when it is over, is finished early, is cancelled, or fails.
All of its choices end together.

This module knows nothing of the content of a step, or of choices without beams.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from parley.core.beam_search.beam import BeamSearch
from parley.core.beam_search.fork import fork_beams
from parley.core.scheduler import Scheduler
from parley.core.sequence import BeamCandidate, ModelRunner, Sequence
from parley.core.step_counters import StepCounters
from parley.types import EngineFinishReason, EngineOutput

log = logging.getLogger("parley.engine")


class BeamSearches:
    """Searches by request id. ``add_outputs(outputs)`` is called with the outputs of a search that ends,
    ``on_search_end(search)`` when one ends, also when it is cancelled. ``counters`` provides the cost of tokens.

    ``attach_scheduler`` must be called before a search is added.
    """

    _scheduler: Scheduler

    def __init__(
        self,
        runner: ModelRunner,
        counters: StepCounters,
        add_outputs: Callable[[list[EngineOutput]], None],
        on_search_end: Callable[[BeamSearch], None],
    ):
        self._runner = runner
        self._counters = counters
        self._add_outputs = add_outputs
        self._on_search_end = on_search_end
        self._searches_by_id: dict[str, BeamSearch] = {}
        self._failing: list[BeamSearch] = []

    def attach_scheduler(self, scheduler: Scheduler) -> None:
        """Set the scheduler that the beams are forked in."""
        self._scheduler = scheduler

    def __len__(self) -> int:
        return len(self._searches_by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches_by_id

    def __getitem__(self, request_id: str) -> BeamSearch:
        return self._searches_by_id[request_id]

    def add_search(self, search: BeamSearch) -> None:
        """Start a search whose first sequence is queued."""
        self._searches_by_id[search.request.id] = search

    def cancel_search(self, request_id: str, index: int = -1) -> bool:
        """Cancel one choice, or (-1) all. Returns whether the search has ended with it."""
        search = self._searches_by_id[request_id]
        search.wanted_choices = search.wanted_choices - {index} if index >= 0 else set()
        if not search.wanted_choices:
            self._remove_search(search)
        return not search.wanted_choices

    def finish_search(self, request_id: str, reason: EngineFinishReason) -> None:
        """End a search with the outputs found so far; unfinished beams end for ``reason``."""
        self._searches_by_id[request_id].finish_early(reason)
        self._complete_search(self._searches_by_id[request_id])

    def report_beam(self, sequence: Sequence, candidates: Iterable[BeamCandidate]) -> None:
        """Record the candidates that may follow a beam, most probable first."""
        self._searches_by_id[sequence.request_id].report_candidates(sequence, list(candidates))

    def advance_searches(self, sequences: Iterable[Sequence], error: str) -> None:
        """Advance the searches of sequences that had rows, where all beams have reported; end those that are over.

        ``error``: the error of choices whose beams cannot fork.
        """
        for request_id in dict.fromkeys(
            sequence.request_id for sequence in sequences if sequence.request_id in self._searches_by_id
        ):
            search = self._searches_by_id[request_id]
            if not search.all_reported:
                continue
            if search.request.token_costs:
                costs = [self._counters.token_costs(beam.sequence, 1) for beam in search.live_beams]
                search.token_costs += costs[0]
            moves = search.advance_beams()
            if search.is_over:
                self._complete_search(search)
                continue
            try:
                fork_beams(search, moves, self._scheduler, self._runner)
            except Exception:
                log.exception("the beams of a search could not fork")
                self.fail_search(request_id, error)

    def fail_search(self, request_id: str, reason: str) -> None:
        """End all choices of a search with an error."""
        search = self._searches_by_id[request_id]
        self._add_outputs(
            [
                EngineOutput(request_id, index, finish_reason="error", error=reason)
                for index in sorted(search.wanted_choices)
            ]
        )
        self._remove_search(search)

    def fail_after_step(self, request_id: str) -> None:
        """Mark a search as failed because a beam could not be admitted. Others of its beams may have rows in the
        current step, so ``fail_pending`` ends it afterwards."""
        self._failing.append(self._searches_by_id[request_id])

    def fail_pending(self, reason: str) -> None:
        """Fail the searches marked by ``fail_after_step`` that have not ended meanwhile."""
        while self._failing:
            search = self._failing.pop()
            if self._searches_by_id.get(search.request.id) is search:
                self.fail_search(search.request.id, reason)

    @property
    def has_failing(self) -> bool:
        """Whether a search is marked as failed."""
        return bool(self._failing)

    def _complete_search(self, search: BeamSearch) -> None:
        self._add_outputs(search.choice_outputs())
        self._remove_search(search)

    def _remove_search(self, search: BeamSearch) -> None:
        """Remove a search and report its end."""
        del self._searches_by_id[search.request.id]
        self._on_search_end(search)
