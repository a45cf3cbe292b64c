"""Speculative decoding: how many tokens to draft for each sequence, and how the drafts fared.

A *draft* is a guess at the next token of a decode, or at later ones. Drafts are computed in the decode's row, and the
tokens after right drafts are sampled in the same step (``StepRow.drafts``). A step of few rows is bound by reading the
weights from memory, so additional rows are nearly free, and every right draft saves a step. In a step of many rows each
draft costs its share.

So drafts are worth the steps that they save less the cost of their rows. Costs are learnt from the times of decode
steps, the chance that a sequence's next draft is right from its last ones. From all drafts a step takes the most
probable ones, as many as maximize tokens per second. A sequence whose drafts are wrong pauses, twice as long each time,
and longer with more sequences that would wait for its rows.

Drafts never change a result, so they may depend on time. The guesses come from a ``DraftProposer``; this module knows
neither texts nor models.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import log as ln
from time import perf_counter

from parley.core.sequence import Proposer, Row, Sequence, Step

log = logging.getLogger("parley.engine")

MOST = 256  # drafts in a step: bounds the logits held at a time
START = 0.6  # initial chance of a first draft being right
FORGET = 0.7  # weight of a sequence's history after one more draft
USUAL = 0.97  # the same for the history of all sequences, which is the start value of new ones
HOPE = 0.5  # assumed chance of the first draft after a pause; without it no pause would end
LONGEST = 5  # a pause lasts at most 2 to this power tokens, times the number of sequences
DEAR = 0.9  # price above which even a good draft is not worth it
FREE = 24  # this many rows double a step's time, until it is measured
AHEAD = 4  # the price of one row is averaged over this many rows
SOONER, LATER = 0.5, 0.1  # weight of a step that was faster or slower than known
SLOW = 2  # times the known duration: slower steps were delayed by something else


@dataclass(slots=True)
class Tried:
    """Counts since the start: ``rows`` with drafts, draft ``tokens``, and how many were right at position 0, 1 …"""

    rows: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Habit:
    """Draft history of one sequence. ``rate``: chance that a draft is right if those before it are."""

    rate: float
    misses: int = 0  # consecutive
    resume: int = 0  # output tokens before it drafts again

    def chances(self, count: int) -> list[float]:
        """Return the chance of each of ``count`` drafts being right. The first one after a pause gets RETRY_CHANCE."""
        chances = [self.rate**number for number in range(1, count + 1)]
        if chances and self.misses:
            chances[0] = max(HOPE, chances[0])
        return chances


class Speculation:
    """Drafts by ``proposer``, at most ``max_drafts`` tokens for each sequence, in a vocabulary of ``vocab_size`` ids.

    ``always`` False: only while there are requests with a predicted output.
    """

    def __init__(self, proposer: Proposer, most: int, vocab_size: int, always: bool = True):
        self.proposer = proposer
        self.most = most
        self.vocab_size = vocab_size
        self.tried = Tried(accepted=[0] * most)
        self.costs = Costs()
        self._always = always
        self._expected: set[str] = set()  # ids of requests with a predicted output
        self._habits: dict[Sequence, Habit] = {}
        self._usual = START  # average rate of all sequences
        self._price = 0.0
        self._rows = 1  # decodes in the current step
        self._spent = 0.0  # seconds spent on proposing drafts for the current step
        self._failed = False

    @property
    def wanted(self) -> bool:
        """Whether drafts should be proposed at all."""
        return self._always or bool(self._expected)

    def expect(self, id: str) -> None:
        """Note a request with a predicted output."""
        self._expected.add(id)

    def drop(self, id: str) -> None:
        """Forget a request that has ended. Unknown ids are ignored."""
        self._expected.discard(id)

    def drafts(self, decodes: list[Sequence], *, busy: bool) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts for some of the sequences at a distance of one token. ``has_prefill``: the step also computes
        prompts, which leaves no idle time for drafts."""
        self._spent = 0.0
        if busy or self._failed or not decodes:
            return {}
        self._rows = len(decodes)
        self._price = self.costs.price(self._rows)
        asked: list[tuple[Sequence, int]] = []
        left = MOST
        for sequence in decodes:
            # The first output token is sampled with the prompt; a draft of the last one would be of no use.
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
            log.exception("proposing drafts failed; speculative decoding is off from now on")
            self._failed = True
            return {}
        self._spent = perf_counter() - began
        sound = [
            (sequence, self._sound(sequence, guess[:length]))
            for (sequence, length), guess in zip(asked, guesses, strict=True)
        ]
        return self._chosen(len(decodes), sound)

    def observe(self, step: Step, seconds: float) -> None:
        """Record the duration of a step that had decodes only."""
        guessed = step.tokens > len(step.rows)
        self.costs.observe(step.tokens, seconds + (self._spent if guessed else 0.0))

    def learn(self, row: Row, accepted: int) -> None:
        """Record that the first ``accepted`` drafts of a row were right."""
        tried, count = self.tried, len(row.drafts)
        tried.rows += 1
        tried.tokens += count
        for place in range(accepted):
            tried.accepted[place] += 1
        habit = self._habit(row.sequence)
        guesses = accepted + (accepted < count)  # drafts after a wrong one carry no information
        habit.rate += (1 - FORGET**guesses) * (accepted / guesses - habit.rate)
        self._usual += (1 - USUAL**guesses) * (accepted / guesses - self._usual)
        if accepted and habit.rate >= self._price:
            habit.misses = 0
        else:
            self._pause(row.sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the history of a sequence that has ended."""
        self._habits.pop(sequence, None)
        self.proposer.forget(sequence)

    def length(self, sequence: Sequence) -> int:
        """Return how many drafts are worth proposing: all of them are right with a chance above their price."""
        if self._price > DEAR:
            return 0
        habit = self._habit(sequence)
        if sequence.generated < habit.resume:
            return 0
        length = self.most
        if self._price > 0 and habit.rate < 1:
            length = min(length, int(ln(self._price) / ln(max(habit.rate, 1e-3))))
        return max(1, length)

    def _chosen(self, rows: int, found: list[tuple[Sequence, tuple[int, ...]]]) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts that are worth their rows in a step of ``rows`` decodes."""
        chances = {sequence: self._habit(sequence).chances(len(guess)) for sequence, guess in found}
        ranked = sorted((chance for each in chances.values() for chance in each), reverse=True)
        count = self.costs.best(rows, ranked)
        chosen = {}
        for sequence, guess in found:
            length = sum(chance >= ranked[count - 1] for chance in chances[sequence]) if count else 0
            if length:
                chosen[sequence] = guess[:length]
            elif guess:
                self._pause(sequence)
        return chosen

    def _habit(self, sequence: Sequence) -> Habit:
        """Return the history of a sequence; a new one starts with the average rate."""
        habit = self._habits.get(sequence)
        if habit is None:
            habit = self._habits[sequence] = Habit(self._usual)
        return habit

    def _pause(self, sequence: Sequence) -> None:
        """Pause drafts, longer with more sequences: all of them wait for the row that one tries in vain."""
        habit = self._habit(sequence)
        habit.misses += 1
        habit.resume = sequence.generated + self._rows * 2 ** min(habit.misses, LONGEST)

    def _sound(self, sequence: Sequence, guess: list[int]) -> tuple[int, ...]:
        """Return the draft up to where it can no longer be right: nothing follows a token that ends the sequence."""
        for place, token in enumerate(guess):
            if not 0 <= token < self.vocab_size or token in sequence.stops:
                return tuple(guess[:place])
        return tuple(guess)


class Costs:
    """Seconds of decode steps by number of rows, learnt for tried numbers and interpolated between them."""

    def __init__(self) -> None:
        self._seen: list[int] = []  # numbers of rows, ascending
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a step. Outliers caused by other load on the machine count little."""
        place = _place(rows)
        if place in self._seconds:
            known = self._seconds[place]
            self._seconds[place] += (SOONER if seconds < known else LATER) * (min(seconds, SLOW * known) - known)
            return
        self._seconds[place] = min(seconds, SLOW * self.seconds(rows)) if self._seen else seconds
        insort(self._seen, place)

    def seconds(self, rows: int) -> float:
        """Estimate the seconds of a step with ``rows`` rows; 0 if nothing is known. Beyond the largest number tried,
        the estimate is optimistic."""
        if not self._seen:
            return 0.0
        at = bisect_left(self._seen, rows)
        if at == len(self._seen):
            most = self._seen[-1]
            return self._seconds[most] * (1 + (rows - most) / max(FREE, most))
        above = self._seen[at]
        if at == 0 or above == rows:
            return self._seconds[above]
        below = self._seen[at - 1]
        low, high = self._seconds[below], self._seconds[above]
        return low + (high - low) * (rows - below) / (above - below)

    def price(self, rows: int) -> float:
        """Return the price of one more row: the tokens that a step of ``rows`` decodes would produce in its time."""
        alone = self.seconds(rows)
        return rows * max(0.0, self.seconds(rows + AHEAD) - alone) / AHEAD / alone if alone else 0.0

    def best(self, rows: int, chances: list[float]) -> int:
        """Return how many drafts, best first, maximize tokens per second in a step of ``rows`` decodes.

        At most twice the largest number of rows tried: small steps say little about large ones.
        """
        if not self._seen:
            return len(chances)
        chances = chances[: max(0, 2 * self._seen[-1] - rows)]
        tokens = float(rows)
        most, count = tokens / self.seconds(rows), 0
        for number, chance in enumerate(chances, 1):
            tokens += chance
            rate = tokens / self.seconds(rows + number)
            if rate > most:
                most, count = rate, number
        return count


def _place(rows: int) -> int:
    """Round large numbers of rows, so that similar ones share an entry."""
    return rows if rows < 16 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
