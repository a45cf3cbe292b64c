"""Multi-head latent attention on a GPU, but for the attention over pages. ``torch_latent`` defines it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.layer_shape import Norm
from parley.native.pool import LayerPages
from parley.native.torch_forms.torch_kernels import TorchPacked
from parley.native.triton_forms.launch import NO_FUSION
from parley.native.triton_forms.triton_experts import linear_heads
from parley.native.triton_forms.triton_packed import TritonPacked


@dataclass(frozen=True)
class LatentRowShape:
    """The constants of a kernel for rows of ``plain`` numbers without rotation, and then ``rotary`` rotated ones."""

    plain: int
    rotary: int
    plain_block: int
    rotary_block: int
    is_interleaved: bool


@triton.jit
def _rotate(
    row: tl.tensor, cos: tl.tensor, sin: tl.tensor, token: tl.tensor, dims: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Return the rotated numbers of a row, which begin at ``row``: float32 [dims]."""
    half: tl.constexpr = shape.rotary // 2
    partner = dims ^ 1 if shape.is_interleaved else tl.where(dims < half, dims + half, dims - half)
    is_rotated = dims < shape.rotary
    angle = token * shape.rotary + dims
    rotated = tl.load(row + dims, is_rotated, 0).to(tl.float32) * tl.load(cos + angle, is_rotated, 0)
    return rotated + tl.load(row + partner, is_rotated, 0).to(tl.float32) * tl.load(sin + angle, is_rotated, 0)


@triton.jit
def _write_latents_kernel(
    rows: tl.tensor,  # [T, plain + rotary], with this stride between rows
    row_stride: tl.tensor,
    weight: tl.tensor,  # float32 [plain]
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    pages: tl.tensor,
    width: tl.tensor,  # of a row in pages
    indices: tl.tensor,  # int64 [T]
    shape: tl.constexpr,
) -> None:
    """Norm the latent of one token, rotate the rest of its row, and store both in the pages. The grid is (T,)."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + token)
    source, target = rows + token * row_stride, pages + index * width
    stored = rows.dtype.element_ty
    columns = tl.arange(0, shape.plain_block)
    is_column = columns < shape.plain
    latent = tl.load(source + columns, is_column, 0).to(tl.float32)
    latent *= 1.0 / tl.sqrt(tl.sum(latent * latent) / shape.plain + eps)
    latent *= tl.load(weight + columns, is_column, 0)
    tl.store(target + columns, latent.to(stored), columns < tl.where(index >= 0, shape.plain, 0))
    dims = tl.arange(0, shape.rotary_block)
    rotated = _rotate(source + shape.plain, cos, sin, token, dims, shape)
    tl.store(target + shape.plain + dims, rotated.to(stored), dims < tl.where(index >= 0, shape.rotary, 0))


@triton.jit
def _rotate_heads_kernel(
    queries: tl.tensor,  # [T, heads, any]; the last numbers are rotated
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    absorbed: tl.tensor,  # [T, heads, plain], contiguous
    cos: tl.tensor,
    sin: tl.tensor,
    result: tl.tensor,  # [T, heads, plain + rotary]
    first: tl.constexpr,  # of the rotated numbers
    heads: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Join the absorbed part of a head's query and its rotated numbers."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = token * heads + head
    target = result + row * (shape.plain + shape.rotary)
    columns = tl.arange(0, shape.plain_block)
    is_column = columns < shape.plain
    tl.store(target + columns, tl.load(absorbed + row * shape.plain + columns, is_column, 0), is_column)
    dims = tl.arange(0, shape.rotary_block)
    source = queries + token * token_stride + head * head_stride + first
    rotated = _rotate(source, cos, sin, token, dims, shape)
    tl.store(target + shape.plain + dims, rotated.to(result.dtype.element_ty), dims < shape.rotary)


def _row_shape(plain: int, rotary: int, *, is_interleaved: bool) -> LatentRowShape:
    blocks = triton.next_power_of_2(plain), triton.next_power_of_2(rotary)
    return LatentRowShape(plain, rotary, *blocks, is_interleaved)


def absorb_queries(
    queries: torch.Tensor,
    key_up: TritonPacked | TorchPacked,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool,
) -> torch.Tensor:
    """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary]."""
    count, heads, width = queries.shape
    rotary, rank = cos.shape[-1], key_up.weight.shape[1]
    absorbed = linear_heads(queries[..., : width - rotary], key_up)
    result = queries.new_empty(count, heads, rank + rotary)
    if count:
        _rotate_heads_kernel[(count, heads)](
            queries, queries.stride(0), queries.stride(1), absorbed, cos, sin, result, width - rotary, heads,
            _row_shape(rank, rotary, is_interleaved=is_interleaved), num_warps=1, **NO_FUSION,
        )  # fmt: skip
    return result


def write_latents(
    rows: torch.Tensor,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    indices: torch.Tensor,
    *,
    is_interleaved: bool,
) -> None:
    """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both in the pages as one key.

    Tokens with negative ``indices`` are not stored. The norm is an RMS norm without a bias; pages are not int8.
    """
    rank, rotary = norm.weight.shape[-1], cos.shape[-1]
    if len(rows):
        _write_latents_kernel[(len(rows),)](
            rows, rows.stride(0), norm.weight, norm.eps, cos, sin, pool.data, pool.data.shape[-1], indices,
            _row_shape(rank, rotary, is_interleaved=is_interleaved), **NO_FUSION,
        )  # fmt: skip
