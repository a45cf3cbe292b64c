"""How many tokens are guessed ahead for which sequence, and what became of the guesses.

A *draft* is a guess at the next token of a decode, or at those behind it. Drafts ride in the decode's row and are
computed with it; what they foresaw is drawn in the same step (``Row.drafts``). A step of few rows waits for the weights
to come from memory, so further rows are nearly free, and every right guess saves a step. In a step of many rows each
one costs its share.

So guesses are worth what they save less what their rows cost. Costs are learnt from the times of decode steps; how
likely a sequence's next guess is right, from its last ones. Of all guesses at hand a step takes the likeliest, as many
as make most tokens in a second. A sequence whose drafts are wrong pauses, twice as long each time, and longer where
many others would wait.

Which drafts there are never changes a result, so time may decide here. Who guesses is a ``Proposer``; this file knows
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
START = 0.6  # chance of a first draft to be right, before anything is known
FORGET = 0.7  # weight of what was known of a sequence after one more guess
USUAL = 0.97  # the same for what is known of all sequences, with which new ones begin
HOPE = 0.5  # chance of the first guess after a pause, or none would ever end
LONGEST = 5  # a pause lasts at most 2 to this power tokens, times the number of sequences
DEAR = 0.9  # a price above which not even a good guess is worth it
FREE = 24  # so many rows double a step's time, until it is known
AHEAD = 4  # rows over which the price of one is taken
SOONER, LATER = 0.5, 0.1  # weight of a step that took less than known, or more
SLOW = 2  # times what is known: slower steps were held up by something else


@dataclass(slots=True)
class Tried:
    """Counts since the start: ``rows`` that had drafts, their ``tokens``, and how many were right at place 0, 1 …"""

    rows: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Habit:
    """How the drafts of one sequence fare. ``rate``: chance of one to be right if those before it are."""

    rate: float
    misses: int = 0  # in a row
    resume: int = 0  # no drafts before it has so many output tokens

    def chances(self, count: int) -> list[float]:
        """Of so many guesses, how likely each is right. The first after a pause is given one."""
        chances = [self.rate**number for number in range(1, count + 1)]
        if chances and self.misses:
            chances[0] = max(HOPE, chances[0])
        return chances


class Speculation:
    """Drafts by ``proposer``, of at most ``most`` tokens each, in a vocabulary of ``vocab_size`` ids.

    Always, or only while there are works that say what is expected of them.
    """

    def __init__(self, proposer: Proposer, most: int, vocab_size: int, always: bool = True):
        self.proposer = proposer
        self.most = most
        self.vocab_size = vocab_size
        self.tried = Tried(accepted=[0] * most)
        self.costs = Costs()
        self._always = always
        self._expected: set[str] = set()  # works that say so
        self._habits: dict[Sequence, Habit] = {}
        self._usual = START  # rate of all sequences
        self._price = 0.0
        self._rows = 1  # decodes in the step at hand
        self._spent = 0.0  # seconds on the drafts of the step at hand
        self._failed = False

    @property
    def wanted(self) -> bool:
        """Is there anything to guess by?"""
        return self._always or bool(self._expected)

    def expect(self, id: str) -> None:
        """A work says what is expected of it."""
        self._expected.add(id)

    def drop(self, id: str) -> None:
        """The work has ended. Unknown ones are ignored."""
        self._expected.discard(id)

    def drafts(self, decodes: list[Sequence], *, busy: bool) -> dict[Sequence, tuple[int, ...]]:
        """Drafts for some of the sequences that are one token behind. ``busy``: the step also reads prompts, which
        leaves no time over."""
        self._spent = 0.0
        if busy or self._failed or not decodes:
            return {}
        self._rows = len(decodes)
        self._price = self.costs.price(self._rows)
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
        sound = [
            (sequence, self._sound(sequence, guess[:length]))
            for (sequence, length), guess in zip(asked, guesses, strict=True)
        ]
        return self._chosen(len(decodes), sound)

    def observe(self, step: Step, seconds: float) -> None:
        """A step of decodes alone took so long."""
        guessed = step.tokens > len(step.rows)
        self.costs.observe(step.tokens, seconds + (self._spent if guessed else 0.0))

    def learn(self, row: Row, accepted: int) -> None:
        """Of a row's drafts the first so many were right."""
        tried, count = self.tried, len(row.drafts)
        tried.rows += 1
        tried.tokens += count
        for place in range(accepted):
            tried.accepted[place] += 1
        habit = self._habit(row.sequence)
        guesses = accepted + (accepted < count)  # what follows a wrong one says nothing
        habit.rate += (1 - FORGET**guesses) * (accepted / guesses - habit.rate)
        self._usual += (1 - USUAL**guesses) * (accepted / guesses - self._usual)
        if accepted and habit.rate >= self._price:
            habit.misses = 0
        else:
            self._pause(row.sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._habits.pop(sequence, None)
        self.proposer.forget(sequence)

    def length(self, sequence: Sequence) -> int:
        """How many drafts it is worth having: all of them are right with a chance above their price."""
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
        """Of the guesses for some of so many decodes, those that are worth their rows."""
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
        habit = self._habits.get(sequence)
        if habit is None:
            habit = self._habits[sequence] = Habit(self._usual)
        return habit

    def _pause(self, sequence: Sequence) -> None:
        """The longer the more sequences there are: a row that one of them tries in vain all others wait for."""
        habit = self._habit(sequence)
        habit.misses += 1
        habit.resume = sequence.generated + self._rows * 2 ** min(habit.misses, LONGEST)

    def _sound(self, sequence: Sequence, guess: list[int]) -> tuple[int, ...]:
        """The guess up to where it can no longer be right: nothing follows a token that ends the sequence."""
        for place, token in enumerate(guess):
            if not 0 <= token < self.vocab_size or token in sequence.stops:
                return tuple(guess[:place])
        return tuple(guess)


class Costs:
    """What steps of decodes cost by their rows: seconds, for numbers of rows that were tried and those between them."""

    def __init__(self) -> None:
        self._seen: list[int] = []  # numbers of rows, ascending
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. What other work on the machine adds counts little."""
        place = _place(rows)
        if place in self._seconds:
            known = self._seconds[place]
            self._seconds[place] += (SOONER if seconds < known else LATER) * (min(seconds, SLOW * known) - known)
            return
        self._seconds[place] = min(seconds, SLOW * self.seconds(rows)) if self._seen else seconds
        insort(self._seen, place)

    def seconds(self, rows: int) -> float:
        """Of a step with so many rows; 0 while nothing is known. More than were ever tried are thought cheap."""
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
        """Tokens that a step of so many decodes would make in the time of one more row."""
        alone = self.seconds(rows)
        return rows * max(0.0, self.seconds(rows + AHEAD) - alone) / AHEAD / alone if alone else 0.0

    def best(self, rows: int, chances: list[float]) -> int:
        """How many guesses, the best ones first, make most tokens in a second beside so many decodes.

        Never more than twice the rows that were tried: small steps say little about large ones.
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
    """Large numbers of rows that are about the same are one."""
    return rows if rows < 16 else rows >> (rows.bit_length() - 4) << (rows.bit_length() - 4)
