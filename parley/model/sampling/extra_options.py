"""Options of sampling that engines other than parley's do not have."""

from __future__ import annotations

import msgspec

from parley.types import ReasoningLimit, Sampling


class ExtraOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options with their neutral values; as in ``Sampling`` and ``EngineRequest``.

    ``temperature``, ``min_p``, ``top_k``, ``top_p``: the cuts before ``typical_p``, if the request has that one: the
    engine itself does not cut then. ``penalties``: those of a request whose penalties have a window, which the engine
    itself does not apply then. ``forced``: the tokens that the output begins with.
    """

    watermark: bool = False
    no_repeat_ngram: int = 0
    penalties: Sampling | None = None
    reasoning_limit: ReasoningLimit | None = None
    typical_p: float = 1.0
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    forced: list[int] = []
