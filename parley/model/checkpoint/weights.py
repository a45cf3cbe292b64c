"""The kinds of linear weights once read: plain, int8 with a scale per output, and 4 bits in groups.

Each kind defines its product (for the numeric check) and how several merged parts become one packed weight for the
kernels. It knows nothing of files. A new kind needs a class here and a native kernel.
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
PIECE = 1 << 22  # numbers quantised at a time; bounds the float32 intermediates


@dataclass(frozen=True)
class Linear:
    """A linear layer as the checkpoint names it, from ``into`` to ``out`` numbers per token."""

    name: str
    out: int
    into: int
    bias: bool = False


class Weight(Protocol):
    """The weight of a linear layer, read from a file."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows [T, into] by the weight, by definition and without a bias: float32 [T, out]."""

    def select(self, outputs: torch.Tensor) -> Self:
        """Return the weight of these outputs only (int64 indices)."""

    def joins(self, other: Weight) -> bool:
        """Whether one packed weight can hold both."""

    @classmethod
    def pack(
        cls, parts: Sequence[Self], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        """Return one packed weight with the outputs of all parts in order, for rows of ``dtype``."""


@dataclass(frozen=True)
class Plain:
    """A weight [out, in] of any floating-point dtype."""

    values: torch.Tensor

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply in float32."""
        return F.linear(x, self.values.float())

    def select(self, outputs: torch.Tensor) -> Plain:
        """Return the weight of these outputs only."""
        return Plain(self.values[outputs])

    def joins(self, other: Weight) -> bool:
        """Whether the other weight is plain, too."""
        return isinstance(other, Plain)

    @classmethod
    def pack(
        cls, parts: Sequence[Plain], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        """Copy the parts into one tensor of ``dtype`` and pack it."""
        sizes, into = [part.values.shape[0] for part in parts], parts[0].values.shape[1]
        merged = memory.mapped(sum(sizes) * into, dtype).view(-1, into)
        for rows, part in zip(merged.split(sizes), parts, strict=True):
            rows.copy_(part.values)
        return native.pack(merged.to(device), bias)


@dataclass(frozen=True)
class Int8:
    """int8 values [out, in] with float32 scales [out]: output n has the weights ``values[n] * scales[n]``.

    Input rows are quantised too, each with its own scale, so that the products are of integers.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        """Return the nearest int8 weight of a floating-point one [out, in]. Each output's largest value becomes 127."""
        parts = [native.quantise(rows) for rows in weight.split(max(1, PIECE // weight.shape[1]))]
        values = torch.cat([part.values[:, : weight.shape[1]] for part in parts])
        return cls(values, torch.cat([part.scales for part in parts]))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply as the kernels do, with quantised rows."""
        rows = native.quantise(x)
        exact = F.linear(rows.values.float() * rows.scales[:, None], self.values.float())
        return exact * self.scales

    def select(self, outputs: torch.Tensor) -> Int8:
        """Return the weight of these outputs only."""
        return Int8(self.values[outputs], self.scales[outputs])

    def joins(self, other: Weight) -> bool:
        """Whether the other weight is int8, too."""
        return isinstance(other, Int8)

    @classmethod
    def pack(
        cls, parts: Sequence[Int8], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        """Concatenate values and scales, and pack them."""
        values, scales = (torch.cat(each) for each in zip(*((part.values, part.scales) for part in parts), strict=True))
        return native.pack_int8(values.to(device), scales.to(device), bias, dtype)


@dataclass(frozen=True)
class Int4:
    """4-bit integers with a scale and a zero point for each group of an output's weights. Rows are not quantised."""

    weight: Grouped

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int4:
        """Return the nearest 4-bit weight of a floating-point one [out, in], in groups of INT4_GROUP."""
        return cls(native.round_int4(weight, GROUP))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the dequantised weight."""
        return F.linear(x, native.widen(self.weight))

    def select(self, outputs: torch.Tensor) -> Int4:
        """Return the weight of these outputs only."""
        values, scales, zeros = (each[outputs] for each in self.weight[:3])
        return Int4(self.weight._replace(values=values, scales=scales, zeros=zeros))

    def joins(self, other: Weight) -> bool:
        """Whether the other weight has the same group size and input order."""
        if not isinstance(other, Int4) or self.weight.group != other.weight.group:
            return False
        one, two = self.weight.order, other.weight.order
        return one is two or (one is not None and two is not None and torch.equal(one, two))

    @classmethod
    def pack(
        cls, parts: Sequence[Int4], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.Packed:
        """Concatenate values, scales and zero points, and pack them."""
        columns = zip(*(part.weight[:3] for part in parts), strict=True)
        values, scales, zeros = (torch.cat(each).to(device) for each in columns)
        return native.pack_int4(parts[0].weight._replace(values=values, scales=scales, zeros=zeros), bias, dtype)
