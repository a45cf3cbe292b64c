"""When a choice ends by its tokens. Stop strings are matched by the server, which then cancels the choice.

Looks at one sequence at a time and knows nothing of scheduling.
"""

from __future__ import annotations

from parley.core.sequence import Sequence
from parley.types import Finish, Work


def allowance(work: Work, context: int) -> int:
    """Return the output limit of a choice: ``max_tokens``, or the rest of ``context`` (tokens) if that is less.

    0 means that only the prompt is computed, for its scores or its vector.
    """
    if work.pooling is not None:
        return 0
    return max(0, min(work.max_tokens, context - len(work.token_ids)))


def verdict(sequence: Sequence) -> Finish | None:
    """Return why the sequence ends with its last token, or None if it continues.

    A stop token counts only after ``min_tokens`` other tokens: until then the sampler forbids it. "stop" takes
    precedence over "length" when both apply.
    """
    generated = len(sequence.tokens) - sequence.prompt_len
    if sequence.tokens[-1] in sequence.stops and generated > sequence.work.min_tokens:
        return "stop"
    return "length" if generated >= sequence.limit else None
