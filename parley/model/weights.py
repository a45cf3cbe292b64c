"""What the weight of a linear layer can be once it is read: plain, int8 with a scale per output, or 4 bits in groups.

Each kind knows three things: what it computes by definition (for the proof), how several that are merged become one
packed weight for the kernels, and nothing of files. A new kind is a class here and a kernel behind ``native``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F

from parley import native
from parley.native import Grouped, memory

GROUP = 128  # weights of an output that share a scale when they are rounded to 4 bits
PIECE = 1 << 22  # numbers that are quantised at a time: what is in between is in float32


@dataclass(frozen=True)
class Linear:
    """A linear layer as the checkpoint names it: ``into`` numbers of a row become ``out``."""

    name: str
    out: int
    into: int
    bias: bool = False


class Weight(Protocol):
    """The weight of a linear layer, out of some file."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """float32 rows [T, into] through the layer, by its definition and without a bias: float32 [T, out]."""

    def select(self, outputs: torch.Tensor) -> Self:
        """The layer with only these of its outputs."""

    def joins(self, other: Weight) -> bool:
        """Whether one packed layer can hold both."""

    @classmethod
    def pack(
        cls, parts: Sequence[Self], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        """One layer whose outputs are those of the parts in their order, for rows of ``dtype``."""


@dataclass(frozen=True)
class Plain:
    """Numbers [out, in] of any floating type."""

    values: torch.Tensor

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.values.float())

    def select(self, outputs: torch.Tensor) -> Plain:
        return Plain(self.values[outputs])

    def joins(self, other: Weight) -> bool:
        return isinstance(other, Plain)

    @classmethod
    def pack(
        cls, parts: Sequence[Plain], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        sizes, into = [part.values.shape[0] for part in parts], parts[0].values.shape[1]
        merged = memory.mapped(sum(sizes) * into, dtype).view(-1, into)
        for rows, part in zip(merged.split(sizes), parts, strict=True):
            rows.copy_(part.values)
        return native.pack(merged.to(device), bias)


@dataclass(frozen=True)
class Int8:
    """int8 [out, in], and float32 [out]: output n has the weights ``values[n] * scales[n]``.

    The rows that go in are quantised too, each with its own scale (``native.quantise``), so that the products are
    of integers.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        """The nearest int8 weight: each output's largest number becomes 127."""
        parts = [native.quantise(rows) for rows in weight.split(max(1, PIECE // weight.shape[1]))]
        values = torch.cat([part.values[:, : weight.shape[1]] for part in parts])
        return cls(values, torch.cat([part.scales for part in parts]))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        rows = native.quantise(x)
        exact = F.linear(rows.values.float() * rows.scales[:, None], self.values.float())
        return exact * self.scales

    def select(self, outputs: torch.Tensor) -> Int8:
        return Int8(self.values[outputs], self.scales[outputs])

    def joins(self, other: Weight) -> bool:
        return isinstance(other, Int8)

    @classmethod
    def pack(
        cls, parts: Sequence[Int8], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        values, scales = (torch.cat(each) for each in zip(*((part.values, part.scales) for part in parts), strict=True))
        return native.pack_int8(values.to(device), scales.to(device), bias, dtype)


@dataclass(frozen=True)
class Int4:
    """4-bit integers with a scale and a zero point for each group of an output's weights. Rows stay as they are."""

    weight: Grouped

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int4:
        """The nearest 4-bit weight, in groups of GROUP."""
        return cls(native.round_int4(weight, GROUP))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, native.widen(self.weight))

    def select(self, outputs: torch.Tensor) -> Int4:
        values, scales, zeros = (each[outputs] for each in self.weight[:3])
        return Int4(self.weight._replace(values=values, scales=scales, zeros=zeros))

    def joins(self, other: Weight) -> bool:
        if not isinstance(other, Int4) or self.weight.group != other.weight.group:
            return False
        one, two = self.weight.order, other.weight.order
        return one is two or (one is not None and two is not None and torch.equal(one, two))

    @classmethod
    def pack(
        cls, parts: Sequence[Int4], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        columns = zip(*(part.weight[:3] for part in parts), strict=True)
        values, scales, zeros = (torch.cat(each).to(device) for each in columns)
        return native.pack_int4(parts[0].weight._replace(values=values, scales=scales, zeros=zeros), bias, dtype)
