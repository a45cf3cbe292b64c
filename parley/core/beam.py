"""Beam search over one work: which beams go on, what has been found, and when the search is over.

Beams are sequences of equal length. In each step every beam's row gives its likeliest continuations (``report``); when
the last beam has reported, ``advance`` chooses among all of them together. A continuation that ends an output (a stop
token, the end of its grammar, or the last token that it may have) is *found*, if it is among the ``width`` best; of the
others the ``width`` best go on. Of what was found the ``width`` best are kept, by the sum of log-probabilities over
length ** length_penalty. Step by step this is the search of Transformers' ``generate(num_beams=…)``, so that both find
the same outputs; where that fills up with beams of no probability, fewer go on here.

Temperature has no part in it: log-probabilities are those of the model, and the edits of the logits (grammar, bias,
penalties, bans) change them without making their probabilities one again, as there.

Knows what beams are worth, and nothing of pages, slots or rows: who drives it moves the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby

from parley.core.sequence import BLOCK_SIZE, Candidate, Sequence, Status
from parley.types import Cost, Finish, Output, Score, Work


def capacity(blocks: int, width: int) -> int:
    """How many tokens, with the prompt's, each of so many beams may have in a pool of ``blocks`` pages.

    Counted as if they shared no page, and with the spare one for each that the scheduler keeps: then none of them has
    to leave for another.
    """
    return max(0, blocks // width - 1) * BLOCK_SIZE


@dataclass(eq=False, slots=True)
class Beam:
    """One that goes on. ``total``: the sum of its tokens' log-probabilities. ``scores``: of its tokens, if wanted."""

    sequence: Sequence
    total: float = 0.0
    scores: list[Score] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """A finished output."""

    token_ids: list[int]
    value: float  # what it is ranked by
    scores: list[Score]
    finish: Finish
    stop_id: int | None


@dataclass(slots=True)
class Move:
    """A beam of the next step: which one it continues, and with what."""

    parent: Beam
    candidate: Candidate
    total: float


class Search:
    """``members`` are the sequences that its beams may have: the first has the prompt, the others nothing yet."""

    def __init__(self, work: Work, members: list[Sequence]):
        assert work.beam is not None
        self.work = work
        self.members = members
        self.beams = [Beam(members[0])]
        self.found: list[Found] = []  # the best first
        self.wanted = set(range(work.n))  # choices that were not cancelled
        self.costs: list[Cost] = []  # of each token so far, the same for all beams
        self.over = False
        self._wish = work.beam
        self._reports: dict[Sequence, list[Candidate]] = {}

    @property
    def root(self) -> Sequence:
        return self.members[0]

    @property
    def ready(self) -> bool:
        """Have all beams reported? One that had to leave meanwhile computes its tokens again, and reports again."""
        return all(
            beam.sequence.status is Status.RUNNING
            and beam.sequence.computed == len(beam.sequence.tokens)
            and beam.sequence in self._reports
            for beam in self.beams
        )

    def report(self, sequence: Sequence, candidates: list[Candidate]) -> None:
        """What may follow a beam, the likeliest first."""
        self._reports[sequence] = candidates

    def advance(self) -> list[Move]:
        """The beams of the next step, the best first; none when the search is over."""
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
        """End the search here: beams count as outputs that have come to their end, if they have any tokens."""
        for beam in self.beams:
            if length := beam.sequence.generated:
                ids = beam.sequence.tokens[self.root.prompt_len :]
                value = beam.total / length**self._wish.length_penalty
                self.found.append(Found(ids, value, beam.scores, reason, None))
        best = sorted(self.found, key=lambda found: -found.value)[: self._wish.width]
        self.found = best or [Found([], 0.0, [], reason, None)]
        self.over = True

    def outputs(self) -> list[Output]:
        """What the choices that are still wanted are given. Where fewer outputs exist, they come again from the first.

        The search must be over.
        """
        root, made = self.root, []
        for index in sorted(self.wanted):
            found = self.found[index % len(self.found)]
            output = Output(root.id, index, found.token_ids, found.scores or None, found.finish, found.stop_id)
            output.cached_tokens, output.waited = root.cached, root.waited
            output.preemptions = sum(member.preemptions for member in self.members)
            if index == 0:
                whole = len(root.prompt_scores) == root.prompt_len  # else it ended while its prompt was read
                output.prompt_scores = root.prompt_scores if whole else None
            if self.work.costs:
                output.costs = self.costs[: len(found.token_ids)]
            made.append(output)
        return made

    def _options(self, rank: int, beam: Beam) -> Iterator[tuple[float, int, int, Beam, Candidate]]:
        """What may follow a beam, the likeliest first; of those that come to the same the lowest token."""
        for loss, equal in groupby(self._reports[beam.sequence], lambda each: -(beam.total + each.logprob)):
            for candidate in sorted(equal, key=lambda each: each.token):
                yield loss, rank, candidate.token, beam, candidate

    @property
    def _full(self) -> bool:
        return len(self.found) == self._wish.width

    def _finish(self, candidate: Candidate, length: int) -> Finish | None:
        """Whether an output of so many tokens ends with this one. Stop tokens before ``min_tokens`` are forbidden."""
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
        """Whether a beam may still beat what was found. ``best``: total of the best beam, of so many tokens."""
        if not self._full:
            return True
        if self._wish.early_stopping is True:
            return False
        penalty = self._wish.length_penalty
        if self._wish.early_stopping == "never" and penalty > 0:
            length = self.root.limit
        return bool(best / length**penalty > self.found[-1].value)
