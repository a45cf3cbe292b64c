"""What attention is told: the shape of a layer's cache, and which rows of a batch are whose. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKV:
    """What one layer caches for a token: ``heads`` keys and values of ``dim`` numbers (``value_dim`` if it differs)."""

    heads: int
    dim: int
    value_dim: int


@dataclass
class Span:
    """Tokens ``first .. first + count`` of the batch belong to one sequence and are its last ``count`` of ``length``.

    Token ``first + i`` may attend to positions 0 .. length - count + i of ``table`` (page ids of the sequence).
    """

    first: int
    count: int
    length: int
    table: list[int]
