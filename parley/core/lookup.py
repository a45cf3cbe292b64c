"""Guesses at what follows, from the sequence itself: where its last tokens stood before, they went on somehow.

Answers that quote, correct or reorder what they were given repeat long pieces of it; so do lists, tables and programs.
The longest such piece is looked for (Saxena 2023, "prompt lookup decoding"), the latest of several equally long ones.

A sequence has an index of the pairs of tokens in it, chains through arrays as in DEFLATE's search for repetitions: a
table from a pair's hash to where it stood last, and from there to where it stood before. A step looks at the tokens
that are new, and at no more than TRIES places.
"""

from __future__ import annotations

from array import array

from parley.core.sequence import Proposer, Sequence

TABLE = 1 << 14  # heads of chains
TRIES = 16  # places looked at
ENOUGH = 8  # tokens that agree; a longer piece is not a better guess
LEAST = 2


class Lookup:
    """A proposer; see ``core.speculation``."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, Index] = {}

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._index(sequence).guess(length) for sequence, length in asked]

    def _index(self, sequence: Sequence) -> Index:
        prediction = sequence.work.prediction
        index = self._indices.get(sequence)
        if index is None:
            tokens = sequence.tokens
            if prediction:  # as if it stood between the prompt and what was written
                tokens = [*tokens[: sequence.prompt_len], *prediction, *tokens[sequence.prompt_len :]]
            index = self._indices[sequence] = Index(tokens)
        elif prediction:
            index.extend(sequence.tokens[len(index) - len(prediction) :])
        return index

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


class Predicted:
    """A proposer for sequences whose works say what is expected; others are the affair of ``other``, or nobody's."""

    def __init__(self, other: Proposer | None):
        self._lookup = Lookup()
        self._other = other

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        rest = [each for each in asked if not each[0].work.prediction]
        guesses = iter(self._other.propose(rest) if self._other is not None and rest else [[]] * len(rest))
        expected = iter(self._lookup.propose([each for each in asked if each[0].work.prediction]))
        return [next(expected if sequence.work.prediction else guesses) for sequence, _ in asked]

    def forget(self, sequence: Sequence) -> None:
        self._lookup.forget(sequence)
        if self._other is not None:
            self._other.forget(sequence)


class Index:
    """Where each pair of ``tokens`` stands, which may only grow."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._heads = array("i", [-1]) * TABLE  # hash of a pair -> place of its second token, the latest
        self._before = array("i", [-1])  # that place -> the place before it with this hash

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int]) -> None:
        self._tokens += tokens

    def guess(self, length: int) -> list[int]:
        """Up to so many tokens that followed where the last ones stood before."""
        self._read()
        place, agree = self._longest()
        if agree < LEAST:
            return []
        length = min(length, 2 ** (agree - 1))  # little evidence, few guesses
        guess = self._tokens[place + 1 : place + 1 + length]
        for number in range(len(guess), length):  # it reaches into what is guessed: the piece repeats itself
            guess.append(guess[number - len(self._tokens) + 1 + place])
        return guess

    def _longest(self) -> tuple[int, int]:
        """The place whose token and those before agree with the sequence's end, and how many do."""
        tokens, best, most = self._tokens, -1, 0
        if len(tokens) < LEAST:
            return best, most
        last = len(tokens) - 1
        place = self._heads[_hash(tokens[-2], tokens[-1])]
        for _ in range(TRIES):
            if place < 0:
                break
            agree = 0
            while agree < min(ENOUGH, place + 1) and tokens[place - agree] == tokens[last - agree]:
                agree += 1
            if agree > most:
                best, most = place, agree
                if most == ENOUGH:
                    break
            place = self._before[place]
        return best, most

    def _read(self) -> None:
        """Take in the pairs that are new, except for the last: it is what is looked for."""
        tokens, heads, before = self._tokens, self._heads, self._before
        for place in range(len(before), len(tokens) - 1):
            key = _hash(tokens[place - 1], tokens[place])
            before.append(heads[key])
            heads[key] = place


def _hash(first: int, second: int) -> int:
    return hash((first, second)) % TABLE
