"""The options of a request that parley's plugin applies inside vLLM's workers, as they travel with the request."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.model.sampling.extra_options import ExtraOptions
from parley.types import EngineRequest, SamplingOptions

EXTRA_NAME = "parley"  # in vLLM's ``SamplingParams.extra_args``
NEUTRAL_SAMPLING = SamplingOptions()


def extra_sampling_fields(request: EngineRequest, forced: list[int]) -> dict[str, Any]:
    """Return the members of ``SamplingParams`` that carry the options of a request; {} if it has none.

    ``forced``: the tokens that the choice must draw first.
    """
    sampling = request.sampling
    cuts_typical = sampling.typical_p < 1 and sampling.temperature > 0
    options = ExtraOptions(
        watermark=sampling.watermark,
        no_repeat_ngram=sampling.no_repeat_ngram,
        reasoning_limit=request.reasoning_limit,
        forced=forced,
    )
    neutral: dict[str, Any] = {}
    if cuts_typical:
        cuts = {name: getattr(sampling, name) for name in ("temperature", "min_p", "top_k", "top_p", "typical_p")}
        options = msgspec.structs.replace(options, **cuts)
        neutral |= {"min_p": 0.0, "top_k": 0, "top_p": 1.0}
    if sampling.penalty_window:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalties = {name: getattr(sampling, name) for name in (*names, "penalty_window")}
        options = msgspec.structs.replace(options, penalties=SamplingOptions(**penalties))
        neutral |= {name: getattr(NEUTRAL_SAMPLING, name) for name in names}
    if options == ExtraOptions():
        return {}
    return neutral | {"extra_args": {EXTRA_NAME: msgspec.to_builtins(options)}}


def read_extra_options(extra_args: dict[str, Any] | None) -> ExtraOptions | None:
    """Return the options in a request's ``extra_args``, None if it has none of these."""
    if not extra_args or EXTRA_NAME not in extra_args:
        return None
    return msgspec.convert(extra_args[EXTRA_NAME], ExtraOptions)
