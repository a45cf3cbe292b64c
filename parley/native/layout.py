"""The inputs of attention: the shape of a layer's KV cache, and the batch rows of a sequence. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKV:
    """What the KV cache of one layer stores for a token: ``heads`` keys of ``dim`` numbers and values of ``value_dim``.

    ``has_latents``: a value is the first ``value_dim`` numbers of its key, and is not stored again. A ``value_dim`` of
    0 means the keys of an indexer (``IndexerShape``), which no attention reads.
    """

    heads: int
    dim: int
    value_dim: int
    has_latents: bool = False


@dataclass
class RowSpan:
    """Batch tokens ``first .. first + count``, which are the last ``count`` of the ``length`` tokens of one sequence.

    Token ``first + i`` may attend to positions 0 .. length - count + i of ``table`` (page ids of the sequence).
    """

    first: int
    count: int
    length: int
    table: list[int]
