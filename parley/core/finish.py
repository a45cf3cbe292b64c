"""When a choice ends, as far as tokens decide it. Stop strings are the server's affair: it cancels the choice.

Knows one sequence at a time and nothing of scheduling.
"""

from __future__ import annotations

from parley.core.sequence import Sequence
from parley.types import Finish, Work


def allowance(work: Work, context: int) -> int:
    """How many output tokens a choice may have: ``max_tokens``, or what ``context`` (tokens) leaves, if that is less.

    0 means that only the prompt is computed, as for scoring it or for its vector.
    """
    if work.pooling is not None:
        return 0
    return max(0, min(work.max_tokens, context - len(work.token_ids)))


def verdict(sequence: Sequence) -> Finish | None:
    """Whether the sequence has ended with its last token.

    A stop token counts only after ``min_tokens`` others: up to there the sampler forbids it, and a stop token is never
    one of the tokens that were asked for at least. "stop" wins over "length" when both hold.
    """
    generated = len(sequence.tokens) - sequence.prompt_len
    if sequence.tokens[-1] in sequence.stops and generated > sequence.work.min_tokens:
        return "stop"
    return "length" if generated >= sequence.limit else None
