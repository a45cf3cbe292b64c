"""How many tokens are guessed ahead for which sequence, and what became of the guesses.

A *draft* is a guess at the next token of a decode, or at those behind it. Drafts ride in the decode's row and are
computed with it; what they foresaw is drawn in the same step (``Row.drafts``). A step of few rows waits for the weights
to come from memory, so further rows are nearly free, and every right guess saves a step. In a step of many rows each
one costs its share.

So a guess has a price: what a further row costs, in tokens that the engine would otherwise make in that time. Costs are
learnt from the times of recent decode steps. A sequence gets as many drafts as are likely enough to be right by how its
last ones fared. One whose drafts are wrong pauses, twice as long each time.

Which drafts there are never changes a result, so time may decide here. Who guesses is a ``Proposer``; this file knows
neither texts nor models.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import log as ln
from time import perf_counter
from typing import Protocol

from parley.core.sequence import Row, Sequence, Step

log = logging.getLogger("parley.engine")

MOST = 256  # drafts in a step: bounds the logits held at a time
START = 0.6  # chance of a first draft to be right, before anything is known
FORGET = 0.7  # weight of what was known of a sequence after one more guess
LONGEST = 5  # a pause lasts at most 2 to this power tokens
DEAR = 0.9  # a price above which not even a good guess is worth it
MEMORY = 0.05  # weight of the newest step in the averages
FREE = 24  # so many rows double a step's time, until it is known
DOUBT = 0.25  # how much variance of rows, in steps, counts as much as that guess
SLOW = 3  # times the average: slower steps were held up by something else


class Proposer(Protocol):
    """Guesses tokens. May be wrong, and gives what it likes: nothing depends on it but speed."""

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence at most so many tokens that may follow its last."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended. Unknown ones are ignored."""


@dataclass(slots=True)
class Tried:
    """Counts since the start: ``rows`` that had drafts, their ``tokens``, and how many were right at place 0, 1 …"""

    rows: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Habit:
    """How the drafts of one sequence fare. ``rate``: chance of one to be right if those before it are."""

    rate: float = START
    misses: int = 0  # in a row
    resume: int = 0  # no drafts before it has so many output tokens


class Speculation:
    """Drafts by ``proposer``, of at most ``most`` tokens each, in a vocabulary of ``vocab_size`` ids."""

    def __init__(self, proposer: Proposer, most: int, vocab_size: int):
        self.proposer = proposer
        self.most = most
        self.vocab_size = vocab_size
        self.tried = Tried(accepted=[0] * most)
        self.costs = Costs()
        self._habits: dict[Sequence, Habit] = {}
        self._price = 0.0
        self._spent = 0.0  # seconds on the drafts of the step at hand
        self._failed = False

    def drafts(self, decodes: list[Sequence], *, busy: bool) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for some of the sequences that are one token behind. ``busy``: the step also reads prompts, which
        leaves no time over."""
        self._spent = 0.0
        if busy or self._failed or not decodes:
            return {}
        self._price = self.costs.price(len(decodes))
        asked: list[tuple[Sequence, int]] = []
        left = MOST
        for sequence in decodes:
            # The first token of an output comes with its prompt; the last one follows no draft.
            length = min(self.length(sequence), sequence.limit - sequence.generated - 1, left)
            if length > 0 and sequence.generated and sequence.work.beam is None:
                asked.append((sequence, length))
                left -= length
        if not asked:
            return {}
        began = perf_counter()
        try:
            guesses = self.proposer.propose(asked)
        except Exception:
            log.exception("guessing tokens failed and is off from now on")
            self._failed = True
            return {}
        self._spent = perf_counter() - began
        found: dict[Sequence, tuple[int, ...]] = {}
        for (sequence, length), guess in zip(asked, guesses, strict=True):
            if drafts := self._sound(sequence, guess[:length]):
                found[sequence] = drafts
        return found

    def observe(self, step: Step, seconds: float) -> None:
        """A step of decodes alone took so long."""
        self.costs.observe(len(step.rows), step.tokens, seconds + self._spent)

    def learn(self, row: Row, accepted: int) -> None:
        """Of a row's drafts the first so many were right."""
        tried, count = self.tried, len(row.drafts)
        tried.rows += 1
        tried.tokens += count
        for place in range(accepted):
            tried.accepted[place] += 1
        self.costs.gain(accepted)
        habit = self._habits.setdefault(row.sequence, Habit())
        guesses = accepted + (accepted < count)  # what follows a wrong one says nothing
        kept = FORGET**guesses
        habit.rate = kept * habit.rate + (1 - kept) * accepted / guesses
        if accepted and habit.rate >= self._price:
            habit.misses = 0
        else:
            habit.misses += 1
            habit.resume = row.sequence.generated + 2 ** min(habit.misses, LONGEST)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._habits.pop(sequence, None)
        self.proposer.forget(sequence)

    def length(self, sequence: Sequence) -> int:
        """How many drafts it is worth having: all of them are right with a chance above their price."""
        if self._price > DEAR:
            return 0
        habit = self._habits.get(sequence) or Habit()
        if sequence.generated < habit.resume:
            return 0
        length = self.most
        if self._price > 0 and habit.rate < 1:
            length = min(length, int(ln(self._price) / ln(max(habit.rate, 1e-3))))
        return max(1, length)

    def _sound(self, sequence: Sequence, guess: list[int]) -> tuple[int, ...]:
        """The guess up to where it can no longer be right: nothing follows a token that ends the sequence."""
        for place, token in enumerate(guess):
            if not 0 <= token < self.vocab_size or token in sequence.stops:
                return tuple(guess[:place])
        return tuple(guess)


class Costs:
    """What rows of decode steps cost: seconds against rows, a line through recent steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._rows = self._seconds = self._sequences = 0.0  # averages
        self._variance = self._covariance = 0.0  # of rows; of rows and seconds
        self._yield = 1.0  # tokens that a sequence gets in a step
        self._last = 0  # sequences of the newest step
        self._gained = 0  # its drafts that were right

    def observe(self, sequences: int, rows: int, seconds: float) -> None:
        """A step had so many rows, of so many sequences."""
        if self._last:
            self._yield += MEMORY * (1 + self._gained / self._last - self._yield)
        self._last, self._gained = sequences, 0
        self._steps += 1
        weight = max(MEMORY, 1 / self._steps)
        if self._steps > 1:
            seconds = min(seconds, SLOW * self._seconds)
        more, longer = rows - self._rows, seconds - self._seconds
        self._rows += weight * more
        self._seconds += weight * longer
        self._sequences += weight * (sequences - self._sequences)
        self._variance = (1 - weight) * (self._variance + weight * more * more)
        self._covariance = (1 - weight) * (self._covariance + weight * more * longer)

    def gain(self, accepted: int) -> None:
        """So many drafts of the newest step were right."""
        self._gained += accepted

    @property
    def row(self) -> float:
        """Seconds that one more row takes."""
        if not self._steps:
            return 0.0
        slope = (self._covariance + DOUBT * self._seconds / FREE) / (self._variance + DOUBT)
        return min(max(slope, 0.0), self._seconds / self._rows)

    def price(self, sequences: int) -> float:
        """Tokens that a step with so many sequences would make in the time of one more row."""
        row = self.row
        seconds = self._seconds + row * (sequences - self._sequences)
        return sequences * self._yield * row / seconds if seconds > 0 else 0.0
