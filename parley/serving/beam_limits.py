"""Checks of beam search requests: contradicting options, and whether the beams fit into the engine.

Knows nothing of how the search works.
"""

from __future__ import annotations

import msgspec

from parley.errors import Invalid
from parley.types import ModelInfo, Request, Sampling

OFF = Sampling()
DRAWING = ("top_p", "top_k", "min_p", "typical_p")  # temperature is tolerated: clients send it with every request


def settle(request: Request, slots: int) -> None:
    """Check that the options of a beam search do not contradict each other and that its beams fit into ``slots``.

    A search with a single beam is greedy decoding, so the request is changed to that. Raises Invalid.
    """
    beam = request.beam
    if beam is None:
        return
    for name in DRAWING:
        if getattr(request.sampling, name) != getattr(OFF, name):
            told = f"'{name}' controls sampling, but '{beam.field}' does not sample. Leave one of the two out."
            raise Invalid(told, field=name)
    if request.want.named:
        told = f"'logprob_token_ids' applies to sampled tokens, but '{beam.field}' does not sample. Leave one out."
        raise Invalid(told, field="logprob_token_ids")
    if request.best_of is not None:
        told = f"'best_of' ranks sampled answers, but '{beam.field}' does not sample. Leave one of the two out."
        raise Invalid(told, field="best_of")
    if beam.width > slots:
        told = f"'{beam.field}': {beam.width} beams exceed the {slots} sequences that this server computes at once."
        raise Invalid(told, field=beam.field)
    if beam.width == 1:
        request.beam = None
        request.sampling = msgspec.structs.replace(request.sampling, temperature=0.0)


def room(request: Request, info: ModelInfo, prompt: int, wanted: int) -> int | None:
    """Return how many tokens each beam may have after a prompt of ``prompt_tokens`` tokens; None without a beam search.

    All beams must fit into the KV cache as if they shared nothing, because they may diverge that far. Raises Invalid
    if fewer than ``min_output_tokens`` tokens fit.
    """
    beam = request.beam
    if beam is None:
        return None
    left = (info.kv_blocks // beam.width - 1) * info.block_size - prompt
    if left < max(1, wanted):
        raise Invalid(
            f"'{beam.field}': {beam.width} beams of {prompt + max(1, wanted)} tokens each, prompt included, do not "
            "fit into the KV cache. Ask for fewer beams or fewer tokens.",
            field=beam.field,
        )
    return left
