"""Attention and the pages of keys and values or latents."""

from __future__ import annotations

from typing import Any

import torch

from parley.native import kernel_choice
from parley.native.batch_tables import BatchTables, TablePlan
from parley.native.compiled_forms.compiled_attention import CompiledPlan, plan_spans
from parley.native.kernel_choice import form_for_rows, form_of_stacked, has_table_attention, tiled_kernels
from parley.native.layer_shape import Norm
from parley.native.layout import LayerKV, RowSpan
from parley.native.packed import PackedWeight
from parley.native.pool import LayerPages, PageFormat
from parley.native.torch_forms import torch_attention, torch_kernels, torch_latent

AttentionPlan = CompiledPlan | TablePlan | list[torch_attention.TileGroup]


def choose_page_format(layer: LayerKV, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> PageFormat:
    """Choose the page layout of a layer, for a model of ``dtype``. All functions below depend on it.

    ``int8``: keys and values are stored as int8, with one scale per token and head. Keys of an indexer are not, because
    roundings decide which tokens it chooses, and only torch's operators read them.
    """
    is_index = not layer.value_dim
    stored_dtype = torch.int8 if int8 and not is_index else dtype
    has_tiles = dtype == torch.bfloat16 and device.type == "cpu" and not is_index
    kernels = kernel_choice.compiled_kernels() if has_tiles else None
    return (kernels and kernels.page_format(layer, stored_dtype)) or torch_attention.page_format(layer, stored_dtype)


def write_indices(slot_mapping: torch.Tensor, page_format: PageFormat) -> torch.Tensor:
    """Convert a slot mapping (page * PAGE_SIZE + offset, int64 [T]) into the indices that ``write_kv`` takes."""
    return slot_mapping if page_format.tiled else torch_attention.write_indices(slot_mapping, page_format.shape)


def write_kv(keys: torch.Tensor, values: torch.Tensor, pool: LayerPages, indices: torch.Tensor) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim]."""
    (tiled_kernels(pool) or torch_attention).write_kv(keys, values, pool, indices)


def has_gpu_rope_write(head_norm: Norm | None, *, is_norm_late: bool, has_scaled_queries: bool) -> bool:
    """Whether the form of ``rope_write`` for GPUs computes this: RMS norms without biases, before the rotation, and
    queries that are not scaled by position."""
    is_rms = head_norm is None or not (head_norm.is_centered or head_norm.bias is not None)
    return is_rms and not is_norm_late and not has_scaled_queries


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    indices: torch.Tensor,
    *,
    head_norm: Norm | None = None,
    has_whole_norm: bool = False,
    is_norm_late: bool = False,
    is_interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    has_normed_values: bool = False,
    is_query_only: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys in ``qkv`` [T, (heads + 2 * kv_heads) * dim], and store keys and values in the pages.

    Return the queries [T, heads, dim]. ``indices``: from ``write_indices``. ``torch_kernels`` defines the rest.
    """
    options: dict[str, Any] = {
        "head_norm": head_norm,
        "has_whole_norm": has_whole_norm,
        "is_interleaved": is_interleaved,
        "has_normed_values": has_normed_values,
        "is_query_only": is_query_only,
    }
    if is_norm_late or query_scales is not None:
        options |= {"is_norm_late": is_norm_late, "query_scales": query_scales}
    form: Any = tiled_kernels(pool)
    if form is None:
        has_form = has_gpu_rope_write(head_norm, is_norm_late=is_norm_late, has_scaled_queries=query_scales is not None)
        form = form_for_rows("rope_write", qkv) if has_form else torch_kernels
    result: torch.Tensor = form.rope_write(qkv, cos, sin, pool, indices, **options)
    return result


def absorb_queries(
    queries: torch.Tensor, key_up: PackedWeight, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool
) -> torch.Tensor:
    """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary]."""
    result: torch.Tensor = form_of_stacked("absorb_queries", key_up).absorb_queries(
        queries, key_up, cos, sin, is_interleaved=is_interleaved
    )
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
    """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both in the pages as one key."""
    form: Any = tiled_kernels(pool)
    if form is None:
        has_table = has_table_attention(pool.page_format, rows.device, rows.dtype)
        form = form_for_rows("write_latents", rows) if has_table else torch_latent
    form.write_latents(rows, norm, cos, sin, pool, indices, is_interleaved=is_interleaved)


def plan_attention(
    spans: list[RowSpan],
    *,
    heads: int,
    page_format: PageFormat,
    window: int | None,
    chunk: int | None,
    visible_ends: torch.Tensor | None,
    zero_page: int,
    device: torch.device,
    dtype: torch.dtype,
    has_slopes: bool = False,
    is_window_ahead: bool = False,
    tables: BatchTables | None = None,
) -> AttentionPlan:
    """Plan the attention of a batch. One plan serves all layers of the same page format, head count, window and chunk.

    ``visible_ends`` int64 [T]: the last position that each row attends to, plus 1; it is its own position or a later
    one of its span. None: its own (causal attention). ``dtype``: of the queries. ``has_slopes``: ``attend`` gets
    slopes. ``is_window_ahead``: with a window, rows attend to as many later positions as earlier ones. ``tables``:
    those of the batch, if an earlier plan with the same ``visible_ends`` has made them.
    """
    if page_format.tiled:
        return plan_spans(spans, window, visible_ends, chunk=chunk)
    if chunk is None and not has_slopes and has_table_attention(page_format, device, dtype):
        return TablePlan(tables or BatchTables.of_spans(spans, visible_ends, device), window or 0, is_window_ahead)
    return torch_attention.plan_tiles(
        spans,
        heads=heads,
        page_shape=page_format.shape,
        window=window,
        chunk=chunk,
        visible_ends=visible_ends,
        zero_page=zero_page,
        device=device,
    )


def attend(
    queries: torch.Tensor,
    pool: LayerPages,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, key_dim] over the pages: [T, heads, value_dim].

    ``sinks`` and ``slopes``, float32 [heads]: as in ``LayerShape``.
    """
    if isinstance(plan, TablePlan):
        kernels: Any = kernel_choice.triton_kernels()
        result: torch.Tensor = kernels.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks)
        return result
    form: Any = tiled_kernels(pool) or torch_attention
    result = form.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes)
    return result
