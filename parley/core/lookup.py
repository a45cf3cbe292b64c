"""Guesses at what follows, from the sequence itself: where its last tokens stood before, they went on somehow.

Answers that quote, correct or reorder what they were given repeat long pieces of it; so do lists, tables and programs.
The longest such piece is looked for (Saxena 2023, "prompt lookup decoding"), the latest of several equally long ones.

A sequence has an index of the pairs of tokens in it, chains through arrays as in DEFLATE's search for repetitions: a
table from a pair's hash to where it stood last, and from there to where it stood before. A step looks at the tokens
that are new, and at no more than TRIES places.
"""

from __future__ import annotations

from array import array

from parley.core.sequence import Sequence

TABLE = 1 << 14  # heads of chains
TRIES = 16  # places looked at
ENOUGH = 8  # tokens that agree; a longer piece is not a better guess
LEAST = 2


class Lookup:
    """A proposer; see ``core.speculation``."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, Index] = {}

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        found = []
        for sequence, length in asked:
            index = self._indices.get(sequence)
            if index is None:
                index = self._indices[sequence] = Index(sequence.tokens)
            found.append(index.guess(length))
        return found

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


class Index:
    """Where each pair of ``tokens`` stands, which may only grow."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._heads = array("i", [-1]) * TABLE  # hash of a pair -> place of its second token, the latest
        self._before = array("i", [-1])  # that place -> the place before it with this hash

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
