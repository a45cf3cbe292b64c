"""Reads the weights of experts from stacked tensors, which hold the weights of all experts of a layer.

Plain ones are [experts, out, in], or [experts, in, out]; those of GGUF files have blocks, [experts, out, in]. MXFP4, as
GPT-OSS is published: ``NAME_blocks`` uint8 [experts, out, in / 32, 16] has two 4-bit numbers (e2m1) in a byte along the
inputs, the first in the low bits; ``NAME_scales`` uint8 [experts, out, in / 32] has the exponent of each block's scale:
2 to the power of byte - 127. FP8 (e4m3): NAME [experts, out, in], and ``NAME_scale_inv`` [experts, out blocks, in
blocks], or [experts, 1, 1], has its factors, or as bytes their exponents (MXFP8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp4 import MXFP4_GROUP, read_mxfp4
from parley.model.checkpoint.fp8 import read_fp8, view_scales
from parley.model.checkpoint.weights import GgufBlockWeight, LinearSpec, LinearWeight, PlainWeight


class StackedFormat(Protocol):
    """The storage format of a weight that holds those of all experts. ``linear`` describes one of them."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight, without the bias."""

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return the tensors as views of the file. Raises LoadError if shapes or types are not as expected."""

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one of ``experts``. Raises LoadError."""


@dataclass(frozen=True)
class StackedPlainFormat:
    """One tensor of floating-point numbers, or of a GGUF file's blocks of them. ``transposed``: each expert's
    matrix is [in, out]; False: it is [out, in]; None: the shape decides, and [out, in] has precedence.
    ``has_joined_rows``: the matrices of all experts, [out, in] unless ``transposed`` of a linear layer says
    otherwise, are one [experts * rows, columns]."""

    transposed: bool | None = False
    has_joined_rows: bool = False

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the name of the tensor."""
        return [linear.name]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return the tensor [experts, out, in], or its blocks [experts, out, bytes of a row], as a view of the file.

        Raises LoadError.
        """
        shape, is_transposed = self._stored_shape(checkpoint, linear, experts)
        if checkpoint.block_type(linear.name) is not None:
            return [checkpoint.view_blocks(linear.name, *shape)]
        if self.has_joined_rows:
            stacked = checkpoint.view_tensor(linear.name, shape[0] * shape[1], shape[2]).view(shape)
        else:
            stacked = checkpoint.view_tensor(linear.name, *shape)
        return [stacked.mT if is_transposed else stacked]

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one expert. Raises LoadError."""
        shape, is_transposed = self._stored_shape(checkpoint, linear, experts)
        if (blocks := checkpoint.block_type(linear.name)) is not None:
            return GgufBlockWeight(checkpoint.view_blocks(linear.name, *shape)[expert], blocks)
        if self.has_joined_rows:
            values = self.view_tensors(checkpoint, linear, experts)[0][expert]
            return PlainWeight(values)
        values = checkpoint.view_item(linear.name, expert, shape)
        return PlainWeight(values.mT if is_transposed else values)

    def _stored_shape(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> tuple[tuple[int, ...], bool]:
        """Return the shape of the tensor, and whether each expert's is [in, out]. Raises LoadError."""
        shape = experts, linear.out_features, linear.in_features
        if checkpoint.block_type(linear.name) is not None:
            return shape, False
        is_transposed = checkpoint.tensor_shape(linear.name) != shape if self.transposed is None else self.transposed
        is_transposed = linear.transposed if self.has_joined_rows else is_transposed
        return ((experts, linear.in_features, linear.out_features) if is_transposed else shape), is_transposed


class StackedMxfp4Format:
    """Blocks of 4-bit numbers and their scales."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of blocks and scales."""
        return [linear.name + "_blocks", linear.name + "_scales"]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return blocks and scales as views of the file. Raises LoadError."""
        blocks, scales = self.tensor_names(checkpoint, linear)
        if linear.in_features % MXFP4_GROUP:
            raise LoadError(
                f"Tensor {blocks} has {linear.in_features} inputs, which are not whole blocks of {MXFP4_GROUP}."
            )
        shape = experts, linear.out_features, linear.in_features // MXFP4_GROUP
        return [
            checkpoint.view_tensor(blocks, *shape, MXFP4_GROUP // 2, dtype=torch.uint8),
            checkpoint.view_tensor(scales, *shape, dtype=torch.uint8),
        ]

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one expert. Raises LoadError."""
        blocks, scales = self.view_tensors(checkpoint, linear, experts)
        return read_mxfp4(blocks[expert].flatten(1), scales[expert])


@dataclass(frozen=True)
class StackedFp8Format:
    """Numbers of 8 bits and their scales. ``block``: as in ``Fp8Format``, or None for one scale for each expert."""

    block: tuple[int, int] | None

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the numbers and of their scales."""
        return [linear.name, linear.name + "_scale_inv"]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return numbers and scales as views of the file. Raises LoadError."""
        name, scale = self.tensor_names(checkpoint, linear)
        blocks = (
            (1, 1)
            if self.block is None
            else (-(-linear.out_features // self.block[0]), -(-linear.in_features // self.block[1]))
        )
        return [
            checkpoint.view_tensor(name, experts, linear.out_features, linear.in_features, dtype=torch.float8_e4m3fn),
            view_scales(checkpoint, scale, experts, *blocks),
        ]

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one expert. Raises LoadError, also if a number of it is NaN."""
        values, scales = self.view_tensors(checkpoint, linear, experts)
        return read_fp8(values[expert], scales[expert], self.block, linear.name)
