"""Linear layers on int8 on a GPU: rows quantized at run time, integer products. ``torch_int8`` defines them.

Sums of int8 products are exact in int32, so neither tiles nor instructions matter to a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parley.native.torch_forms.torch_int8 import MIN_ABSMAX, TorchRows, check_int8_shape
from parley.native.triton_forms.launch import INTERPRETED, NO_FUSION
from parley.native.triton_forms.triton_linear import LinearShape, Tile, store_tile, tile_grid, tile_places
from parley.native.triton_forms.triton_packed import TritonInt8Packed

SMALLEST = tl.constexpr(MIN_ABSMAX)
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding and subtracting it rounds a float32 half to even
WARP_NUMBERS = 512  # numbers of a row for each warp

TILES = (  # as in ``triton_linear``
    (16, Tile(16, 16, 256, 4, 5)),
    (32, Tile(16, 32, 256, 4, 4)),
    (64, Tile(32, 64, 128, 4, 4)),
    (1 << 62, Tile(128, 128, 64, 8, 3)),
)


@triton.jit
def _quantize_kernel(
    x: tl.tensor, x_stride: tl.tensor, values: tl.tensor, scales: tl.tensor, width: tl.constexpr, block: tl.constexpr
) -> None:
    """Quantize one row: values int8 [T, width], scales float32 [T], NaN for a row with NaN or infinity."""
    columns = tl.arange(0, block)
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.load(x + row * x_stride + columns, columns < width, 0).to(tl.float32)
    magnitudes = tl.abs(numbers)
    largest = tl.max(tl.where(magnitudes == magnitudes, magnitudes, float("inf")))
    is_sound = largest < float("inf")
    inverse = tl.where(is_sound & (largest >= SMALLEST), tl.div_rn(127.0, tl.maximum(largest, SMALLEST)), 0.0)
    rounded = tl.where(is_sound, numbers, 0.0) * inverse + ROUNDER - ROUNDER
    tl.store(values + row * width + columns, rounded.to(tl.int8), columns < width)
    tl.store(scales + row, tl.where(is_sound, tl.div_rn(largest, 127.0), float("nan")))


def quantize_rows(x: torch.Tensor) -> TorchRows:
    """Quantize x [T, K] to int8, with a scale for each row."""
    rows, width = x.shape
    values, scales = x.new_empty(rows, width, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    if rows:
        _quantize_kernel[(rows,)](
            x, x.stride(0), values, scales, width, block, num_warps=max(1, min(16, block // WARP_NUMBERS)), **NO_FUSION
        )
    return TorchRows(values, scales)


@triton.jit
def multiply_int8_tile(
    columns: tl.tensor,
    is_row: tl.tensor,
    row_scales: tl.tensor,  # float32 [rows], of the tile
    weight: tl.tensor,
    out_scales: tl.tensor,
    outs: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the products of a tile's rows, which begin at ``columns``, and of the outputs ``outs`` of a weight:
    float32 [outs, rows]."""
    weights = weight + outs[:, None].to(tl.int64) * shape.in_features
    total = tl.zeros([shape.outs, shape.rows], tl.int32)
    for first in tl.range(0, shape.in_features, shape.inner, num_stages=shape.stages):
        numbers = first + tl.arange(0, shape.inner)
        w = tl.load(
            weights + numbers[None, :], (outs[:, None] < shape.out_features) & (numbers[None, :] < shape.in_features), 0
        )
        r = tl.load(columns[None, :] + numbers[:, None], is_row[None, :] & (numbers[:, None] < shape.in_features), 0)
        total = tl.dot(w, r, total)
    return (
        total.to(tl.float32) * row_scales[None, :] * tl.load(out_scales + outs, outs < shape.out_features, 0)[:, None]
    )


@triton.jit
def _int8_kernel(
    x: tl.tensor,  # int8 [T, in_features]
    row_scales: tl.tensor,  # float32 [T]
    weight: tl.tensor,  # int8 [out_features, in_features]
    out_scales: tl.tensor,  # float32 [out]
    bias: tl.tensor,
    y: tl.tensor,  # [T, out]
    row_count: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compute one tile of a linear layer on int8 rows."""
    outs, rows = tile_places(row_count, shape)
    is_row = rows < row_count
    scales = tl.load(row_scales + rows, is_row, 0)
    columns = x + rows.to(tl.int64) * shape.in_features
    total = multiply_int8_tile(columns, is_row, scales, weight, out_scales, outs, shape)
    store_tile(y, total, bias, outs, rows, is_row, shape)


def pack_int8(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> TritonInt8Packed:
    """Pack a weight for rows of ``dtype``: output n is ``values[n] * scales[n]``, int8 [out, in] and float32 [out]."""
    check_int8_shape(values)
    return TritonInt8Packed(values.contiguous(), scales.float(), bias, dtype)


def multiply_int8(x: torch.Tensor | TorchRows, packed: TritonInt8Packed, result: torch.dtype) -> torch.Tensor:
    """Return rows [T, in], quantized or not, times the packed weight, plus bias: [T, out] of dtype ``result``."""
    quantized = x if isinstance(x, TorchRows) else quantize_rows(x)
    rows, (out_features, in_features) = len(quantized.scales), packed.weight.shape
    tile = next(tile for max_rows, tile in TILES if rows <= max_rows)
    shape = LinearShape(
        out_features, in_features, tile.outs, tile.rows, tile.inner, tile.stages, packed.bias is not None, INTERPRETED
    )
    y = quantized.scales.new_empty(rows, out_features, dtype=result)
    if rows:
        bias = packed.scales if packed.bias is None else packed.bias
        _int8_kernel[tile_grid(tile, rows, out_features)](
            quantized.values, quantized.scales, packed.weight, packed.scales, bias, y, rows, shape,
            num_warps=tile.warps, **NO_FUSION,
        )  # fmt: skip
    return y
