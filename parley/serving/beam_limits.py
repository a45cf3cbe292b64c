"""What is other about a request whose answers are searched for.

Knows what fits into the engine and which wishes contradict each other; nothing of how beams are found.
"""

from __future__ import annotations

import msgspec

from parley.errors import Invalid
from parley.types import ModelInfo, Request, Sampling

OFF = Sampling()
DRAWING = ("top_p", "top_k", "min_p", "typical_p")  # temperature is let pass: clients send it with everything


def settle(request: Request, slots: int) -> None:
    """Refuse what has no meaning together, or does not fit beside each other in ``slots``. Raises Invalid.

    A single beam is greedy decoding, and is done as that.
    """
    beam = request.beam
    if beam is None:
        return
    for name in DRAWING:
        if getattr(request.sampling, name) != getattr(OFF, name):
            told = f"'{name}' says how tokens are drawn, but with '{beam.field}' none are. Leave one of the two out."
            raise Invalid(told, field=name)
    if request.want.named:
        told = f"'logprob_token_ids' is of tokens that are drawn, but with '{beam.field}' none are. Leave one out."
        raise Invalid(told, field="logprob_token_ids")
    if request.best_of is not None:
        told = f"'best_of' ranks answers that were drawn, but with '{beam.field}' none are. Leave one of the two out."
        raise Invalid(told, field="best_of")
    if beam.width > slots:
        told = f"'{beam.field}': {beam.width} beams are more than the {slots} sequences that are computed at once here."
        raise Invalid(told, field=beam.field)
    if beam.width == 1:
        request.beam = None
        request.sampling = msgspec.structs.replace(request.sampling, temperature=0.0)


def room(request: Request, info: ModelInfo, prompt: int, wanted: int) -> int | None:
    """How many tokens every beam may have behind so many of the prompt, at least as many as are ``wanted``.

    None: there are no beams. All must fit into the KV cache as if they had nothing in common, for they may come to
    that. Raises Invalid.
    """
    beam = request.beam
    if beam is None:
        return None
    left = (info.kv_blocks // beam.width - 1) * info.block_size - prompt
    if left < max(1, wanted):
        raise Invalid(
            f"'{beam.field}': {beam.width} beams of {prompt + max(1, wanted)} tokens each, with the prompt's, do not "
            "fit into the KV cache. Ask for fewer beams or fewer tokens.",
            field=beam.field,
        )
    return left
