"""Rotary embeddings on a GPU: norms of heads, rotation, and the writing of keys and values to pages, in one kernel.

``torch_kernels.rope_write`` defines it, and ``torch_attention`` the pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.layer_shape import Norm
from parley.native.pool import LayerPages
from parley.native.triton_forms.launch import NO_FUSION
from parley.native.triton_forms.triton_attention import SCALE_BYTES

TINY = tl.constexpr(1e-30)  # a row whose largest number is smaller counts as zero, as in ``quantize_kv``


@dataclass(frozen=True)
class RopeShape:
    """The constants of a kernel. ``norm``: "none", of each "head", or of all queries and of all keys ("whole")."""

    heads: int
    kv_heads: int
    dim: int
    rotary: int
    width: int  # of a row in pages
    block: int
    query_block: int  # of all queries of a token
    norm: str
    is_interleaved: bool
    has_normed_values: bool
    is_int8: bool


@triton.jit
def _mean_square(qkv: tl.tensor, head: tl.tensor, numbers: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the mean square of the numbers that this head's norm is over."""
    if shape.norm == "head":
        return tl.sum(numbers * numbers) / shape.dim
    is_query = head < shape.heads
    columns = tl.arange(0, shape.query_block)
    width = tl.where(is_query, shape.heads, shape.kv_heads) * shape.dim
    start = tl.where(is_query, 0, shape.heads * shape.dim)
    row = tl.load(qkv + start + columns, columns < width, 0).to(tl.float32)
    return tl.sum(row * row) / width


@triton.jit
def _store_int8(
    row: tl.tensor, numbers: tl.tensor, dims: tl.tensor, stored_dims: tl.tensor, shape: tl.constexpr
) -> None:
    """Store the first ``stored_dims`` numbers of a row, and its scale, as ``quantize_kv`` makes them."""
    reach = tl.max(tl.abs(numbers))
    factor = tl.where(reach > TINY, tl.div_rn(127.0, tl.maximum(reach, TINY)), 0.0)
    # Adding and subtracting 1.5 * 2^23 rounds half to even.
    rounded = (numbers * factor + 12582912.0) - 12582912.0
    tl.store(row + dims, tl.where(rounded == rounded, rounded, 0.0).to(tl.int8), dims < stored_dims)
    scale_address = (row + (shape.width - SCALE_BYTES)).to(tl.pointer_type(tl.float32))
    tl.store(scale_address, tl.div_rn(reach, 127.0), stored_dims > 0)


@triton.jit
def _rope_write_kernel(
    qkv: tl.tensor,  # [T, (heads + 2 * kv_heads) * dim]
    queries: tl.tensor,  # [T, heads, dim], the result
    cos: tl.tensor,
    sin: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    pages: tl.tensor,
    indices: tl.tensor,  # int64 [T, 2 * kv_heads]
    shape: tl.constexpr,
) -> None:
    """Norm and rotate one head of a token, and store it: a query in ``queries``, a key or value in the pages.

    The grid is (T, heads + 2 * kv_heads). ``cos`` and ``sin``: float32 [T, rotary].
    """
    token, head = tl.program_id(0), tl.program_id(1)
    source = qkv + token.to(tl.int64) * ((shape.heads + 2 * shape.kv_heads) * shape.dim)
    dims = tl.arange(0, shape.block)
    is_dim = dims < shape.dim
    stored = qkv.dtype.element_ty
    numbers = tl.load(source + head * shape.dim + dims, is_dim, 0).to(tl.float32)
    if head < shape.heads + shape.kv_heads:
        half: tl.constexpr = shape.rotary // 2
        partner = dims ^ 1 if shape.is_interleaved else tl.where(dims < half, dims + half, dims - half)
        is_rotated = dims < shape.rotary
        other = tl.load(source + head * shape.dim + partner, is_rotated, 0).to(tl.float32)
        if shape.norm != "none":
            factor = 1.0 / tl.sqrt(_mean_square(source, head, numbers, shape) + eps)
            weights = norm_weight + head * shape.dim
            numbers = numbers * factor * tl.load(weights + dims, is_dim, 0)
            other = other * factor * tl.load(weights + partner, is_rotated, 0)
        angle = token * shape.rotary + dims
        rotated = numbers * tl.load(cos + angle, is_rotated, 0) + other * tl.load(sin + angle, is_rotated, 0)
        numbers = tl.where(is_rotated, rotated, numbers).to(stored).to(tl.float32)
    elif shape.has_normed_values:
        factor = 1.0 / tl.sqrt(tl.sum(numbers * numbers) / shape.dim + eps)
        numbers = (numbers * factor).to(stored).to(tl.float32)
    if head < shape.heads:
        target = queries + (token.to(tl.int64) * shape.heads + head) * shape.dim
        tl.store(target + dims, numbers.to(stored), is_dim)
    else:
        index = tl.load(indices + token * (2 * shape.kv_heads) + head - shape.heads)
        row = pages + index * shape.width
        stored_dims = tl.where(index >= 0, shape.dim, 0)
        if shape.is_int8:
            _store_int8(row, numbers, dims, stored_dims, shape)
        else:
            tl.store(row + dims, numbers.to(stored), dims < stored_dims)


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    indices: torch.Tensor,
    *,
    head_norm: Norm | None = None,
    has_whole_norm: bool = False,
    is_interleaved: bool = False,
    has_normed_values: bool = False,
    is_query_only: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys in qkv, and store keys and values in the pages. Return the queries [T, heads, dim].

    Tokens with negative ``indices`` are not stored. ``qkv`` is not changed.
    """
    layer = pool.page_format.layer
    kv_heads = 0 if is_query_only else layer.heads
    heads = qkv.shape[1] // layer.dim - 2 * kv_heads
    shape = RopeShape(
        heads=heads,
        kv_heads=kv_heads,
        dim=layer.dim,
        rotary=cos.shape[-1],
        width=pool.page_format.shape[-1],
        block=triton.next_power_of_2(layer.dim),
        query_block=triton.next_power_of_2(heads * layer.dim),
        norm="none" if head_norm is None else "whole" if has_whole_norm else "head",
        is_interleaved=is_interleaved,
        has_normed_values=has_normed_values and head_norm is not None,
        is_int8=pool.page_format.dtype == torch.int8,
    )
    queries = qkv.new_empty(len(qkv), heads, layer.dim)
    weight, eps = (cos, 1.0) if head_norm is None else (head_norm.weight, head_norm.eps)
    _rope_write_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv, queries, cos, sin, weight, eps, pool.data, indices, shape, num_warps=1, **NO_FUSION
    )
    return queries
