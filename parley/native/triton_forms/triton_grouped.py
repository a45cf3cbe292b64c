"""Linear layers on a GPU with weights of 4 or 8 bits in groups: int4, int8, FP8 (e4m3) and FP4 (e2m1).

A program dequantizes a piece of the weight in registers, rounds it to the dtype of the rows, and multiplies as in
``triton_linear``. ``GroupedWeight`` in ``torch_grouped`` defines the numbers. FP8 is decoded with shifts, so that it
needs no instructions of newer GPUs; the rows are not quantized.

Layout: 8-bit values stay [out, in]. Of 4-bit values, a byte has two columns that are PIECE apart, the first in its low
bits: byte i of a span of 2 * PIECE columns has columns i and i + PIECE. So each half of the bytes is a piece of
adjacent columns, which lies in one group. Scales and zeros are [groups, out].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from parley.native.torch_forms.torch_grouped import GroupedWeight
from parley.native.triton_forms.launch import INTERPRETED, NO_FUSION
from parley.native.triton_forms.triton_linear import Tile, store_tile, tile_grid, tile_places
from parley.native.triton_forms.triton_packed import TritonGroupedPacked

PIECE = 64  # columns that are multiplied at once, at most
MIN_PIECE = 16  # and at least: the inner dimension of the instruction
FOUR_BIT_CODES = ("int4", "e2m1")
CODES = (*FOUR_BIT_CODES, "int8", "e4m3")
WIDER_CODES = {"int2": "int4", "int3": "int4"}  # integers of fewer bits take four

TILES = ((16, Tile(16, 16, PIECE, 4, 5)), (32, Tile(16, 32, PIECE, 4, 4)), (1 << 62, Tile(32, 64, PIECE, 4, 4)))


@dataclass(frozen=True)
class GroupedShape:
    """The constants of a kernel: ``in_features`` numbers to ``out_features`` numbers, in groups of ``group`` columns.

    ``piece``: columns that are multiplied at once. ``row_bytes``: of the weight of an output.
    """

    out_features: int
    in_features: int
    group: int
    piece: int
    row_bytes: int
    code: str
    outs: int
    rows: int
    stages: int
    has_zeros: bool
    has_out_scales: bool
    has_bias: bool
    is_wide: bool


@triton.jit
def _decode_bits(bits: tl.tensor, code: tl.constexpr) -> tl.tensor:
    """Return the numbers of a code, float32, of int32 bits."""
    if code == "e4m3":  # a float16 has one more bit of exponent and seven of mantissa; its bias is 8 more
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if code == "e2m1":  # likewise, with three and nine bits more; its bias is 14 more
        half = ((bits & 8) << 12) | ((bits & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return bits.to(tl.float32)


@triton.jit
def _add_piece(
    total: tl.tensor,
    bits: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    outs: tl.tensor,
    is_row: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Add the product of columns ``first`` to ``first + piece``, whose bits are int32 [outs, piece], to the total."""
    scale_offsets = first // shape.group * shape.out_features + outs
    w = _decode_bits(bits, shape.code)
    if shape.has_zeros:
        w -= tl.load(zeros + scale_offsets, outs < shape.out_features, 0).to(tl.float32)[:, None]
    w *= tl.load(scales + scale_offsets, outs < shape.out_features, 0).to(tl.float32)[:, None]
    numbers = first + tl.arange(0, shape.piece)
    r = tl.load(columns[None, :] + numbers[:, None], is_row[None, :] & (numbers[:, None] < shape.in_features), 0)
    w = w.to(r.dtype)
    if shape.is_wide:
        w, r = w.to(tl.float32), r.to(tl.float32)
    return tl.dot(w, r, total, input_precision="ieee")


@triton.jit
def multiply_grouped_tile(
    columns: tl.tensor,
    is_row: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out_scales: tl.tensor,  # float32 [out]
    outs: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the products of a tile's rows, which begin at ``columns``, and of the outputs ``outs``: float32
    [outs, rows]."""
    weights = values + outs[:, None].to(tl.int64) * shape.row_bytes + tl.arange(0, shape.piece)[None, :]
    total = tl.zeros([shape.outs, shape.rows], tl.float32)
    halves: tl.constexpr = 2 if shape.code == "int4" or shape.code == "e2m1" else 1
    for first in tl.range(0, shape.row_bytes, shape.piece, num_stages=shape.stages):
        bits = tl.load(weights + first, outs[:, None] < shape.out_features, 0).to(tl.int32)
        codes = bits & 15 if halves == 2 else bits
        total = _add_piece(total, codes, first * halves, columns, scales, zeros, outs, is_row, shape)
        if halves == 2:
            next_piece = first * halves + shape.piece
            total = _add_piece(total, bits >> 4, next_piece, columns, scales, zeros, outs, is_row, shape)
    if shape.has_out_scales:
        total *= tl.load(out_scales + outs, outs < shape.out_features, 0)[:, None]
    return total


@triton.jit
def _grouped_kernel(
    x: tl.tensor,  # [T, in_features], with this stride between rows
    x_stride: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out_scales: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,  # [T, out]
    row_count: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compute one tile of a linear layer with a weight in groups."""
    outs, rows = tile_places(row_count, shape)
    is_row = rows < row_count
    columns = x + rows.to(tl.int64) * x_stride
    total = multiply_grouped_tile(columns, is_row, values, scales, zeros, out_scales, outs, shape)
    store_tile(y, total, bias, outs, rows, is_row, shape)


def piece_width(weight: GroupedWeight) -> int:
    """Return how many columns are multiplied at once, so that they are of one group; 0 if they would be too few, or if
    the kernel does not have the code."""
    if _kernel_code(weight) not in CODES:
        return 0
    if weight.group >= weight.values.shape[1]:
        return PIECE
    width = min(PIECE, weight.group & -weight.group)
    return width if width >= MIN_PIECE else 0


def _kernel_code(weight: GroupedWeight) -> str:
    """Return the code that a kernel uses to read a weight."""
    return WIDER_CODES.get(weight.code, weight.code)


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None) -> TritonGroupedPacked:
    """Pack a weight whose ``piece_width`` is not 0."""
    piece, in_features, code = piece_width(weight), weight.values.shape[1], _kernel_code(weight)
    span = piece * (2 if code in FOUR_BIT_CODES else 1)
    values = F.pad(weight.values, (0, -in_features % span))
    spare_groups = -(-values.shape[1] // weight.group) - weight.scales.shape[1]  # of padding alone
    if code in FOUR_BIT_CODES:
        halves = values.unflatten(1, (-1, 2, piece))
        values = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    scales = weight.scales if weight.scales.dtype.itemsize == 2 else weight.scales.float()
    return TritonGroupedPacked(
        values.contiguous(),
        F.pad(scales.t(), (0, 0, 0, spare_groups)).contiguous(),
        None if weight.zeros is None else F.pad(weight.zeros.t(), (0, 0, 0, spare_groups)).contiguous(),
        None if weight.out_scales is None else weight.out_scales.float(),
        bias,
        None if weight.order is None else weight.order.to(values.device),
        code,
        weight.group,
        piece,
        in_features,
    )


def grouped_shape(packed: TritonGroupedPacked, tile: Tile) -> GroupedShape:
    """Return the constants of a product with this weight, or with each of several that are stacked."""
    out, row_bytes = packed.weight.shape[-2:]
    return GroupedShape(
        out_features=out,
        in_features=packed.in_features,
        group=packed.group,
        piece=packed.piece,
        row_bytes=row_bytes,
        code=packed.code,
        outs=tile.outs,
        rows=tile.rows,
        stages=tile.stages,
        has_zeros=packed.zeros is not None,
        has_out_scales=packed.out_scales is not None,
        has_bias=packed.bias is not None,
        is_wide=INTERPRETED,
    )


def multiply_grouped(x: torch.Tensor, packed: TritonGroupedPacked, result: torch.dtype) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out] of dtype ``result``."""
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    rows, out = len(x), len(packed.weight)
    tile = next(tile for max_rows, tile in TILES if rows <= max_rows)
    shape = grouped_shape(packed, tile)
    zeros, out_scales, bias = (
        packed.weight if part is None else part for part in (packed.zeros, packed.out_scales, packed.bias)
    )
    y = x.new_empty(rows, out, dtype=result)
    if rows:
        _grouped_kernel[tile_grid(tile, rows, out)](
            x, x.stride(0), packed.weight, packed.scales, zeros, out_scales, bias, y, rows, shape,
            num_warps=tile.warps, **NO_FUSION,
        )  # fmt: skip
    return y
