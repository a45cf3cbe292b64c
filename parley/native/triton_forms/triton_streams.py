"""Kernels of Gemma 3n on a GPU. ``torch_streams`` defines them.

A program computes one row in float32, with a layout that depends on the row's width alone. So do its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.torch_forms.torch_streams import MIN_MEAN_SQUARE
from parley.native.triton_forms.launch import NO_FUSION

WARP_NUMBERS = 512  # numbers of a row for each warp
LEAST = tl.constexpr(MIN_MEAN_SQUARE)


@dataclass(frozen=True)
class RowShape:
    """The constants of a kernel: the numbers of a row, and the next power of 2."""

    width: int
    block: int


def _row_shape(width: int) -> tuple[RowShape, int]:
    """Return the constants for rows of this width, and the warps of a program."""
    block = triton.next_power_of_2(width)
    return RowShape(width, block), max(1, min(16, block // WARP_NUMBERS))


@triton.jit
def _sparsify_kernel(rows: tl.tensor, deviations: tl.tensor, shape: tl.constexpr) -> None:
    columns = tl.arange(0, shape.block)
    is_column = columns < shape.width
    offsets = rows + tl.program_id(0).to(tl.int64) * (2 * shape.width) + columns
    gates = tl.load(offsets, is_column, 0).to(tl.float32)
    mean = tl.sum(gates) / shape.width
    centered = tl.where(is_column, gates - mean, 0.0)
    deviation = tl.sqrt(tl.sum(centered * centered) / shape.width)
    active = tl.maximum(gates - (mean + deviation * deviations), 0.0)
    tl.store(offsets, active.to(rows.dtype.element_ty), is_column)


@triton.jit
def _match_kernel(rows: tl.tensor, models: tl.tensor, out: tl.tensor, shape: tl.constexpr) -> None:
    columns = tl.arange(0, shape.block)
    is_column = columns < shape.width
    offsets = tl.program_id(0).to(tl.int64) * shape.width + columns
    row = tl.load(rows + offsets, is_column, 0).to(tl.float32)
    model = tl.load(models + offsets, is_column, 0).to(tl.float32)
    size = tl.sqrt(tl.maximum(tl.sum(row * row) / shape.width, LEAST))
    row *= tl.sqrt(tl.sum(model * model) / shape.width) / size
    tl.store(out + offsets, row.to(rows.dtype.element_ty), is_column)


def sparsify_gates(rows: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract a threshold from each gate in rows [T, 2 * width], and make those below it 0, in place."""
    assert rows.is_contiguous()
    shape, warps = _row_shape(rows.shape[1] // 2)
    if len(rows):
        _sparsify_kernel[(len(rows),)](rows, deviations, shape, num_warps=warps, **NO_FUSION)
    return rows


def match_sizes(rows: torch.Tensor, models: torch.Tensor) -> torch.Tensor:
    """Return rows [T, width], scaled so that the mean square of each is that of the row of ``models`` [T, width]."""
    rows, models = rows.contiguous(), models.contiguous()
    out = torch.empty_like(rows)
    shape, warps = _row_shape(rows.shape[1])
    if len(rows):
        _match_kernel[(len(rows),)](rows, models, out, shape, num_warps=warps, **NO_FUSION)
    return out
