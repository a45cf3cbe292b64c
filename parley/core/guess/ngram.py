"""N-gram proposer: drafts repeat the tokens that followed an earlier occurrence of the sequence's last tokens.

Answers that quote, correct or reorder their input repeat long pieces of it; so do lists, tables and programs. The
proposer searches for the longest earlier match, and of equally long ones the latest (Saxena 2023, "prompt lookup
decoding").

Each sequence has an index of its token pairs, with chains through arrays as in DEFLATE's match search: a table maps a
pair's hash to its latest position, and an array maps each position to the previous one. A step reads only the new
tokens and at most MAX_CHAIN positions.
"""

from __future__ import annotations

from array import array

from parley.core.sequence import Proposer, Sequence

TABLE = 1 << 14  # chain heads
TRIES = 16  # positions examined in a step
ENOUGH = 8  # matching tokens; a longer match does not make a better draft
LEAST = 2  # matching tokens


class Lookup:
    """A draft proposer that works without a model; see ``core.guess.speculation``."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, Index] = {}

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each sequence."""
        return [self._index(sequence).guess(length) for sequence, length in asked]

    def _index(self, sequence: Sequence) -> Index:
        prediction = sequence.work.prediction
        index = self._indices.get(sequence)
        if index is None:
            tokens = sequence.tokens
            if prediction:  # placed between the prompt and the output
                tokens = [*tokens[: sequence.prompt_len], *prediction, *tokens[sequence.prompt_len :]]
            index = self._indices[sequence] = Index(tokens)
        elif prediction:
            index.extend(sequence.tokens[len(index) - len(prediction) :])
        return index

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index. Unknown sequences are ignored."""
        self._indices.pop(sequence, None)


class Predicted:
    """Drafts from the request's predicted output, where it has one. Other sequences use ``fallback``, or get none."""

    def __init__(self, other: Proposer | None):
        self._lookup = Lookup()
        self._other = other

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each sequence, in order."""
        rest = [each for each in asked if not each[0].work.prediction]
        guesses = iter(self._other.propose(rest) if self._other is not None and rest else [[]] * len(rest))
        expected = iter(self._lookup.propose([each for each in asked if each[0].work.prediction]))
        return [next(expected if sequence.work.prediction else guesses) for sequence, _ in asked]

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of the sequence in both proposers."""
        self._lookup.forget(sequence)
        if self._other is not None:
            self._other.forget(sequence)


class Index:
    """Positions of all token pairs of ``tokens``, which may only grow."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._heads = array("i", [-1]) * TABLE  # hash of a pair -> latest position of its second token
        self._before = array("i", [-1])  # position -> previous position with this hash

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens; they are indexed by the next ``guess_continuation``."""
        self._tokens += tokens

    def guess(self, length: int) -> list[int]:
        """Return up to ``length`` tokens that followed the longest earlier match of the last tokens."""
        self._read()
        place, agree = self._longest()
        if agree < LEAST:
            return []
        length = min(length, 2 ** (agree - 1))  # a short match allows few drafts
        guess = self._tokens[place + 1 : place + 1 + length]
        for number in range(len(guess), length):  # the match overlaps its continuation: the piece repeats itself
            guess.append(guess[number - len(self._tokens) + 1 + place])
        return guess

    def _longest(self) -> tuple[int, int]:
        """Return the position where the longest match of the last tokens ends, and the number of matching tokens."""
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
        """Index the new pairs except the last one, which is the pair to search for."""
        tokens, heads, before = self._tokens, self._heads, self._before
        for place in range(len(before), len(tokens) - 1):
            key = _hash(tokens[place - 1], tokens[place])
            before.append(heads[key])
            heads[key] = place


def _hash(first: int, second: int) -> int:
    return hash((first, second)) % TABLE
