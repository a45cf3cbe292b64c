"""Beam search over vLLM, which has none: each beam is a request for one token with its most probable alternatives.

``core.beam_search`` chooses the beams, as for parley's own engine. In each round, vLLM finds the keys and values of a
beam in its prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, cast

import msgspec

from parley.core.beam_search.beam import BeamSearch
from parley.core.beam_search.beam_searches import BeamSearches
from parley.core.sequence import BeamCandidate, Sequence, SequenceStatus
from parley.types import EngineFinishReason, EngineOutput, EngineRequest, SamplingOptions, TokenCost, TokenScore
from parley.worker.vllm.outputs.output_reader import read_token_scores

GREEDY = SamplingOptions(temperature=0.0)
NO_CANDIDATES = "vLLM returned no candidates for a beam."


class BeamStandIns:
    """Replaces the scheduler, the model runner and the counters of a search, because vLLM manages pages and slots."""

    def __init__(self) -> None:
        self.cost = TokenCost(1, 0.0, 0.0)  # the cost of the current round

    def fork_sequence(self, sequence: Sequence, parent: Sequence) -> None:
        """Do nothing: a fork has its tokens, and vLLM finds their pages."""

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Do nothing."""

    def remove_sequence(self, sequence: Sequence) -> None:
        """Take a beam out of the search."""
        sequence.status = SequenceStatus.FINISHED

    def spawn_sequence(self, sequence: Sequence, parent: Sequence) -> None:
        """Take a sequence into the search."""
        sequence.status = SequenceStatus.RUNNING

    def token_costs(self, sequence: Sequence, count: int) -> list[TokenCost]:
        """Return the cost of each of the newest tokens."""
        return [self.cost] * count


@dataclass
class BeamRounds:
    """The searches of the host. ``enqueue(beam)`` queues a round of a beam; ``on_end(search)`` is called when a search
    ends in any way. ``outputs`` collects the outputs of searches that end."""

    enqueue: Callable[[Sequence], None]
    on_end: Callable[[BeamSearch], None]
    outputs: list[EngineOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stand_ins = BeamStandIns()
        stand_ins = cast(Any, self._stand_ins)
        self._searches = BeamSearches(stand_ins, stand_ins, self._add_outputs, self.on_end)
        self._searches.attach_scheduler(stand_ins)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._searches

    def __len__(self) -> int:
        return len(self._searches)

    def add_search(self, request: EngineRequest, beams: list[Sequence]) -> None:
        """Start a search with the first of its beams."""
        for beam in beams:
            beam.tokens = list(request.token_ids)
            beam.output_limit, beam.stop_token_ids = request.max_tokens, frozenset(request.stop_ids)
            beam.status = SequenceStatus.FINISHED
        beams[0].status = SequenceStatus.RUNNING
        self._searches.add_search(BeamSearch(request, beams))
        self.enqueue(beams[0])

    def take_round(self, beam: Sequence, raw: Any, cost: TokenCost) -> None:
        """Take the result of a beam's round. When all beams have theirs, the next round begins or the search ends."""
        request_id = beam.request_id
        candidates = read_candidates(beam, raw)
        if not candidates:
            self._searches.fail_search(request_id, NO_CANDIDATES)
            return
        beam.computed = len(beam.tokens)
        self._stand_ins.cost = cost
        self._searches.report_beam(beam, candidates)
        if not self._searches[request_id].all_reported:
            return
        self._searches.advance_searches([beam], NO_CANDIDATES)
        if request_id in self._searches:
            for live in self._searches[request_id].live_beams:
                self.enqueue(live.sequence)

    def cancel_search(self, request_id: str, index: int) -> None:
        """Cancel one choice of a search, or (-1) all."""
        self._searches.cancel_search(request_id, index)

    def finish_search(self, request_id: str, reason: EngineFinishReason) -> None:
        """End a search with the results so far."""
        self._searches.finish_search(request_id, reason)

    def fail_search(self, request_id: str, reason: str) -> None:
        """End a search with an error."""
        self._searches.fail_search(request_id, reason)

    def _add_outputs(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs


def round_request(beam: Sequence) -> EngineRequest:
    """Return the request for the next token of a beam, with enough alternatives for the search."""
    request = beam.request
    assert request.beam is not None
    return msgspec.structs.replace(
        request,
        token_ids=beam.tokens,
        max_tokens=1,
        min_tokens=0,
        sampling=GREEDY,
        n=1,
        stop_ids=[],
        logprobs=max(request.logprobs, 2 * request.beam.width + len(request.stop_ids)),
        prompt_logprobs=-1 if beam.output_length else request.prompt_logprobs,
        beam=None,
        transfer=b"" if beam.output_length else request.transfer,
    )


def read_candidates(beam: Sequence, raw: Any) -> list[BeamCandidate]:
    """Return the tokens that may follow a beam, most probable first."""
    request = beam.request
    if raw.new_logprobs is None:
        return []
    token_ids, logprobs = raw.new_logprobs[0].tolist()[0][1:], raw.new_logprobs[1].tolist()[0][1:]
    excluded = beam.stop_token_ids if beam.output_length < request.min_tokens else frozenset()
    top = read_token_scores(raw.new_logprobs, request.logprobs)[0] if request.logprobs >= 0 else None
    return [
        BeamCandidate(token, logprob, TokenScore(logprob, rank, top.top_ids, top.top_logprobs) if top else None)
        for rank, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1)
        if token not in excluded and isfinite(logprob)
    ]
