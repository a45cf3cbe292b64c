"""Sampling options that other engines' samplers lack."""

from __future__ import annotations

import msgspec

from parley.types import ReasoningLimit, SamplingOptions


class ExtraOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options with their neutral values; as in ``SamplingOptions`` and ``EngineRequest``.

    ``temperature``, ``min_p``, ``top_k``, ``top_p``: set only with ``typical_p``, which they precede; then the engine
    itself does not apply them. ``penalties``: those of a request whose penalties have a window; then the engine itself
    applies none. ``forced``: the tokens that the output begins with.
    """

    watermark: bool = False
    no_repeat_ngram: int = 0
    penalties: SamplingOptions | None = None
    reasoning_limit: ReasoningLimit | None = None
    typical_p: float = 1.0
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    forced: list[int] = []
