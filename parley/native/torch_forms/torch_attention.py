"""Attention over KV pages in torch operators. It runs everywhere, and a row has the same bits in every batch.

This module knows neither sequences nor layers, only packed rows, their spans, and the pages of one layer.

How the bits of a row are independent of the batch: queries are cut into tiles of one sequence, and tiles of similar
size are computed together. The other rows of such a group do not change the arithmetic of a row:

* A score is one sum over the head dimension, in float32 (scores of real models exceed the resolution of bfloat16).
* A matrix product always has a multiple of ROW_MULTIPLE rows, because torch computes one or two rows, even at the end
  of many, with other kernels.
* Keys that a row does not attend to are masked to -inf: exp gives 0, and adding 0 changes no sum. Key ranges start at
  multiples of VALUE_CHUNK and are padded to multiples of KEY_MULTIPLE, so each key is always in the same vector lane.
* Values are summed in chunks of VALUE_CHUNK absolute positions, chunk after chunk, in float32.

Pages are [pages, 2, kv_heads, PAGE_SIZE, width], keys before values, or [pages, 1, ...] where values are parts of keys
(``LayerKV.has_latents``). The last page is never allocated and stays zero.
It pads page tables, so that another sequence's keys and values are never multiplied, not even by zero (0 * NaN is NaN).
In int8 pages the last four bytes of each row are a float32, the scale of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from parley.core.sequence import PAGE_SIZE
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages, PageFormat

TILE_ROWS = 64  # query rows of a tile
FOLDED_ROWS = 1024  # most rows of a tile's products, which have a row for each query row and head that shares keys
KEY_MULTIPLE = 64  # key ranges are padded to a multiple of this
VALUE_CHUNK = 512  # keys whose values are summed in one matrix product
ROW_MULTIPLE = 16  # rows of a matrix product are padded to a multiple of this
SCALE_BYTES = 4  # bytes of a row's scale
GROUP_ELEMENTS = 1 << 19  # elements of a group's score matrix, and of the keys gathered for it: fits in the CPU cache


@dataclass(frozen=True)
class TileGroup:
    """Tiles computed together: S tiles of R rows over L keys. Both indices are None if the batch needs no copy."""

    tiles: int
    rows: int
    keys: int
    gather_index: torch.Tensor | None  # int64 [S * R], the batch row of each tile row (padding repeats a real one)
    scatter_index: torch.Tensor | None  # int64 [S * R], the output row of each tile row (padding goes to row T)
    # int64 [sides * S * kv_heads * L / PAGE_SIZE], rows of the pages as [pages * sides * kv_heads, ...]
    pages: torch.Tensor
    positions: torch.Tensor  # float32 [S, 1, 1, R, 1], of rows, counted from the first key
    unmasked_keys: int  # number of keys at the beginning that all rows attend to
    mask: torch.Tensor | None  # float32 [S, 1, 1, R, L - unmasked_keys], 0 or -inf; None if all keys are unmasked


@dataclass(frozen=True)
class QueryTile:
    """Up to TILE_ROWS query rows of one sequence, and the keys that they attend to."""

    token: int  # its first row in the batch
    count: int
    position: int  # of that row in its sequence
    start: int  # first key position, a multiple of VALUE_CHUNK
    length: int  # number of keys, up to the last that any of its rows attends to
    table: list[int]
    visible_ends: list[int]  # of its rows, as in ``plan_tiles``; empty: attention is causal


def page_format(layer: LayerKV, dtype: torch.dtype) -> PageFormat:
    """Return the format of pages that store ``dtype``: the model's own, or int8."""
    width = max(layer.dim, layer.value_dim)
    if dtype == torch.int8:
        width = -(-width // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES
    return PageFormat(layer, (1 if layer.has_latents else 2, layer.heads, PAGE_SIZE, width), dtype, False)


def plan_tiles(
    spans: list[RowSpan],
    *,
    heads: int,
    page_shape: tuple[int, ...],
    window: int | None,
    chunk: int | None = None,
    visible_ends: torch.Tensor | None,
    zero_page: int,
    device: torch.device,
) -> list[TileGroup]:
    """Group a batch's rows into tiles. One plan serves all layers of one shape; ``page_shape`` is that of a page.

    ``visible_ends`` int64 [T]: the last position that a row attends to, plus 1; None: its own position (attention is
    causal).
    """
    sides, kv_heads, _, dim = page_shape
    fold = heads // kv_heads
    tile_rows = max(1, min(TILE_ROWS, FOLDED_ROWS // fold))
    row_ends = None if visible_ends is None else visible_ends.tolist()
    groups: dict[tuple[int, int], list[QueryTile]] = {}
    for span in spans:
        prior_count = span.length - span.count
        for first in range(0, span.count, tile_rows):
            count = min(tile_rows, span.count - first)
            position = prior_count + first
            start = position // chunk * chunk if chunk else 0
            start = max(start, position - window + 1 if window is not None else 0) // VALUE_CHUNK * VALUE_CHUNK
            token, end, tile_ends = span.first + first, position + count, list[int]()
            if row_ends is not None:
                tile_ends = [min(max(row_ends[token + i], position + i + 1), span.length) for i in range(count)]
                end = max(tile_ends)
            tile = QueryTile(token, count, position, start, end - start, span.table, tile_ends)
            key = ((count - 1).bit_length(), ((tile.length - 1) // KEY_MULTIPLE).bit_length())
            groups.setdefault(key, []).append(tile)
    total = sum(span.count for span in spans)
    result = []
    for (log_rows, _), tiles in groups.items():
        rows = 1 << log_rows
        padded_length = -(-max(tile.length for tile in tiles) // KEY_MULTIPLE) * KEY_MULTIPLE
        step = max(1, GROUP_ELEMENTS // (padded_length * kv_heads * max(fold * rows, dim)))
        for i in range(0, len(tiles), step):
            group = _group_tiles(tiles[i : i + step], rows, (sides, kv_heads), window, chunk, zero_page, total, device)
            result.append(group)
    return result


def _group_tiles(
    tiles: list[QueryTile],
    rows: int,
    page_sides: tuple[int, int],
    window: int | None,
    chunk: int | None,
    zero_page: int,
    total: int,
    device: torch.device,
) -> TileGroup:
    """Return the indices and the mask of tiles that are computed together, each padded to ``rows`` rows.

    ``page_sides``: (sides, kv_heads) of a page. ``zero_page`` pads page tables. ``total``: rows of the batch.
    """
    keys = -(-max(tile.length for tile in tiles) // KEY_MULTIPLE) * KEY_MULTIPLE
    size = len(tiles)
    token, count, position, start = (
        np.array([getattr(tile, name) for tile in tiles])[:, None] for name in ("token", "count", "position", "start")
    )
    row = np.minimum(np.arange(rows)[None], count - 1)
    query = (position + row - start)[:, :, None]
    unmasked_keys = int((position - start).min()) + 1 if window is None and chunk is None else 0
    key = np.arange(unmasked_keys, keys)[None, None]
    hidden = _hidden_keys(tiles, key, query, start[:, :, None], window, chunk)
    mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None])

    gather = (token + row).reshape(-1)
    scatter = np.where(np.arange(rows)[None] < count, token + row, total).reshape(-1)
    takes_all = gather.size == total and bool((scatter == np.arange(total)).all())
    return TileGroup(
        size,
        rows,
        keys,
        None if takes_all else torch.from_numpy(gather).to(device),
        None if takes_all else torch.from_numpy(scatter).to(device),
        torch.from_numpy(_tile_pages(tiles, keys, page_sides, zero_page)).to(device),
        torch.from_numpy(query.astype(np.float32)).view(size, 1, 1, rows, 1).to(device),
        unmasked_keys,
        mask.to(device) if unmasked_keys < keys else None,
    )


def _tile_pages(tiles: list[QueryTile], keys: int, page_sides: tuple[int, int], zero_page: int) -> np.ndarray:
    """Return ``TileGroup.pages`` of tiles that read ``keys`` keys each: int64, in one dimension."""
    table = np.full((len(tiles), keys // PAGE_SIZE), zero_page, dtype=np.int64)
    for i, tile in enumerate(tiles):
        pages = tile.table[tile.start // PAGE_SIZE : -(-(tile.start + tile.length) // PAGE_SIZE)]
        table[i, : len(pages)] = pages
    sides, kv_heads = page_sides
    inside = np.arange(sides * kv_heads).reshape(sides, 1, kv_heads, 1)
    index: np.ndarray = table[None, :, None, :] * (sides * kv_heads) + inside
    return index.reshape(-1)


def _hidden_keys(
    tiles: list[QueryTile], key: np.ndarray, query: np.ndarray, start: np.ndarray, window: int | None, chunk: int | None
) -> np.ndarray:
    """Return which keys each row of the tiles does not see: bool [S, R, L].

    ``key`` [1, 1, L] and ``query`` [S, R, 1]: the keys, and the own key of each row, counted from the first key of the
    tile; ``start`` [S, 1, 1]: the positions of these first keys.
    """
    last = query
    if tiles[0].visible_ends:
        rows = query.shape[1]
        visible_ends = [np.pad(tile.visible_ends, (0, rows - tile.count), "edge") - tile.start for tile in tiles]
        last = np.stack(visible_ends)[:, :, None] - 1
    hidden: np.ndarray = key > last
    if window is not None:
        hidden |= key <= query - window
    if chunk is not None:
        hidden |= key < (query + start) // chunk * chunk - start
    return hidden


def attend(
    queries: torch.Tensor,
    pool: LayerPages,
    groups: list[TileGroup],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, key_dim] over pages: [T, heads, value_dim], dtype of the queries.

    ``groups`` is the plan of the same rows and contains causality, window and chunks. Softmax runs in float32.
    Probabilities (times the scales of int8 values) are rounded to the dtype of the pages, or of the queries if the
    pages are int8, before they multiply the values. ``sinks`` and ``slopes``, [heads]: as in ``LayerShape``.
    """
    total, heads = queries.shape[:2]
    value_dim = pool.page_format.layer.value_dim

    def attend_group(rows: torch.Tensor, group: TileGroup) -> torch.Tensor:
        return _attend_tiles(rows, pool.data, group, scale, value_dim, softcap, sinks, slopes)

    if len(groups) == 1 and groups[0].scatter_index is None:
        return attend_group(queries, groups[0])
    out = queries.new_empty(total + 1, heads, value_dim)
    for group in groups:
        assert group.gather_index is not None and group.scatter_index is not None
        out.index_copy_(0, group.scatter_index, attend_group(queries.index_select(0, group.gather_index), group))
    return out[:total]


def _attend_tiles(
    queries: torch.Tensor,
    pages: torch.Tensor,
    group: TileGroup,
    scale: float,
    value_dim: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of a group's tile rows: queries [S * R, heads, dim] -> [S * R, heads, value_dim].

    ``pages`` [pages, sides, kv_heads, PAGE_SIZE, width]: all pages of a layer.
    """
    kv_heads, width = pages.shape[2], pages.shape[-1]
    heads, dim = queries.shape[1:]
    fold = heads // kv_heads
    size, rows, length = group.tiles, group.rows, group.keys
    products, folded = size * kv_heads, fold * rows  # matrix products, and the rows of each
    # Heads that share keys become rows of one product: [S, R, kv_heads, fold, D] -> [S * kv_heads, fold * R, D].
    query = (queries.float() * scale).view(size, rows, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(products, folded, dim)
    query = pad_rows(query)
    sides = pages.view(-1, PAGE_SIZE * width).index_select(0, group.pages).view(-1, products, length, width)
    key, value = sides[0], sides[-1]
    is_int8 = pages.dtype == torch.int8
    scores = torch.bmm(query, key[..., :dim].float().transpose(1, 2))[:, :folded]
    if is_int8:
        scores *= _row_scales(key)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    scores = scores.view(size, kv_heads, fold, rows, length)
    if slopes is not None:
        distances = torch.arange(length, device=scores.device) - group.positions
        scores.add_(distances * slopes.float().view(1, kv_heads, fold, 1, 1))
    if group.mask is not None:
        scores[..., group.unmasked_keys :].add_(group.mask)
    weights = _softmax(scores, sinks).view(products, folded, length)
    if is_int8:
        weights, value = weights * _row_scales(value), value.to(queries.dtype)
    result = _weigh_values(pad_rows(weights.to(value.dtype)), value)
    result = result[:, :folded].to(queries.dtype).view(size, kv_heads, fold, rows, width).permute(0, 3, 1, 2, 4)
    return result[..., :value_dim].contiguous().view(size * rows, heads, value_dim)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the probabilities of scores [S, kv_heads, fold, R, L]; the rest of their sum to 1 is that of the sinks."""
    if sinks is None:
        return torch.softmax(scores, -1)
    # Sinks are summed first, in a vector of their own: after the keys, their lane would depend on the padding.
    sink = scores.new_full((*scores.shape[:-1], KEY_MULTIPLE), float("-inf"))
    sink[..., 0] = sinks.float().view(1, *scores.shape[1:3], 1)
    return torch.softmax(torch.cat((sink, scores), -1), -1)[..., KEY_MULTIPLE:]


def _weigh_values(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the products [N, R, width] of weights [N, R, L] and values [N, L, width].

    They are in the values' dtype, or in float32 if there are more than VALUE_CHUNK values: sums of chunks.
    """
    result = torch.bmm(weights[..., :VALUE_CHUNK], values[:, :VALUE_CHUNK])
    length = values.shape[1]
    if length > VALUE_CHUNK:
        result = result.float()
        for first in range(VALUE_CHUNK, length, VALUE_CHUNK):
            result += torch.bmm(weights[..., first : first + VALUE_CHUNK], values[:, first : first + VALUE_CHUNK])
    return result


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Zero-pad rows [..., R, N] to a multiple of ROW_MULTIPLE."""
    short = -x.shape[-2] % ROW_MULTIPLE
    return F.pad(x, (0, 0, 0, short)) if short else x


def _row_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scales of int8 rows [N, L, width]: float32 [N, 1, L]."""
    return rows[..., -SCALE_BYTES:].contiguous().view(torch.float32).transpose(1, 2)


def write_indices(slot_mapping: torch.Tensor, page_shape: tuple[int, ...]) -> torch.Tensor:
    """Return the row numbers of keys, then values, of tokens in the pages: int64 [T, sides * kv_heads].

    ``slot_mapping``: page * PAGE_SIZE + offset of each token, int64 [T].
    """
    size = page_shape[0] * page_shape[1] * PAGE_SIZE
    first = (slot_mapping // PAGE_SIZE) * size + slot_mapping % PAGE_SIZE
    return first[:, None] + torch.arange(0, size, PAGE_SIZE, device=slot_mapping.device)


def write_kv(keys: torch.Tensor, values: torch.Tensor, pool: LayerPages, indices: torch.Tensor) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``indices`` [T, sides * kv_heads]."""
    heads = keys.shape[1]
    store_rows(keys, pool, indices[:, :heads])
    if not pool.page_format.layer.has_latents:
        store_rows(values, pool, indices[:, heads:])


def store_rows(rows: torch.Tensor, pool: LayerPages, indices: torch.Tensor) -> None:
    """Store rows [T, N, up to the pages' width] at ``indices`` [T, N]."""
    pages = pool.data.view(-1, pool.data.shape[-1])
    if pages.dtype == torch.int8:
        rows, scale = quantize_kv(rows)
        pages[:, -SCALE_BYTES:].index_put_(
            (indices,), scale.flatten().view(torch.int8).view(*scale.shape[:-1], SCALE_BYTES)
        )
    pages[:, : rows.shape[-1]].index_put_((indices,), rows)


def quantize_kv(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., N] as int8 of at most 127, and scales float32 [..., 1], not finite where the row is not."""
    rows = rows.float()
    reach = rows.abs().amax(-1, keepdim=True)
    factor = torch.where(reach > 1e-30, torch.full_like(reach, 127).div(reach), 0)
    return rows.mul(factor).round_().nan_to_num_(0).to(torch.int8), reach / 127
