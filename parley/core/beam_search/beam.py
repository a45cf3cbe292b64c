"""Beam search over one request: choose the beams of each step, collect finished outputs, decide when to stop.

Beams are sequences of equal length. In each step every beam's row returns its most probable continuations
(``report_candidates``). When the last beam has reported, ``advance_beams`` chooses among all of them together. A
continuation that ends an output (a stop token, the end of its grammar, or the output limit) is *finished* if it is
among the ``width`` best; the ``width`` best of the others continue. The ``width`` best finished outputs are kept,
ranked by the sum of log-probabilities divided by length ** length_penalty. Each step is the same as in Transformers'
``generate(num_beams=…)``, so both find the same outputs. The only difference: if there are fewer than ``width``
continuations, Transformers adds beams of zero probability, and this search continues with fewer beams.

Temperature has no effect: log-probabilities are those of the model. Logits processors (grammar, bias, penalties, banned
words) change them without renormalizing, as in Transformers.

This module ranks beams only. It knows nothing of pages, slots or rows; the caller moves the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby

from parley.core.sequence import PAGE_SIZE, BeamCandidate, Sequence, SequenceStatus
from parley.types import EngineFinishReason, EngineOutput, EngineRequest, TokenCost, TokenScore


def beam_capacity(page_count: int, width: int) -> int:
    """Return how many tokens, prompt included, each of ``width`` beams may have in a pool of ``page_count`` pages.

    Assumes that beams share no page, and subtracts the spare page that the scheduler keeps for each running sequence.
    Within this limit no beam is preempted for another.
    """
    return max(0, page_count // width - 1) * PAGE_SIZE


@dataclass(eq=False, slots=True)
class LiveBeam:
    """A beam that continues. ``total_logprob``: sum of its tokens' log-probabilities. ``scores``: only if requested."""

    sequence: Sequence
    total_logprob: float = 0.0
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(slots=True)
class FinishedBeam:
    """A finished output. ``ranking_score``: the sum of its log-probabilities divided by length ** length_penalty."""

    token_ids: list[int]
    ranking_score: float
    scores: list[TokenScore]
    finish_reason: EngineFinishReason
    stop_id: int | None


@dataclass(slots=True)
class BeamExtension:
    """A beam of the next step: the beam that it continues, and its new token."""

    parent: LiveBeam
    candidate: BeamCandidate
    total_logprob: float


class BeamSearch:
    """One search. ``beam_sequences``: the sequences for its beams, as many as its width. At first only the first one
    runs, with the prompt."""

    def __init__(self, request: EngineRequest, beam_sequences: list[Sequence]):
        assert request.beam is not None
        self.request = request
        self.beam_sequences = beam_sequences
        self.live_beams = [LiveBeam(beam_sequences[0])]
        self.finished_beams: list[FinishedBeam] = []  # best first
        self.wanted_choices = set(range(request.n))  # choices that were not cancelled
        self.token_costs: list[TokenCost] = []  # one for each token so far, the same for all beams
        self.is_over = False
        self._beam_options = request.beam
        self._candidates: dict[Sequence, list[BeamCandidate]] = {}

    @property
    def root_sequence(self) -> Sequence:
        """The first sequence, which computed the prompt."""
        return self.beam_sequences[0]

    @property
    def all_reported(self) -> bool:
        """Whether all beams have reported. A preempted beam recomputes its tokens and reports again."""
        return all(
            beam.sequence.status is SequenceStatus.RUNNING
            and beam.sequence.computed == len(beam.sequence.tokens)
            and beam.sequence in self._candidates
            for beam in self.live_beams
        )

    def report_candidates(self, sequence: Sequence, candidates: list[BeamCandidate]) -> None:
        """Record the candidates that may follow a beam, most probable first."""
        self._candidates[sequence] = candidates

    def advance_beams(self) -> list[BeamExtension]:
        """Return the beams of the next step, best first; empty when the search is over."""
        width, length = self._beam_options.width, self.live_beams[0].sequence.output_length + 1
        ranked = merge(*(self._ranked_candidates(rank, beam) for rank, beam in enumerate(self.live_beams)))
        moves: list[BeamExtension] = []
        finished: list[FinishedBeam] = []
        for position, (loss, _, _, beam, candidate) in enumerate(ranked):
            if position >= width and len(moves) == width:
                break
            finish_reason = self._candidate_finish_reason(candidate, length)
            if finish_reason is None:
                if len(moves) < width:
                    moves.append(BeamExtension(beam, candidate, -loss))
            elif position < width:
                finished.append(
                    self._finish_beam(beam, candidate, finish_reason, -loss / length**self._beam_options.length_penalty)
                )
        self._candidates.clear()
        self.finished_beams = sorted(self.finished_beams + finished, key=lambda beam: -beam.ranking_score)[:width]
        self.is_over = not moves or not self._can_improve(moves[0].total_logprob, length)
        return [] if self.is_over else moves

    def finish_early(self, reason: EngineFinishReason) -> None:
        """End the search now. Unfinished beams that have tokens count as outputs that ended for ``reason``."""
        for beam in self.live_beams:
            if length := beam.sequence.output_length:
                token_ids = beam.sequence.tokens[self.root_sequence.prompt_len :]
                value = beam.total_logprob / length**self._beam_options.length_penalty
                self.finished_beams.append(FinishedBeam(token_ids, value, beam.scores, reason, None))
        best_outputs = sorted(self.finished_beams, key=lambda beam: -beam.ranking_score)[: self._beam_options.width]
        self.finished_beams = best_outputs or [FinishedBeam([], 0.0, [], reason, None)]
        self.is_over = True

    def choice_outputs(self) -> list[EngineOutput]:
        """Return the outputs of the choices that were not cancelled. The search must be over.

        If there are fewer outputs than choices, they repeat from the first.
        """
        root, outputs = self.root_sequence, []
        for index in sorted(self.wanted_choices):
            finished = self.finished_beams[index % len(self.finished_beams)]
            output = EngineOutput(
                root.request_id,
                index,
                finished.token_ids,
                finished.scores or None,
                finished.finish_reason,
                finished.stop_id,
            )
            output.cached_tokens, output.queue_seconds = root.cached_tokens, root.queue_seconds
            output.preemptions = sum(member.preemptions for member in self.beam_sequences)
            if index == 0:
                complete = len(root.prompt_scores) == root.prompt_len  # False if the search ended during prefill
                output.prompt_scores = root.prompt_scores if complete else None
            if self.request.token_costs:
                output.token_costs = self.token_costs[: len(finished.token_ids)]
            outputs.append(output)
        return outputs

    def _ranked_candidates(
        self, rank: int, beam: LiveBeam
    ) -> Iterator[tuple[float, int, int, LiveBeam, BeamCandidate]]:
        """Yield the candidates that may follow a beam, most probable first; of equal ones, the lowest token first."""
        for loss, equal in groupby(self._candidates[beam.sequence], lambda item: -(beam.total_logprob + item.logprob)):
            for candidate in sorted(equal, key=lambda item: item.token):
                yield loss, rank, candidate.token, beam, candidate

    @property
    def _is_full(self) -> bool:
        return len(self.finished_beams) == self._beam_options.width

    def _candidate_finish_reason(self, candidate: BeamCandidate, length: int) -> EngineFinishReason | None:
        """Return why an output of ``length`` tokens ends with this candidate, or None.

        Stop tokens before ``min_tokens`` are forbidden.
        """
        root = self.root_sequence
        if candidate.end is not None or (candidate.token in root.stop_token_ids and length > self.request.min_tokens):
            return "stop"
        return "length" if length >= root.output_limit else None

    def _finish_beam(
        self, beam: LiveBeam, candidate: BeamCandidate, finish_reason: EngineFinishReason, ranking_score: float
    ) -> FinishedBeam:
        """Return the output that ends with this candidate."""
        root = self.root_sequence
        ends_with_marker = candidate.end == "mark" or (finish_reason == "stop" and candidate.end is None)
        return FinishedBeam(
            [*beam.sequence.tokens[root.prompt_len :], candidate.token],
            ranking_score,
            [*beam.scores, candidate.score] if candidate.score is not None else [],
            finish_reason,
            candidate.token if ends_with_marker else None,
        )

    def _can_improve(self, best_total: float, length: int) -> bool:
        """Whether a beam may still beat the finished outputs. ``best_total``: total of the best beam, ``length``
        tokens."""
        if not self._is_full:
            return True
        if self._beam_options.early_stopping is True:
            return False
        penalty = self._beam_options.length_penalty
        if self._beam_options.early_stopping == "never" and penalty > 0:
            length = self.root_sequence.output_limit
        return bool(best_total / length**penalty > self.finished_beams[-1].ranking_score)
