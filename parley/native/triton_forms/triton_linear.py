"""Linear layers on a GPU: the product of rows and a weight, with inner dimensions added up in order.

The weight's rows are the rows of the product (out^T = W x^T), so that a few tokens fill a tile of the tensor cores. A
program computes a tile of outputs and tokens over the whole inner dimension, in blocks and in order. It never divides
the inner dimension among programs (split-K), as cuBLAS may do, which then gives a row other bits in another batch. So
an element is one chain of the instruction ``mma.sync`` for all sizes of the tile.

``Tile.outs`` is below 64 for this reason: from there on Triton uses the instructions for groups of warps (wgmma on 9.0,
tcgen05 on 10.0), and only a GPU can show whether they round alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.triton_forms.launch import INTERPRETED, NO_FUSION
from parley.native.triton_forms.triton_packed import TritonPacked


@dataclass(frozen=True)
class Tile:
    """The size of a program's part: ``outs`` outputs of ``rows`` tokens, in steps of ``inner``, by ``warps`` warps.

    ``stages`` steps of the weight are in flight.
    """

    outs: int
    rows: int
    inner: int
    warps: int
    stages: int


# For at most this many rows. Few rows read the weight at the speed of memory, which takes many programs.
TILES = (
    (16, Tile(16, 16, 256, 4, 5)),
    (32, Tile(16, 32, 128, 4, 6)),  # with steps of 256, ptxas spills registers of the expert kernel for 9.0 and 10.0
    (64, Tile(32, 64, 128, 4, 4)),
    (1 << 62, Tile(32, 128, 64, 4, 4)),
)
GROUP_BLOCKS = tl.constexpr(8)  # blocks of outputs whose programs run next to each other, and share rows


@dataclass(frozen=True)
class LinearShape:
    """The constants of a kernel: ``in_features`` numbers to ``out_features`` numbers. ``inner``: see ``Tile``."""

    out_features: int
    in_features: int
    outs: int
    rows: int
    inner: int
    stages: int
    has_bias: bool
    is_wide: bool


@triton.jit
def tile_places(row_count: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the outputs and rows of this program's tile. Programs that run together share weights and rows."""
    row_blocks, out_blocks = tl.cdiv(row_count, shape.rows), tl.cdiv(shape.out_features, shape.outs)
    group_size = GROUP_BLOCKS * row_blocks
    first_block = tl.program_id(0) // group_size * GROUP_BLOCKS
    blocks = tl.minimum(out_blocks - first_block, GROUP_BLOCKS)
    position_in_group = tl.program_id(0) % group_size
    outs = (first_block + position_in_group % blocks) * shape.outs + tl.arange(0, shape.outs)
    rows = position_in_group // blocks * shape.rows + tl.arange(0, shape.rows)
    return outs, rows


@triton.jit
def store_tile(
    y: tl.tensor, total: tl.tensor, bias: tl.tensor, outs: tl.tensor, rows: tl.tensor, is_row: tl.tensor,
    shape: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile float32 [outs, rows], plus bias, as y [rows, out]."""
    if shape.has_bias:
        total += tl.load(bias + outs, outs < shape.out_features, 0).to(tl.float32)[:, None]
    offsets = rows[:, None].to(tl.int64) * shape.out_features + outs[None, :]
    is_stored = is_row[:, None] & (outs[None, :] < shape.out_features)
    tl.store(y + offsets, tl.trans(total).to(y.dtype.element_ty), is_stored)


@triton.jit
def multiply_tile(
    columns: tl.tensor, is_row: tl.tensor, weight: tl.tensor, outs: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Return the products of a tile's rows, which begin at ``columns``, and of the outputs ``outs`` of a weight
    [out_features, in_features]: float32 [outs, rows]."""
    weights = weight + outs[:, None].to(tl.int64) * shape.in_features
    total = tl.zeros([shape.outs, shape.rows], tl.float32)
    for first in tl.range(0, shape.in_features, shape.inner, num_stages=shape.stages):
        numbers = first + tl.arange(0, shape.inner)
        w = tl.load(
            weights + numbers[None, :], (outs[:, None] < shape.out_features) & (numbers[None, :] < shape.in_features), 0
        )
        r = tl.load(columns[None, :] + numbers[:, None], is_row[None, :] & (numbers[:, None] < shape.in_features), 0)
        if shape.is_wide:
            w, r = w.to(tl.float32), r.to(tl.float32)
        total = tl.dot(w, r, total, input_precision="ieee")
    return total


@triton.jit
def _linear_kernel(
    x: tl.tensor,  # [T, in_features], with this stride between rows
    x_stride: tl.tensor,
    weight: tl.tensor,  # [out_features, in_features]
    bias: tl.tensor,
    y: tl.tensor,  # [T, out]
    row_count: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compute one tile of a linear layer: a block of outputs for a block of rows."""
    outs, rows = tile_places(row_count, shape)
    is_row = rows < row_count
    total = multiply_tile(x + rows.to(tl.int64) * x_stride, is_row, weight, outs, shape)
    store_tile(y, total, bias, outs, rows, is_row, shape)


def uses_cublas(device: torch.device) -> bool:
    """Whether cuBLAS multiplies. ``PARLEY_CUDA_LINEARS`` is "cublas" or "triton".

    By default cuBLAS does where its kernels round alike for any number of rows if split-K is off: from 9.0 on.
    """
    choice = os.environ.get("PARLEY_CUDA_LINEARS", "")
    return choice == "cublas" or (
        choice != "triton" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def choose_tile(rows: int) -> Tile:
    """Return the tile for a product of ``rows`` rows. It changes no bit."""
    return next(tile for max_rows, tile in TILES if rows <= max_rows)


def tile_grid(tile: Tile, rows: int, out: int) -> tuple[int]:
    """Return how many programs compute a product."""
    return (triton.cdiv(out, tile.outs) * triton.cdiv(rows, tile.rows),)


def linear_shape(out_features: int, in_features: int, tile: Tile, *, has_bias: bool) -> LinearShape:
    """Return the constants of a product of plain numbers."""
    inner = min(tile.inner, max(16, triton.next_power_of_2(in_features)))
    return LinearShape(out_features, in_features, tile.outs, tile.rows, inner, tile.stages, has_bias, INTERPRETED)


def multiply_rows(x: torch.Tensor, packed: TritonPacked, result: torch.dtype, tile: Tile | None = None) -> torch.Tensor:
    """Return x [T, in] times the weight, plus bias: [T, out] of dtype ``result``."""
    rows, (out_features, in_features) = len(x), packed.weight.shape
    tile = tile or choose_tile(rows)
    shape = linear_shape(out_features, in_features, tile, has_bias=packed.bias is not None)
    y = x.new_empty(rows, out_features, dtype=result)
    if rows:
        bias = x if packed.bias is None else packed.bias
        _linear_kernel[tile_grid(tile, rows, out_features)](
            x, x.stride(0), packed.weight, bias, y, rows, shape, num_warps=tile.warps, **NO_FUSION
        )
    return y
