"""Norms of rows on a GPU, with the addition before them. ``torch_kernels`` defines them.

A program computes one row in float32, with a layout that depends on the row's width alone. So do its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.layer_shape import Norm
from parley.native.triton_forms.launch import NO_FUSION

WARP_NUMBERS = 512  # numbers of a row for each warp


@dataclass(frozen=True)
class NormShape:
    """The constants of a kernel. A norm ``is_centered`` (LayerNorm) or not (RMS), and may have a bias.

    ``has_after``: whether the added rows get a norm first. ``has_norm``: whether the sum gets one.
    """

    width: int
    block: int
    has_added: bool
    has_after: bool
    after_has_bias: bool
    after_is_centered: bool
    has_norm: bool
    norm_has_bias: bool
    norm_is_centered: bool


@triton.jit
def _norm_row(
    row: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    eps: tl.tensor,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the norm of a row: float32 [block]."""
    columns = tl.arange(0, shape.block)
    is_column = columns < shape.width
    if is_centered:
        row = tl.where(is_column, row - tl.sum(row) / shape.width, 0.0)
    row = row * (1.0 / tl.sqrt(tl.sum(row * row) / shape.width + eps)) * tl.load(weight + columns, is_column, 0)
    if has_bias:
        row += tl.load(bias + columns, is_column, 0)
    return row


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,  # [T, width]: added, or normed if there is nothing to add to
    residual: tl.tensor,
    after_weight: tl.tensor,
    after_bias: tl.tensor,
    after_eps: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    total_scale: tl.tensor,
    normed: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compute one row of ``add_norm``, or of a norm alone. The grid is (T,).

    ``total`` [T, width] gets total_scale * (residual + scale * after(x)), and ``normed`` [T, width] its norm, both
    rounded to the dtype of ``x``.
    """
    columns = tl.arange(0, shape.block)
    is_column = columns < shape.width
    offsets = tl.program_id(0).to(tl.int64) * shape.width + columns
    stored = x.dtype.element_ty
    row = tl.load(x + tl.program_id(0).to(tl.int64) * x_stride + columns, is_column, 0).to(tl.float32)
    if shape.has_after:
        row = _norm_row(row, after_weight, after_bias, after_eps, shape.after_has_bias, shape.after_is_centered, shape)
        row = row.to(stored).to(tl.float32)
    if shape.has_added:
        row = (tl.load(residual + offsets, is_column, 0).to(tl.float32) + row * scale) * total_scale
        tl.store(total + offsets, row.to(stored), is_column)
        row = row.to(stored).to(tl.float32)
    if shape.has_norm:
        row = _norm_row(row, weight, bias, eps, shape.norm_has_bias, shape.norm_is_centered, shape)
        tl.store(normed + offsets, row.to(stored), is_column)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm | None,
    after: Norm | None,
    scale: float,
    total_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and the sum, both [T, width]; an arbitrary tensor in place of one that is not computed."""
    rows, width = x.shape
    shape = NormShape(
        width=width,
        block=triton.next_power_of_2(width),
        has_added=residual is not None,
        has_after=after is not None,
        after_has_bias=after is not None and after.bias is not None,
        after_is_centered=after is not None and after.is_centered,
        has_norm=norm is not None,
        norm_has_bias=norm is not None and norm.bias is not None,
        norm_is_centered=norm is not None and norm.is_centered,
    )
    assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
    total = x if residual is None else torch.empty_like(residual)
    normed = total if norm is None else x.new_empty(rows, width)
    after_weight, after_bias, after_eps = _norm_inputs(after, x)
    weight, bias, eps = _norm_inputs(norm, x)
    _add_norm_kernel[(rows,)](
        x, x if residual is None else residual, after_weight, after_bias, after_eps, weight, bias, eps, scale,
        total_scale, normed, total, x.stride(0), shape,
        num_warps=max(1, min(16, shape.block // WARP_NUMBERS)), **NO_FUSION,
    )  # fmt: skip
    return normed, total


def _norm_inputs(norm: Norm | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return weight, bias and eps of a norm; without one, arbitrary tensors, which are not read."""
    if norm is None:
        return x, x, 1.0
    return norm.weight, x if norm.bias is None else norm.bias, norm.eps


def norm_rows(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Return the norm of x [T, hidden], computed in float32, or x itself without one."""
    return x if norm is None or not len(x) else _launch(x, None, norm, None, 1.0, 1.0)[0]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    after: Norm | None = None,
    scale: float = 1.0,
    total_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add scale * after(x) to the residual stream, and multiply it by ``total_scale``. Return (its norm, the residual),
    both [T, hidden]."""
    return _launch(x, residual, norm, after, scale, total_scale)
