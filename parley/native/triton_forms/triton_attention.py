"""Attention over KV pages on a GPU: one computation for prefill, chunked prefill and decode.

Keys are cut at multiples of CHUNK *absolute* positions. A chunk is reduced to a partial result: the largest score of
each row, the sum of its weights, and its weighted sum of values. Partial results are merged in the order of positions
by ``_merge``. One program computes the chunks of a tile one after another; or, if few rows attend to many keys, each
chunk gets a program of its own, and a second kernel merges them, so that the whole GPU is busy.

How the bits of a row are independent of the rest of the batch:

* Within a chunk, keys are read in pages of 16, in order. A page or chunk that is masked for a row multiplies its sums
  by 1 and adds 0, so it does not matter which of them the other rows of the tile need.
* Tiles have 16 or 32 rows; for both, products use the same instruction of the tensor cores (``mma.sync``), and each
  element is the same chain of such instructions. Sums of weights are computed as a product with ones, because the order
  of a plain sum would depend on the layout of the tile. Maxima are exact in any order.
* ``enable_fp_fusion`` is off: a multiplication that is fused with an addition in one kernel and not in the other would
  be rounded differently.

Pages are those of ``torch_attention``; its docstrings define them, int8 pages, scores and the rounding of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from parley.core.sequence import PAGE_SIZE
from parley.native.batch_tables import CHUNK_KEYS, TablePlan
from parley.native.pool import LayerPages
from parley.native.triton_forms.launch import INTERPRETED, NO_FUSION, unused

PAGE = tl.constexpr(PAGE_SIZE)
CHUNK = tl.constexpr(CHUNK_KEYS)  # positions of a partial result
LOG2_E = tl.constexpr(1.4426950408889634)
SCALE_BYTES = tl.constexpr(4)  # of a row in int8 pages
NEVER = tl.constexpr(float("-inf"))

BUSY_PROGRAMS = 264  # programs that keep a GPU busy: two for each multiprocessor of the largest ones
PAGES_AHEAD = 4  # pages that a program loads ahead
WIDE_HEAD = 128  # numbers of a head; with int8 pages, more do not fit into the registers of 4 warps


@dataclass(frozen=True)
class AttentionShape:
    """The constants of a kernel. ``fold`` query heads share a KV head. A tile has ``rows`` rows, each of one head of a
    token; the heads of a token are adjacent.

    ``window`` and ``has_cap``: 0 and False if there is none. ``is_split``: the partial results of chunks are stored.
    With ``has_latents`` a key is its value and a tail after it. Block sizes are powers of two: ``dim_block`` for the
    numbers of a key without its tail, ``tail_block`` for the tail, ``value_block`` for a value. ``is_wide``: products
    are computed in float32.
    """

    rows: int
    fold: int
    kv_heads: int
    dim: int
    value_dim: int
    width: int  # of a row in pages
    window: int
    has_cap: bool
    has_sinks: bool
    is_int8: bool
    has_latents: bool
    is_split: bool
    dim_block: int
    value_block: int
    tail_block: int
    stages: int
    is_wide: bool


@triton.jit
def _merge(
    peak: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    next_peak: tl.tensor,
    next_total: tl.tensor,
    next_values: tl.tensor,
) -> tl.tensor:
    """Return the partial result of two adjacent ranges of keys."""
    merged_peak = tl.maximum(peak, next_peak)
    base = tl.where(merged_peak == NEVER, 0.0, merged_peak)
    factor, next_factor = tl.exp2(peak - base), tl.exp2(next_peak - base)
    merged_total = total * factor + next_total * next_factor
    merged_values = values * factor[:, None] + next_values * next_factor[:, None]
    return merged_peak, merged_total, merged_values


@triton.jit
def _score_keys(
    products: tl.tensor,
    key_scales: tl.tensor,
    key_ids: tl.tensor,
    positions: tl.tensor,
    visible_ends: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the scores of products [rows, 16] in units of log2, -inf where a row does not attend to the key."""
    scores = products * scale
    if shape.is_int8:
        scores *= key_scales[None, :]
    if shape.has_cap:
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / cap)) + 1.0))  # cap * tanh(scores / cap)
    is_visible = key_ids[None, :] < visible_ends[:, None]
    if shape.window > 0:
        is_visible &= key_ids[None, :] > positions[:, None] - shape.window
    return tl.where(is_visible, scores * LOG2_E, NEVER)


@triton.jit
def _attend_chunk(
    query: tl.tensor,
    query_tail: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    first_key: tl.tensor,
    end_key: tl.tensor,
    positions: tl.tensor,
    visible_ends: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Return the partial result of keys ``first_key`` to ``end_key``, which lie in one chunk.

    ``keys``: of the tile's head in page 0. ``table``: the sequence's page numbers.
    """
    key_numbers: tl.constexpr = shape.kv_heads * PAGE * shape.width  # of a page
    side: tl.constexpr = 0 if shape.has_latents else key_numbers  # from a page's keys to its values
    key_dim: tl.constexpr = shape.value_dim if shape.has_latents else shape.dim  # without the tail
    numbers = tl.arange(0, PAGE)
    dims, value_dims = tl.arange(0, shape.dim_block), tl.arange(0, shape.value_block)
    peak = tl.full([shape.rows], NEVER, tl.float32)
    totals = tl.zeros([shape.rows, PAGE], tl.float32)  # all columns are equal
    values = tl.zeros([shape.rows, shape.value_block], tl.float32)
    ones = tl.full([PAGE, PAGE], 1.0, query.dtype)
    for index in tl.range(first_key // PAGE, tl.cdiv(end_key, PAGE), num_stages=shape.stages):
        page = keys + tl.load(table + index).to(tl.int64) * (key_numbers + side)
        key_ids = index * PAGE + numbers
        is_key = key_ids < end_key
        key = tl.load(
            page + numbers[None, :] * shape.width + dims[:, None], is_key[None, :] & (dims[:, None] < key_dim), 0
        )
        if shape.has_latents:
            value = tl.trans(key)
        else:
            value = tl.load(
                page + side + numbers[:, None] * shape.width + value_dims[None, :],
                is_key[:, None] & (value_dims[None, :] < shape.value_dim),
                0,
            )
        key_scales, value_scales = is_key, is_key
        if shape.is_int8:
            row_scales = (page + (shape.width - SCALE_BYTES)).to(tl.pointer_type(tl.float32))
            row_scales += numbers * (shape.width // SCALE_BYTES)
            key_scales = tl.load(row_scales, is_key, 0)
            value_scales = tl.load(row_scales + side // SCALE_BYTES, is_key, 0)
        products = tl.dot(query, key.to(query.dtype), input_precision="ieee")
        if shape.has_latents:
            tail_dims = shape.value_dim + tl.arange(0, shape.tail_block)
            key_tail = tl.load(
                page + numbers[None, :] * shape.width + tail_dims[:, None],
                is_key[None, :] & (tail_dims[:, None] < shape.dim),
                0,
            )
            products = tl.dot(query_tail, key_tail.to(query.dtype), products, input_precision="ieee")
        scores = _score_keys(products, key_scales, key_ids, positions, visible_ends, scale, cap, shape)
        next_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(next_peak == NEVER, 0.0, next_peak)
        factor, weights = tl.exp2(peak - base), tl.exp2(scores - base[:, None])
        peak = next_peak
        totals = tl.dot(weights.to(query.dtype), ones, totals * factor[:, None], input_precision="ieee")
        if shape.is_int8:
            weights *= value_scales[None, :]
        values = tl.dot(
            weights.to(query.dtype), value.to(query.dtype), values * factor[:, None], input_precision="ieee"
        )
    return peak, tl.max(totals, 1), values


@triton.jit
def _tile_rows(tiles: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the table number of this program's tile, and of its rows: token, head and whether they exist."""
    tile = tiles + tl.program_id(0) * 4
    flat = tl.load(tile + 1) + tl.arange(0, shape.rows)
    exists = flat < tl.load(tile + 2)
    tokens = tl.load(tile) + flat // shape.fold
    heads = tl.program_id(1) * shape.fold + flat % shape.fold
    return tl.load(tile + 3), tokens, heads, exists


@triton.jit
def _start_rows(sinks: tl.tensor, heads: tl.tensor, exists: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Return the partial result of no keys: a sink is a score without a value."""
    peak = tl.full([shape.rows], NEVER, tl.float32)
    total = tl.zeros([shape.rows], tl.float32)
    if shape.has_sinks:
        peak = tl.load(sinks + heads, exists, 0) * LOG2_E
        total += 1.0
    return peak, total, tl.zeros([shape.rows, shape.value_block], tl.float32)


@triton.jit
def _store_rows(
    out: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    exists: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Store values / total. Rows without any key get zeros."""
    dims = tl.arange(0, shape.value_block)
    result = values / tl.where(total > 0, total, 1.0)[:, None]
    row = tokens.to(tl.int64) * (shape.kv_heads * shape.fold) + heads
    is_stored = exists[:, None] & (dims[None, :] < shape.value_dim)
    tl.store(out + row[:, None] * shape.value_dim + dims[None, :], result.to(out.dtype.element_ty), is_stored)


@triton.jit
def _attend_kernel(
    queries: tl.tensor,  # [T, heads, dim], with this stride between tokens
    query_stride: tl.tensor,
    pages: tl.tensor,
    tiles: tl.tensor,
    tables: tl.tensor,  # int32 [sequences, table_width]
    table_width: tl.tensor,
    row_positions: tl.tensor,  # int32 [T]
    row_ends: tl.tensor,  # int32 [T]
    sinks: tl.tensor,
    out: tl.tensor,  # [T, heads, value_dim]
    partial_stats: tl.tensor,  # float32 [2, T, heads, chunks] if split
    partial_values: tl.tensor,  # float32 [T, heads, chunks, value_dim] if split
    stats_side: tl.tensor,  # T * heads * chunks
    chunks: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Compute the attention of one tile and KV head: all chunks of keys, or, if split, one chunk of them.

    The grid is (tiles, KV heads, chunks if split else 1). ``tiles`` and the tables: as in ``BatchTables``. ``pages``:
    all pages of a layer. ``sinks``: float32 [heads]. Unused arguments may be any tensor.
    """
    sequence, tokens, heads, exists = _tile_rows(tiles, shape)
    positions = tl.load(row_positions + tokens, exists, 0)
    visible_ends = tl.load(row_ends + tokens, exists, 0)
    last_end = tl.max(visible_ends, 0)
    first_key = last_end * 0
    if shape.window > 0:
        first_key = tl.maximum(tl.min(tl.where(exists, positions, last_end), 0) - shape.window + 1, 0)
    dims, value_dims = tl.arange(0, shape.dim_block), tl.arange(0, shape.value_block)
    key_dim: tl.constexpr = shape.value_dim if shape.has_latents else shape.dim
    rows = queries + tokens[:, None].to(tl.int64) * query_stride + heads[:, None] * shape.dim
    query = tl.load(rows + dims[None, :], exists[:, None] & (dims[None, :] < key_dim), 0)
    query_tail = query
    if shape.has_latents:
        tail_dims = shape.value_dim + tl.arange(0, shape.tail_block)[None, :]
        query_tail = tl.load(rows + tail_dims, exists[:, None] & (tail_dims < shape.dim), 0)
    if shape.is_wide:
        query, query_tail = query.to(tl.float32), query_tail.to(tl.float32)
    keys = pages + tl.program_id(1) * (PAGE * shape.width)
    table = tables + sequence * table_width
    first_chunk = first_key // CHUNK
    if shape.is_split:
        chunk = first_chunk + tl.program_id(2)
        if chunk * CHUNK < last_end:
            peak, total, values = _attend_chunk(
                query, query_tail, keys, table, tl.maximum(first_key, chunk * CHUNK),
                tl.minimum(last_end, (chunk + 1) * CHUNK), positions, visible_ends, scale, cap, shape,
            )  # fmt: skip
            row = (tokens.to(tl.int64) * (shape.kv_heads * shape.fold) + heads) * chunks + tl.program_id(2)
            tl.store(partial_stats + row, peak, exists)
            tl.store(partial_stats + stats_side + row, total, exists)
            is_stored = exists[:, None] & (value_dims[None, :] < shape.value_dim)
            tl.store(partial_values + row[:, None] * shape.value_dim + value_dims[None, :], values, is_stored)
    else:
        peak, total, values = _start_rows(sinks, heads, exists, shape)
        for chunk in range(first_chunk, tl.cdiv(last_end, CHUNK)):
            next_peak, next_total, next_values = _attend_chunk(
                query, query_tail, keys, table, tl.maximum(first_key, chunk * CHUNK),
                tl.minimum(last_end, (chunk + 1) * CHUNK), positions, visible_ends, scale, cap, shape,
            )  # fmt: skip
            peak, total, values = _merge(peak, total, values, next_peak, next_total, next_values)
        _store_rows(out, total, values, tokens, heads, exists, shape)


@triton.jit
def _merge_kernel(
    partial_stats: tl.tensor,
    partial_values: tl.tensor,
    stats_side: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    row_positions: tl.tensor,
    row_ends: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Merge the partial results of a tile, in the order of positions."""
    _, tokens, heads, exists = _tile_rows(tiles, shape)
    positions = tl.load(row_positions + tokens, exists, 0)
    last_end = tl.max(tl.load(row_ends + tokens, exists, 0), 0)
    first_chunk = last_end * 0
    if shape.window > 0:
        first_key = tl.min(tl.where(exists, positions, last_end), 0) - shape.window + 1
        first_chunk = tl.maximum(first_key, 0) // CHUNK
    dims = tl.arange(0, shape.value_block)
    row = (tokens.to(tl.int64) * (shape.kv_heads * shape.fold) + heads) * chunks
    is_value = exists[:, None] & (dims[None, :] < shape.value_dim)
    peak, total, values = _start_rows(sinks, heads, exists, shape)
    for chunk in range(0, tl.cdiv(last_end, CHUNK) - first_chunk):
        next_peak = tl.load(partial_stats + row + chunk, exists, NEVER)
        next_total = tl.load(partial_stats + stats_side + row + chunk, exists, 0)
        offsets = (row[:, None] + chunk) * shape.value_dim + dims[None, :]
        next_values = tl.load(partial_values + offsets, is_value, 0)
        peak, total, values = _merge(peak, total, values, next_peak, next_total, next_values)
    _store_rows(out, total, values, tokens, heads, exists, shape)


def attention_shape(
    queries: torch.Tensor, pool: LayerPages, rows: int, window: int, *, has_cap: bool, has_sinks: bool
) -> AttentionShape:
    """Return the constants of the kernels for queries [T, heads, dim] over these pages, unsplit."""
    layer = pool.page_format.layer
    tail = layer.dim - layer.value_dim if layer.has_latents else 0
    return AttentionShape(
        rows=rows,
        fold=queries.shape[1] // layer.heads,
        kv_heads=layer.heads,
        dim=layer.dim,
        value_dim=layer.value_dim,
        width=pool.page_format.shape[-1],
        window=window,
        has_cap=has_cap,
        has_sinks=has_sinks,
        is_int8=pool.page_format.dtype == torch.int8,
        has_latents=layer.has_latents,
        is_split=False,
        dim_block=max(16, triton.next_power_of_2(layer.dim - tail)),
        value_block=max(16, triton.next_power_of_2(layer.value_dim)),
        tail_block=max(16, triton.next_power_of_2(tail)),
        stages=PAGES_AHEAD,
        is_wide=INTERPRETED,
    )


def attend(
    queries: torch.Tensor,
    pool: LayerPages,
    plan: TablePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_split: bool | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, dim] over pages: [T, heads, value_dim], dtype of the queries.

    Adjacent heads of a token must be adjacent in memory. ``is_split``: whether each chunk gets a program of its own;
    None decides it by the number of programs. It changes no bit.
    """
    tables, layer = plan.tables, pool.page_format.layer
    total, heads = queries.shape[:2]
    tiles, rows = plan.choose_tiles(heads // layer.heads, is_wide=layer.has_latents)
    shape = attention_shape(queries, pool, rows, plan.window, has_cap=softcap is not None, has_sinks=sinks is not None)
    chunks, programs = plan.chunks, len(tiles) * layer.heads
    if is_split is None:
        is_split = chunks > 1 and programs < BUSY_PROGRAMS
    out = queries.new_empty(total, heads, layer.value_dim)
    stats = values = unused(queries)
    if is_split:
        shape = replace(shape, is_split=True)
        stats = queries.new_empty(2, total, heads, chunks, dtype=torch.float32)
        values = queries.new_empty(total, heads, chunks, layer.value_dim, dtype=torch.float32)
    sinks = unused(queries) if sinks is None else sinks.float()
    side = total * heads * chunks
    warps = 8 if shape.has_latents or (shape.is_int8 and shape.dim_block > WIDE_HEAD) else 4
    _attend_kernel[(len(tiles), layer.heads, chunks if is_split else 1)](
        queries, queries.stride(0), pool.data, tiles, tables.pages, tables.pages.stride(0), tables.positions,
        tables.visible_ends, sinks, out, stats, values, side, chunks, scale, softcap or 1.0, shape, num_warps=warps,
        **NO_FUSION,
    )  # fmt: skip
    if is_split:
        _merge_kernel[(len(tiles), layer.heads)](
            stats,
            values,
            side,
            chunks,
            tiles,
            tables.positions,
            tables.visible_ends,
            sinks,
            out,
            shape,
            num_warps=warps,
            **NO_FUSION,
        )
    return out
