"""Beam search over one request: choose the beams of each step, collect finished outputs, decide when to stop.

Beams are sequences of equal length. In each step every beam's row returns its most probable continuations
(``report_candidates``). When the last beam has reported, ``advance_beams`` chooses among all of them together. A
continuation that ends an output (a stop token, the end of its grammar, or the output limit) is *finished* if it is
among the ``width`` best; the ``width`` best of the others continue. The ``width`` best finished outputs are kept,
ranked by the sum of log-probabilities divided by length ** length_penalty. Each step is the same as in Transformers'
``generate(num_beams=…)``, so both find the same outputs. The only difference: where Transformers fills up with beams
of zero probability, this search continues with fewer beams.

Temperature has no effect: log-probabilities are those of the model. Logits processors (grammar, bias, penalties, banned
words) change them without renormalizing, as in Transformers.

This module ranks beams only. It knows nothing of pages, slots or rows; the caller moves the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby

from parley.core.sequence import BLOCK_SIZE, Candidate, Sequence, Status
from parley.types import Cost, Finish, Output, Score, Work


def capacity(blocks: int, width: int) -> int:
    """Return how many tokens, prompt included, each of ``width`` beams may have in a pool of ``blocks`` pages.

    Assumes that beams share no page, and subtracts the spare page that the scheduler keeps for each running sequence.
    Within this limit no beam is preempted for another.
    """
    return max(0, blocks // width - 1) * BLOCK_SIZE


@dataclass(eq=False, slots=True)
class Beam:
    """A beam that continues. ``total_logprob``: sum of its tokens' log-probabilities. ``scores``: only if requested."""

    sequence: Sequence
    total: float = 0.0
    scores: list[Score] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """A finished output."""

    token_ids: list[int]
    value: float  # ranking score
    scores: list[Score]
    finish: Finish
    stop_id: int | None


@dataclass(slots=True)
class Move:
    """A beam of the next step: the beam that it continues, and its new token."""

    parent: Beam
    candidate: Candidate
    total: float


class Search:
    """One search. ``beam_sequences`` are the sequences available for beams; only the first one has the prompt at the
    start."""

    def __init__(self, work: Work, members: list[Sequence]):
        assert work.beam is not None
        self.work = work
        self.members = members
        self.beams = [Beam(members[0])]
        self.found: list[Found] = []  # best first
        self.wanted = set(range(work.n))  # choices that were not cancelled
        self.costs: list[Cost] = []  # one for each token so far, the same for all beams
        self.over = False
        self._wish = work.beam
        self._reports: dict[Sequence, list[Candidate]] = {}

    @property
    def root(self) -> Sequence:
        """The first sequence, which computed the prompt."""
        return self.members[0]

    @property
    def ready(self) -> bool:
        """Whether all beams have reported. A preempted beam recomputes its tokens and reports again."""
        return all(
            beam.sequence.status is Status.RUNNING
            and beam.sequence.computed == len(beam.sequence.tokens)
            and beam.sequence in self._reports
            for beam in self.beams
        )

    def report(self, sequence: Sequence, candidates: list[Candidate]) -> None:
        """Record the candidates that may follow a beam, most probable first."""
        self._reports[sequence] = candidates

    def advance(self) -> list[Move]:
        """Return the beams of the next step, best first; empty when the search is over."""
        width, length = self._wish.width, self.beams[0].sequence.generated + 1
        options = merge(*(self._options(rank, beam) for rank, beam in enumerate(self.beams)))
        moves: list[Move] = []
        ended: list[Found] = []
        for place, (loss, _, _, beam, candidate) in enumerate(options):
            if place >= width and len(moves) == width:
                break
            finish = self._finish(candidate, length)
            if finish is None:
                if len(moves) < width:
                    moves.append(Move(beam, candidate, -loss))
            elif place < width:
                ended.append(self._end(beam, candidate, finish, -loss / length**self._wish.length_penalty))
        self._reports.clear()
        self.found = sorted(self.found + ended, key=lambda found: -found.value)[:width]
        self.over = not moves or not self._worthwhile(moves[0].total, length)
        return [] if self.over else moves

    def conclude(self, reason: Finish) -> None:
        """End the search now. Unfinished beams that have tokens count as outputs that ended for ``reason``."""
        for beam in self.beams:
            if length := beam.sequence.generated:
                ids = beam.sequence.tokens[self.root.prompt_len :]
                value = beam.total / length**self._wish.length_penalty
                self.found.append(Found(ids, value, beam.scores, reason, None))
        best = sorted(self.found, key=lambda found: -found.value)[: self._wish.width]
        self.found = best or [Found([], 0.0, [], reason, None)]
        self.over = True

    def outputs(self) -> list[Output]:
        """Return the outputs of the choices that were not cancelled. The search must be over.

        If there are fewer outputs than choices, they repeat from the first.
        """
        root, made = self.root, []
        for index in sorted(self.wanted):
            found = self.found[index % len(self.found)]
            output = Output(root.id, index, found.token_ids, found.scores or None, found.finish, found.stop_id)
            output.cached_tokens, output.waited = root.cached, root.waited
            output.preemptions = sum(member.preemptions for member in self.members)
            if index == 0:
                whole = len(root.prompt_scores) == root.prompt_len  # False if the search ended during prefill
                output.prompt_scores = root.prompt_scores if whole else None
            if self.work.costs:
                output.costs = self.costs[: len(found.token_ids)]
            made.append(output)
        return made

    def _options(self, rank: int, beam: Beam) -> Iterator[tuple[float, int, int, Beam, Candidate]]:
        """Yield the candidates that may follow a beam, most probable first; of equal ones, the lowest token first."""
        for loss, equal in groupby(self._reports[beam.sequence], lambda each: -(beam.total + each.logprob)):
            for candidate in sorted(equal, key=lambda each: each.token):
                yield loss, rank, candidate.token, beam, candidate

    @property
    def _full(self) -> bool:
        return len(self.found) == self._wish.width

    def _finish(self, candidate: Candidate, length: int) -> Finish | None:
        """Return why an output of ``length`` tokens ends with this candidate, or None.

        Stop tokens before ``min_tokens`` are forbidden.
        """
        root = self.root
        if candidate.end is not None or (candidate.token in root.stops and length > self.work.min_tokens):
            return "stop"
        return "length" if length >= root.limit else None

    def _end(self, beam: Beam, candidate: Candidate, finish: Finish, value: float) -> Found:
        root = self.root
        marked = candidate.end == "mark" or (finish == "stop" and candidate.end is None)
        return Found(
            [*beam.sequence.tokens[root.prompt_len :], candidate.token],
            value,
            [*beam.scores, candidate.score] if candidate.score is not None else [],
            finish,
            candidate.token if marked else None,
        )

    def _worthwhile(self, best: float, length: int) -> bool:
        """Whether a beam may still beat the finished outputs. ``best_total``: total of the best beam, ``length``
        tokens."""
        if not self._full:
            return True
        if self._wish.early_stopping is True:
            return False
        penalty = self._wish.length_penalty
        if self._wish.early_stopping == "never" and penalty > 0:
            length = self.root.limit
        return bool(best / length**penalty > self.found[-1].value)
