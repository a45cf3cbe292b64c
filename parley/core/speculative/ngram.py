"""N-gram proposer: drafts repeat the tokens that followed an earlier occurrence of the sequence's last tokens.

Outputs that quote, correct or reorder their prompt repeat long pieces of it; lists, tables and programs repeat
themselves. The proposer searches for the longest earlier match, and of equally long ones the latest (Saxena 2023,
"prompt lookup decoding").

Each sequence has an index of its token pairs, with chains through arrays as in DEFLATE's match search: a table maps a
pair's hash to its latest position, and an array maps each position to the previous one. A step reads only the new
tokens and at most MAX_CHAIN positions.
"""

from __future__ import annotations

from array import array

from parley.core.sequence import DraftProposer, Sequence

TABLE_SIZE = 1 << 14  # chain heads
MAX_CHAIN = 16  # positions examined in a step
NICE_MATCH = 8  # matching tokens; a longer match does not make a better draft
MIN_MATCH = 2  # matching tokens


class NgramProposer:
    """A draft proposer that works without a model; see ``core.speculative.speculation``."""

    def __init__(self) -> None:
        self._indices: dict[Sequence, NgramIndex] = {}

    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each sequence."""
        return [self._index_of(sequence).draft_continuation(length) for sequence, length in draft_limits]

    def _index_of(self, sequence: Sequence) -> NgramIndex:
        prediction = sequence.request.prediction
        index = self._indices.get(sequence)
        if index is None:
            tokens = sequence.tokens
            if prediction:  # placed between the prompt and the output
                tokens = [*tokens[: sequence.prompt_len], *prediction, *tokens[sequence.prompt_len :]]
            index = self._indices[sequence] = NgramIndex(tokens)
        elif prediction:
            index.append_tokens(sequence.tokens[len(index) - len(prediction) :])
        return index

    def forget_sequence(self, sequence: Sequence) -> None:
        """Drop the sequence's index. Unknown sequences are ignored."""
        self._indices.pop(sequence, None)


class PredictionProposer:
    """Drafts from the request's predicted output, where it has one. Other sequences use ``fallback``, or get none."""

    def __init__(self, fallback: DraftProposer | None):
        self._ngram_proposer = NgramProposer()
        self._fallback = fallback

    def propose_drafts(self, draft_limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each sequence, in order."""
        other_limits = [limit for limit in draft_limits if not limit[0].request.prediction]
        other_drafts = iter(
            self._fallback.propose_drafts(other_limits)
            if self._fallback is not None and other_limits
            else [[]] * len(other_limits)
        )
        predicted_drafts = iter(
            self._ngram_proposer.propose_drafts([limit for limit in draft_limits if limit[0].request.prediction])
        )
        return [next(predicted_drafts if sequence.request.prediction else other_drafts) for sequence, _ in draft_limits]

    def forget_sequence(self, sequence: Sequence) -> None:
        """Drop the state of the sequence in both proposers."""
        self._ngram_proposer.forget_sequence(sequence)
        if self._fallback is not None:
            self._fallback.forget_sequence(sequence)


class NgramIndex:
    """Positions of all token pairs of ``tokens``, which may only grow."""

    def __init__(self, tokens: list[int]):
        self._tokens = tokens
        self._chain_heads = array("i", [-1]) * TABLE_SIZE  # hash of a pair -> latest position of its second token
        self._previous = array("i", [-1])  # position -> previous position with this hash

    def __len__(self) -> int:
        return len(self._tokens)

    def append_tokens(self, tokens: list[int]) -> None:
        """Append tokens; they are indexed by the next ``draft_continuation``."""
        self._tokens += tokens

    def draft_continuation(self, length: int) -> list[int]:
        """Return up to ``length`` tokens that followed the longest earlier match of the last tokens."""
        self._index_new_pairs()
        position, match_length = self._longest_match()
        if match_length < MIN_MATCH:
            return []
        length = min(length, 2 ** (match_length - 1))  # a short match allows few drafts
        draft = self._tokens[position + 1 : position + 1 + length]
        for number in range(len(draft), length):  # the match overlaps its continuation: the piece repeats itself
            draft.append(draft[number - len(self._tokens) + 1 + position])
        return draft

    def _longest_match(self) -> tuple[int, int]:
        """Return the position where the longest match of the last tokens ends, and the number of matching tokens."""
        tokens, best, best_length = self._tokens, -1, 0
        if len(tokens) < MIN_MATCH:
            return best, best_length
        end = len(tokens) - 1
        position = self._chain_heads[_hash_pair(tokens[-2], tokens[-1])]
        for _ in range(MAX_CHAIN):
            if position < 0:
                break
            match_length = 0
            while (
                match_length < min(NICE_MATCH, position + 1)
                and tokens[position - match_length] == tokens[end - match_length]
            ):
                match_length += 1
            if match_length > best_length:
                best, best_length = position, match_length
                if best_length == NICE_MATCH:
                    break
            position = self._previous[position]
        return best, best_length

    def _index_new_pairs(self) -> None:
        """Index the new pairs except the last one, which is the pair to search for."""
        tokens, chain_heads, previous = self._tokens, self._chain_heads, self._previous
        for position in range(len(previous), len(tokens) - 1):
            key = _hash_pair(tokens[position - 1], tokens[position])
            previous.append(chain_heads[key])
            chain_heads[key] = position


def _hash_pair(first: int, second: int) -> int:
    return hash((first, second)) % TABLE_SIZE
