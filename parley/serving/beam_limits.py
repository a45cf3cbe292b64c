"""Checks of beam search requests: contradicting options, and whether the beams fit into the engine.

Knows nothing of how the search works.
"""

from __future__ import annotations

import msgspec

from parley.errors import InvalidValue
from parley.types import ModelInfo, Request, SamplingOptions

NEUTRAL_SAMPLING = SamplingOptions()
# Options that a beam search refuses. It accepts temperature, which clients send with every request.
SAMPLING_FILTERS = (
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
)


def check_beam_search(request: Request, slots: int) -> None:
    """Check that the options of a beam search do not contradict each other and that its beams fit into ``slots``.

    A search with a single beam is greedy decoding, so the request is changed to that. Raises InvalidValue.
    """
    beam_options = request.beam
    if beam_options is None:
        return
    for name in SAMPLING_FILTERS:
        if getattr(request.sampling, name) != getattr(NEUTRAL_SAMPLING, name):
            message = (
                f"'{name}' controls sampling, but '{beam_options.field}' does not sample. Leave one of the two out."
            )
            raise InvalidValue(message, field=name)
    if request.output_options.logprob_ids:
        message = (
            f"'logprob_token_ids' applies to sampled tokens, but '{beam_options.field}' does not sample. Leave one out."
        )
        raise InvalidValue(message, field="logprob_token_ids")
    if request.best_of is not None:
        message = (
            f"'best_of' ranks sampled answers, but '{beam_options.field}' does not sample. Leave one of the two out."
        )
        raise InvalidValue(message, field="best_of")
    if beam_options.width > slots:
        message = (
            f"'{beam_options.field}': {beam_options.width} beams exceed the {slots} sequences that this server "
            "computes at once."
        )
        raise InvalidValue(message, field=beam_options.field)
    if beam_options.width == 1:
        request.beam = None
        request.sampling = msgspec.structs.replace(request.sampling, temperature=0.0)


def beam_output_limit(request: Request, info: ModelInfo, prompt_tokens: int, min_output_tokens: int) -> int | None:
    """Return how many tokens each beam may have after a prompt of ``prompt_tokens`` tokens; None without a beam search.

    All beams must fit into the KV cache as if they shared nothing, because they may diverge that far. Raises
    InvalidValue if fewer than ``min_output_tokens`` tokens fit.
    """
    beam_options = request.beam
    if beam_options is None:
        return None
    output_limit = (info.kv_pages // beam_options.width - 1) * info.page_tokens - prompt_tokens
    if output_limit < max(1, min_output_tokens):
        raise InvalidValue(
            f"'{beam_options.field}': {beam_options.width} beams of {prompt_tokens + max(1, min_output_tokens)} tokens "
            "each, prompt included, do not fit into the KV cache. Ask for fewer beams or fewer tokens.",
            field=beam_options.field,
        )
    return output_limit
