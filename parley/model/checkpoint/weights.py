"""The kinds of linear weights in memory: plain, int8 with a scale per output, groups of 1 to 8 bits, blocks of GGUF.

Each kind defines its product (for the numeric check), and how several parts are merged into one packed weight for the
kernels. This module knows no files. A new kind needs a class here and a native kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F

from parley import native
from parley.gguf.header import BlockType
from parley.model.checkpoint.gguf_blocks import decode_blocks, group_blocks
from parley.native import GroupedPieces, GroupedWeight, memory

INT4_GROUP = 128  # adjacent weights of an output that share a scale when plain weights are quantized to 4 bits
REGROUPED_AT_ONCE = 1 << 20  # numbers of GGUF blocks that are rearranged at a time
QUANTIZED_AT_ONCE = 1 << 22  # numbers quantized at a time; bounds the float32 intermediates


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer as the checkpoint names it. It turns ``in_features`` numbers of each token into
    ``out_features`` numbers.

    ``groups``: (count, sizes) if the checkpoint stores its outputs in ``count`` equal groups, each with parts of these
    ``sizes``; they are read with the first parts of all groups first, then the second ones, and so on.
    ``part_order``: the order in which the parts are read; empty: as stored.
    ``transposed``: plain weights are stored [in, out].
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    groups: tuple[int, tuple[int, ...]] | None = None
    transposed: bool = False
    part_order: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, int]:
        """The shape of its plain weight in the checkpoint."""
        return (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)

    @property
    def order(self) -> torch.Tensor | None:
        """Where each output lies in the checkpoint, int64 [out]; None if they lie in order."""
        if self.groups is None:
            return None
        count, sizes = self.groups
        rows = torch.arange(self.out_features).view(count, sum(sizes))
        parts = rows.split(list(sizes), 1)
        return torch.cat([parts[i].flatten() for i in self.part_order or range(len(parts))])


class LinearWeight(Protocol):
    """The weight of a linear layer, read from a file."""

    def multiply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows [T, in_features] by the weight, by definition and without a bias: float32 [T, out]."""

    def to_float(self) -> torch.Tensor:
        """Return the numbers as float32 [out_features, in_features]."""

    def select_outputs(self, outputs: torch.Tensor) -> Self:
        """Return the weight of these outputs only: int64 [n], numbers of outputs."""

    def can_merge(self, other: LinearWeight) -> bool:
        """Whether one packed weight can hold both."""

    @classmethod
    def pack_merged(
        cls, parts: Sequence[Self], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.PackedWeight:
        """Return one packed weight with the outputs of all parts in order, for rows of ``dtype``; ``bias`` [outputs of
        all]."""


@dataclass(frozen=True)
class PlainWeight:
    """A weight [out, in] of any floating-point dtype."""

    values: torch.Tensor

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.values.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.values.device

    def multiply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in_features] in float32: [T, out]."""
        return F.linear(x, self.to_float())

    def to_float(self) -> torch.Tensor:
        """Return the numbers as float32 [out_features, in_features]."""
        return self.values.float()

    def select_outputs(self, outputs: torch.Tensor) -> PlainWeight:
        """Return the weight of these outputs only: int64 [n]."""
        return PlainWeight(self.values[outputs])

    def can_merge(self, other: LinearWeight) -> bool:
        """Whether the other weight is plain, too, or becomes so when it is decoded."""
        return isinstance(other, PlainWeight | GgufBlockWeight)

    def decode_into(self, target: torch.Tensor) -> torch.Tensor:
        """Write the numbers to ``target`` [out_features, in_features], rounded to its dtype, and return it."""
        return target.copy_(self.values)

    @classmethod
    def pack_merged(
        cls,
        parts: Sequence[PlainWeight | GgufBlockWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> native.PackedWeight:
        """Pack the parts without copying them first if the kernels can, else a copy of all of them in ``dtype``."""
        kernels = native.kernels_of_parts(dtype, device)
        if kernels is not None:
            return kernels.pack_weight_parts([_numbers_of(part, dtype) for part in parts], bias)
        sizes, in_features = [part.out_features for part in parts], parts[0].in_features
        merged = memory.map_tensor(sum(sizes) * in_features, dtype, parts[0].device).view(-1, in_features)
        for rows, part in zip(merged.split(sizes), parts, strict=True):
            part.decode_into(rows)
        return native.pack_weight(merged.to(device), bias)


@dataclass(frozen=True)
class GgufBlockWeight:
    """Blocks of a GGUF file as they are stored: uint8 [out, bytes of a row]."""

    rows: torch.Tensor
    blocks: BlockType

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.rows.shape[0]

    @property
    def in_features(self) -> int:
        """The number of inputs."""
        return self.rows.shape[1] // self.blocks.size * self.blocks.numbers

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.rows.device

    def multiply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in_features] by the decoded weight: float32 [T, out]."""
        return torch.cat([F.linear(x, rows) for rows in self._decoded_parts()], -1)

    def to_float(self) -> torch.Tensor:
        """Return the decoded numbers, float32 [out_features, in_features]."""
        return torch.cat(list(self._decoded_parts()))

    def select_outputs(self, outputs: torch.Tensor) -> GgufBlockWeight:
        """Return the weight of these outputs only: int64 [n]."""
        return GgufBlockWeight(self.rows[outputs], self.blocks)

    def can_merge(self, other: LinearWeight) -> bool:
        """Whether the other weight can be decoded as well, or is plain."""
        return isinstance(other, GgufBlockWeight | PlainWeight)

    def decode_into(self, target: torch.Tensor) -> torch.Tensor:
        """Write the numbers to ``target`` [out_features, in_features], rounded to its dtype, and return it."""
        done = 0
        for rows in self._decoded_parts():
            target[done : done + len(rows)] = rows
            done += len(rows)
        return target

    def _decoded_parts(self) -> Iterator[torch.Tensor]:
        """Yield float32 rows, a part at a time, which bounds the intermediates."""
        for rows in self.rows.split(max(1, QUANTIZED_AT_ONCE // self.in_features)):
            yield decode_blocks(rows.reshape(-1, self.blocks.size), self.blocks.name).view(len(rows), -1)

    def regroup(self, panel: int) -> GroupedPieces:
        """Return the same weight in a form that kernels read, in pieces of a multiple of ``panel`` outputs whose
        intermediates fit into the CPU cache."""
        pieces = self.rows.split(max(1, REGROUPED_AT_ONCE // (self.in_features * panel)) * panel)
        return GroupedPieces(
            self.out_features,
            (group_blocks(rows.reshape(-1, self.blocks.size), self.blocks.name, len(rows)) for rows in pieces),
        )

    @classmethod
    def pack_merged(
        cls,
        parts: Sequence[PlainWeight | GgufBlockWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> native.PackedWeight:
        """Pack the parts as they are if a kernel reads them so; else decode all of them into ``dtype``."""
        kernels = native.kernels_of_parts(dtype, device)
        if kernels is not None:
            blocks = [block for block in _join_alike(parts) if isinstance(block, GgufBlockWeight)]
            if sum(block.out_features for block in blocks) == sum(part.out_features for part in parts):
                return kernels.pack_grouped_parts(
                    [block.regroup(kernels.grouped_panel_outputs) for block in blocks], bias
                )
        return PlainWeight.pack_merged(parts, bias, dtype, device)


def _numbers_of(part: PlainWeight | GgufBlockWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a weight in ``dtype`` [out_features, in_features]: a copy unless they are stored so."""
    if isinstance(part, PlainWeight) and part.values.dtype == dtype and part.values.is_contiguous():
        return part.values
    return part.decode_into(
        memory.map_tensor(part.out_features * part.in_features, dtype, part.device).view(-1, part.in_features)
    )


def _join_alike(parts: Sequence[PlainWeight | GgufBlockWeight]) -> list[PlainWeight | GgufBlockWeight]:
    """Join adjacent parts with the same type of blocks."""
    merged: list[PlainWeight | GgufBlockWeight] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, GgufBlockWeight) and isinstance(last, GgufBlockWeight) and part.blocks == last.blocks:
            merged[-1] = GgufBlockWeight(torch.cat((last.rows, part.rows)), part.blocks)
        else:
            merged.append(part)
    return merged


class StoredRows(Protocol):
    """The rows of an embedding table, as they are stored."""

    @property
    def in_features(self) -> int:
        """The numbers of a row."""

    def select_outputs(self, outputs: torch.Tensor) -> Self:
        """Return these rows only: int64 [n], numbers of rows."""

    def decode_into(self, target: torch.Tensor) -> torch.Tensor:
        """Write the numbers to ``target`` [rows, in_features], rounded to its dtype, and return it."""


@dataclass(frozen=True)
class StoredEmbedding:
    """An embedding table of few bits per number. Rows are decoded when a step needs them, because most are never used.

    ``device``: where the rows are."""

    table: StoredRows
    dtype: torch.dtype
    device: torch.device

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return rows [T, hidden] of a table [vocab, hidden] (``dim`` 0, int64 [T])."""
        assert dim == 0
        return self.table.select_outputs(index).decode_into(
            torch.empty(len(index), self.table.in_features, dtype=self.dtype)
        )


@dataclass(frozen=True)
class Int8Weight:
    """int8 values [out, in] with float32 scales [out]: output n has the weights ``values[n] * scales[n]``.

    Input rows are quantized too, each with its own scale, so that the products are of integers.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def from_float(cls, weight: torch.Tensor) -> Int8Weight:
        """Return the nearest int8 weight of a floating-point one [out, in]. Each output's largest value becomes 127."""
        parts = [native.quantize_rows(rows) for rows in weight.split(max(1, QUANTIZED_AT_ONCE // weight.shape[1]))]
        values = torch.cat([part.values[:, : weight.shape[1]] for part in parts])
        return cls(values, torch.cat([part.scales for part in parts]))

    def multiply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in_features] as the kernels do, which quantize them: float32 [T, out]."""
        rows = native.quantize_rows(x)
        exact = F.linear(rows.values.float() * rows.scales[:, None], self.values.float())
        return exact * self.scales

    def to_float(self) -> torch.Tensor:
        """Return the numbers as float32 [out_features, in_features]."""
        return self.values.float() * self.scales[:, None]

    def select_outputs(self, outputs: torch.Tensor) -> Int8Weight:
        """Return the weight of these outputs only: int64 [n]."""
        return Int8Weight(self.values[outputs], self.scales[outputs])

    def can_merge(self, other: LinearWeight) -> bool:
        """Whether the other weight is int8, too."""
        return isinstance(other, Int8Weight)

    @classmethod
    def pack_merged(
        cls, parts: Sequence[Int8Weight], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.PackedWeight:
        """Pack the parts without copying them first if the kernels can, else a copy of all of them."""
        scales = torch.cat([part.scales for part in parts])
        values = [part.values for part in parts]
        kernels = native.kernels_of_parts(dtype, device)
        if kernels is not None:
            return kernels.pack_int8_parts(values, scales, bias)
        return native.pack_int8(torch.cat(values).to(device), scales.to(device), bias, dtype)


@dataclass(frozen=True)
class GroupedLinearWeight:
    """Weights of 1 to 8 bits with a scale, and for some codes a zero point, for each group of an output's weights.

    Rows are not quantized.
    """

    weight: GroupedWeight

    @classmethod
    def from_float(cls, weight: torch.Tensor) -> GroupedLinearWeight:
        """Return the nearest 4-bit weight of a floating-point one [out, in], in groups of INT4_GROUP."""
        return cls(native.round_int4(weight, INT4_GROUP))

    def multiply_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply rows [T, in_features] by the dequantized weight: float32 [T, out]."""
        return F.linear(x, self.to_float())

    def to_float(self) -> torch.Tensor:
        """Return the dequantized numbers, float32 [out_features, in_features]."""
        return native.dequantize_grouped(self.weight)

    def select_outputs(self, outputs: torch.Tensor) -> GroupedLinearWeight:
        """Return the weight of these outputs only: int64 [n]."""
        weight = self.weight
        zeros, out_scales = (
            None if tensor is None else tensor[outputs] for tensor in (weight.zeros, weight.out_scales)
        )
        return GroupedLinearWeight(
            weight._replace(
                values=weight.values[outputs], scales=weight.scales[outputs], zeros=zeros, out_scales=out_scales
            )
        )

    def can_merge(self, other: LinearWeight) -> bool:
        """Whether the other weight has the same code, group size and input order."""
        if not isinstance(other, GroupedLinearWeight):
            return False
        if (self.weight.code, self.weight.group) != (other.weight.code, other.weight.group):
            return False
        own_order, other_order = self.weight.order, other.weight.order
        return own_order is other_order or (
            own_order is not None and other_order is not None and torch.equal(own_order, other_order)
        )

    @classmethod
    def pack_merged(
        cls, parts: Sequence[GroupedLinearWeight], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.PackedWeight:
        """Concatenate values, scales and zero points, and pack them."""
        weights = [part.weight for part in parts]

        def join(name: str) -> Any:
            tensors = [getattr(weight, name) for weight in weights]
            if tensors[0] is None:
                return None
            return (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).to(device)

        merged = weights[0]._replace(**{name: join(name) for name in ("values", "scales", "zeros", "out_scales")})
        return native.pack_grouped(merged, bias, dtype)


class UnlikeWeights:
    """Merges weights that are stored differently, such as those of an unquantized layer and of a quantized one, or of
    4 and of 8 bits."""

    @classmethod
    def pack_merged(
        cls, parts: Sequence[LinearWeight], bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> native.PackedWeight:
        """Pack the parts as they are if a kernel reads them so; else decode all of them into ``dtype``."""
        grouped = [part.weight for part in parts if isinstance(part, GroupedLinearWeight)]
        have_common_rows = all(weight.order is None and weight.out_scales is None for weight in grouped)
        kernels = native.kernels_of_parts(dtype, device)
        if len(grouped) == len(parts) and have_common_rows and kernels is not None:
            return kernels.pack_grouped_parts(grouped, bias)
        return PlainWeight.pack_merged([PlainWeight(part.to_float()) for part in parts], bias, dtype, device)
