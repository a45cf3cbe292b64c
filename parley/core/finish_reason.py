"""Decides when a choice ends: by a stop token, or at its output limit. Stop strings are matched in the API process,
which then cancels the choice.
"""

from __future__ import annotations

from parley.core.rope_positions import largest_position
from parley.core.sequence import Sequence
from parley.types import EngineFinishReason, EngineRequest


def output_limit(request: EngineRequest, context: int) -> int:
    """Return the output limit of a choice: ``max_tokens``, or the rest of ``context`` (tokens) if that is less.

    Positions must fit into the context as well; those of a video may be ahead of the tokens.
    0 means that only the prompt is computed, for its scores or its vector.
    """
    if request.pooling is not None:
        return 0
    length = len(request.token_ids)
    if request.media:
        length = max(length, largest_position(request.media, length) + 1)
    return max(0, min(request.max_tokens, context - length))


def finish_reason(sequence: Sequence) -> EngineFinishReason | None:
    """Return why the sequence ends with its last token, or None if it continues.

    A stop token counts only after ``min_tokens`` other tokens: until then the sampler forbids it. "stop" takes
    precedence over "length" when both apply.
    """
    if sequence.tokens[-1] in sequence.stop_token_ids and sequence.output_length > sequence.request.min_tokens:
        return "stop"
    return "length" if sequence.output_length >= sequence.output_limit else None
