"""Attention over pages in torch operators: correct everywhere, the same bits for a row in every batch.

It must not know sequences or layers; it sees packed rows, the spans they form, and one layer's pages.

How a row keeps its bits. Queries are cut into tiles of one sequence, tiles of similar size are computed together, and
everything that depends on the company a row has there leaves its own arithmetic alone:

* a score is one chain over the head's dimension, in float32 (scores of real models exceed what bfloat16 resolves);
* a matrix product gets a multiple of ROWS rows, for one or two rows, also at the end of many, meet other kernels;
* keys beyond a row's own are masked to -inf: exp gives 0, and adding 0 changes no sum. Key ranges start at multiples of
  CHUNK and are padded to multiples of PAD, so that each key always meets the same vector lane;
* values are summed in chunks of CHUNK absolute positions, chunk after chunk in float32.

Pages are [pages, 2, kv_heads, BLOCK_SIZE, width], keys before values. The last page is never handed out and stays zero:
it pads page tables, so that no stranger's numbers are ever multiplied, not even by zero (0 * NaN is NaN). In pages of
int8 the last four bytes of each row are a float32: what its numbers are multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from parley.core.sequence import BLOCK_SIZE
from parley.native.layout import LayerKV, Span
from parley.native.pool import Format, Pool

TILE = 64  # query rows of a tile
PAD = 64  # key ranges are padded to a multiple of this
CHUNK = 512  # keys whose values are summed in one matrix product
ROWS = 16  # rows of a matrix product come in multiples of this
SCALE = 4  # bytes of a row's scale
BUDGET = 1 << 19  # elements of a group's score matrix, and of the keys gathered for it: what caches hold


@dataclass(frozen=True)
class Group:
    """Tiles computed together: S tiles of R rows over L keys. ``take``/``put``: None if the batch is used as it is."""

    tiles: int
    rows: int
    keys: int
    take: torch.Tensor | None  # int64 [S * R], the batch row of each tile row (padding repeats a real one)
    put: torch.Tensor | None  # int64 [S * R], where its result goes (padding goes to row T)
    pages: torch.Tensor  # int64 [2 * S * kv_heads * L / BLOCK_SIZE], rows of the pages as [pages * 2 * kv_heads, ...]
    clear: int  # so many keys at the beginning are seen by all rows
    mask: torch.Tensor | None  # float32 [S, 1, 1, R, L - clear], 0 or -inf; None if nothing is left


@dataclass(frozen=True)
class Tile:
    token: int  # its first row in the batch
    count: int
    position: int  # of that row in its sequence
    start: int  # first key position, a multiple of CHUNK
    length: int  # keys, up to its last row's own
    table: list[int]


def format(layer: LayerKV, dtype: torch.dtype) -> Format:
    """Pages that store ``dtype``: the model's own, or int8."""
    width = max(layer.dim, layer.value_dim)
    if dtype == torch.int8:
        width = -(-width // SCALE) * SCALE + SCALE
    return Format(layer, (2, layer.heads, BLOCK_SIZE, width), dtype, False)


def plan(
    spans: list[Span],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    zero_page: int,
    device: torch.device,
) -> list[Group]:
    """Group a batch's rows. One plan serves all layers of one shape; ``dim`` is that of the pages."""
    fold = heads // kv_heads
    groups: dict[tuple[int, int], list[Tile]] = {}
    for span in spans:
        past = span.length - span.count
        for first in range(0, span.count, TILE):
            count = min(TILE, span.count - first)
            position = past + first
            start = 0 if window is None else max(0, position - window + 1) // CHUNK * CHUNK
            tile = Tile(span.first + first, count, position, start, position + count - start, span.table)
            key = ((count - 1).bit_length(), ((tile.length - 1) // PAD).bit_length())
            groups.setdefault(key, []).append(tile)
    total = sum(span.count for span in spans)
    result = []
    for (log_rows, _), tiles in groups.items():
        rows = 1 << log_rows
        most = -(-max(tile.length for tile in tiles) // PAD) * PAD
        step = max(1, BUDGET // (most * kv_heads * max(fold * rows, dim)))
        for i in range(0, len(tiles), step):
            result.append(_group(tiles[i : i + step], rows, kv_heads, window, zero_page, total, device))
    return result


def _group(
    tiles: list[Tile], rows: int, kv_heads: int, window: int | None, zero_page: int, total: int, device: torch.device
) -> Group:
    keys = -(-max(tile.length for tile in tiles) // PAD) * PAD
    size = len(tiles)
    table = np.full((size, keys // BLOCK_SIZE), zero_page, dtype=np.int64)
    for i, tile in enumerate(tiles):
        pages = tile.table[tile.start // BLOCK_SIZE : -(-(tile.start + tile.length) // BLOCK_SIZE)]
        table[i, : len(pages)] = pages
    inside = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1)
    index = table[None, :, None, :] * (2 * kv_heads) + inside

    token, count, position, start = (
        np.array([getattr(tile, name) for tile in tiles])[:, None] for name in ("token", "count", "position", "start")
    )
    row = np.minimum(np.arange(rows)[None], count - 1)
    query = (position + row - start)[:, :, None]
    clear = int((position - start).min()) + 1 if window is None else 0
    key = np.arange(clear, keys)[None, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None, None])

    take = (token + row).reshape(-1)
    put = np.where(np.arange(rows)[None] < count, token + row, total).reshape(-1)
    whole = take.size == total and bool((put == np.arange(total)).all())
    return Group(
        size,
        rows,
        keys,
        None if whole else torch.from_numpy(take).to(device),
        None if whole else torch.from_numpy(put).to(device),
        torch.from_numpy(index.reshape(-1)).to(device),
        clear,
        mask.to(device) if clear < keys else None,
    )


def attend(
    queries: torch.Tensor,
    pool: Pool,
    groups: list[Group],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries [T, heads, key_dim] over pages: [T, heads, value_dim], dtype of the queries.

    ``groups`` is a plan of the same rows; causality and window are in it. Softmax in float32; probabilities, times the
    values' scales where those are int8, are rounded to the dtype of the pages, or else of the queries, before they
    weigh the values.
    """
    total, heads = queries.shape[:2]
    value_dim = pool.format.layer.value_dim

    def compute(rows: torch.Tensor, group: Group) -> torch.Tensor:
        return _attend(rows, pool.data, group, scale, value_dim, softcap, sinks)

    if len(groups) == 1 and groups[0].put is None:
        return compute(queries, groups[0])
    out = queries.new_empty(total + 1, heads, value_dim)
    for group in groups:
        assert group.take is not None and group.put is not None
        out.index_copy_(0, group.put, compute(queries.index_select(0, group.take), group))
    return out[:total]


def _attend(
    queries: torch.Tensor,
    pages: torch.Tensor,
    group: Group,
    scale: float,
    value_dim: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    kv_heads, width = pages.shape[2], pages.shape[-1]
    heads, dim = queries.shape[1:]
    fold = heads // kv_heads
    size, rows, length = group.tiles, group.rows, group.keys
    many, folded = size * kv_heads, fold * rows
    # The heads that share keys become rows of one product: [S, R, kv_heads, fold, D] -> [S * kv_heads, fold * R, D].
    query = (queries.float() * scale).view(size, rows, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(many, folded, dim)
    query = _rows(query)
    key, value = pages.view(-1, BLOCK_SIZE * width).index_select(0, group.pages).view(2, many, length, width)
    scaled = pages.dtype == torch.int8
    scores = torch.bmm(query, key[..., :dim].float().transpose(1, 2))[:, :folded]
    if scaled:
        scores *= _scales(key)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    scores = scores.view(size, kv_heads, fold, rows, length)
    if group.mask is not None:
        scores[..., group.clear :].add_(group.mask)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        # In front, in a vector of its own: behind the keys its lane would depend on the padding.
        sink = scores.new_full((size, kv_heads, fold, rows, PAD), float("-inf"))
        sink[..., 0] = sinks.float().view(1, kv_heads, fold, 1)
        weights = torch.softmax(torch.cat((sink, scores), -1), -1)[..., PAD:]
    weights = weights.view(many, folded, length)
    if scaled:
        weights, value = weights * _scales(value), value.to(queries.dtype)
    weights = _rows(weights.to(value.dtype))
    result = torch.bmm(weights[..., :CHUNK], value[:, :CHUNK])
    if length > CHUNK:
        result = result.float()
        for first in range(CHUNK, length, CHUNK):
            result += torch.bmm(weights[..., first : first + CHUNK], value[:, first : first + CHUNK])
    result = result[:, :folded].to(queries.dtype).view(size, kv_heads, fold, rows, width).permute(0, 3, 1, 2, 4)
    return result[..., :value_dim].contiguous().view(size * rows, heads, value_dim)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., R, N] and zeros, up to a multiple of ROWS."""
    short = -x.shape[-2] % ROWS
    return F.pad(x, (0, 0, 0, short)) if short else x


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """The scales of int8 rows [N, L, width]: float32 [N, 1, L]."""
    return rows[..., -SCALE:].contiguous().view(torch.float32).transpose(1, 2)


def places(slots: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Where keys, then values, of tokens at ``slots`` live in pages seen as rows: int64 [T, 2 * kv_heads]."""
    first = (slots // BLOCK_SIZE) * (2 * kv_heads * BLOCK_SIZE) + slots % BLOCK_SIZE
    return first[:, None] + torch.arange(0, 2 * kv_heads * BLOCK_SIZE, BLOCK_SIZE, device=slots.device)


def write(keys: torch.Tensor, values: torch.Tensor, pool: Pool, places: torch.Tensor) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] at ``places`` [T, 2 * kv_heads]."""
    heads = keys.shape[1]
    store(keys, pool, places[:, :heads])
    store(values, pool, places[:, heads:])


def store(rows: torch.Tensor, pool: Pool, places: torch.Tensor) -> None:
    """Store rows [T, N, up to the pages' width] at ``places`` [T, N]."""
    pages = pool.data.view(-1, pool.data.shape[-1])
    if pages.dtype == torch.int8:
        rows, scale = quantise(rows)
        pages[:, -SCALE:].index_put_((places,), scale.flatten().view(torch.int8).view(*scale.shape[:-1], SCALE))
    pages[:, : rows.shape[-1]].index_put_((places,), rows)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., N] as int8 of at most 127, and their scales float32 [..., 1]: not finite if the row is not."""
    rows = rows.float()
    reach = rows.abs().amax(-1, keepdim=True)
    factor = torch.where(reach > 1e-30, torch.full_like(reach, 127).div(reach), 0)
    return rows.mul(factor).round_().nan_to_num_(0).to(torch.int8), reach / 127
