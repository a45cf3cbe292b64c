"""Calls ``rows.cpp`` and ``attention.cpp``: pages of keys and values, and the attention over them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parley.native.compiled_forms.norm_struct import norm_pointer
from parley.native.compiled_forms.weight_struct import address_of
from parley.native.layer_shape import Norm
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages, PageFormat

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ATTENTION_SIGNATURES: dict[str, list[Any]] = {
    "rope_write": [P, P, P, P, P, P, N, N, N, P, N, N, N, N, N, N, N, N],
    "write": [P, P, P, P, N, N, N, N, N, N, N],
    "attend_dim": [],
    "page_bytes": [N, N, N, N, N],
    "attend": [P, N, P, P, P, N, P, P, P, P, N, N, N, N, N, N, N, N, R, R, N],
}
ATTENTION_RETURN_INT64 = ("attend_dim", "page_bytes")


@dataclass(frozen=True)
class CompiledPlan:
    """The attention plan of a batch: int64 tensors as ``attention.cpp`` describes them."""

    spans: torch.Tensor  # [S, 4]
    table: torch.Tensor  # the page tables of all spans, concatenated
    window: int | None
    visible_ends: torch.Tensor | None  # [T], as in ``plan_attention``
    chunk: int | None = None


def plan_spans(
    spans: list[RowSpan], window: int | None, visible_ends: torch.Tensor | None = None, *, chunk: int | None = None
) -> CompiledPlan:
    """Plan the attention of a batch. One plan serves all layers with the same window and chunk."""
    rows: list[int] = []
    table: list[int] = []
    for span in spans:
        rows += (span.first, span.count, span.length, len(table))
        table += span.table
    # Through numpy, which converts lists three times as fast.
    spans_of, table_of = (torch.from_numpy(np.array(pairs, np.int64)) for pairs in (rows, table))
    return CompiledPlan(
        spans_of.view(-1, 4), table_of, window, None if visible_ends is None else visible_ends.contiguous(), chunk
    )


def page_format(library: ctypes.CDLL, layer: LayerKV, dtype: torch.dtype) -> PageFormat | None:
    """Return the format of pages of bfloat16 or int8, or None if the head dimension is not compiled."""
    if max(layer.dim, layer.value_dim) > library.attend_dim():
        return None
    size = library.page_bytes(layer.heads, layer.dim, layer.value_dim, dtype == torch.int8, layer.has_latents)
    return PageFormat(layer, (size // dtype.itemsize,), dtype, True)


def write_kv(
    library: ctypes.CDLL, keys: torch.Tensor, values: torch.Tensor, pool: LayerPages, slots: torch.Tensor
) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] in the pages, at ``slots`` int64 [T]."""
    layer, dtype = pool.page_format.layer, torch.bfloat16
    keys, values, slots = keys.to(dtype).contiguous(), values.to(dtype).contiguous(), slots.contiguous()
    library.write(
        keys.data_ptr(),
        values.data_ptr(),
        pool.data.data_ptr(),
        slots.data_ptr(),
        len(slots),
        layer.heads,
        layer.dim,
        layer.value_dim,
        pool.page_format.dtype == torch.int8,
        layer.has_latents,
        torch.get_num_threads(),
    )


def rope_write(
    library: ctypes.CDLL,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    slots: torch.Tensor,
    *,
    head_norm: Norm | None = None,
    has_whole_norm: bool = False,
    is_norm_late: bool = False,
    is_interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    has_normed_values: bool = False,
    is_query_only: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys in ``qkv``, store keys and values at ``slots``, return queries [T, heads, dim]."""
    kv_heads, dim = 0 if is_query_only else pool.page_format.layer.heads, pool.page_format.layer.dim
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    library.rope_write(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        pool.data.data_ptr(),
        slots.data_ptr(),
        norm_pointer(head_norm),
        has_whole_norm,
        is_norm_late,
        has_normed_values,
        address_of(query_scales),
        rows,
        heads,
        kv_heads,
        dim,
        cos.shape[-1],
        is_interleaved,
        pool.page_format.dtype == torch.int8,
        torch.get_num_threads(),
    )
    return qkv.view(rows, heads + 2 * kv_heads, dim)[:, :heads]


def attend(
    library: ctypes.CDLL,
    queries: torch.Tensor,
    pool: LayerPages,
    plan: CompiledPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, dim] over pages: [T, heads, value_dim], dtype of the queries."""
    layer = pool.page_format.layer
    dtype, queries = queries.dtype, queries.to(torch.bfloat16)
    rows, heads, dim = queries.shape
    if queries.stride()[1:] != (dim, 1):
        queries = queries.contiguous()
    out = torch.empty(rows, heads, layer.value_dim, dtype=torch.bfloat16)
    sinks = None if sinks is None else sinks.float().contiguous()
    library.attend(
        queries.data_ptr(),
        queries.stride(0),
        pool.data.data_ptr(),
        out.data_ptr(),
        plan.spans.data_ptr(),
        len(plan.spans),
        plan.table.data_ptr(),
        address_of(sinks),
        address_of(slopes),
        address_of(plan.visible_ends),
        heads,
        layer.heads,
        dim,
        layer.value_dim,
        pool.page_format.dtype == torch.int8,
        layer.has_latents,
        plan.window or 0,
        plan.chunk or 0,
        scale,
        softcap or 0.0,
        torch.get_num_threads(),
    )
    return out.to(dtype)
