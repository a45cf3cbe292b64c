"""Indexers (``IndexerShape``): score tokens, choose the best, and copy these to pages of their own.

All of it runs in torch's operators, on every device. On a CPU the choice of a row depends bit for bit on its own query
and the keys before it alone, not on the batch or on how a prompt was cut into steps. On GPUs this also requires that
the rounding of float32 products does not depend on the number of rows, which no test has shown.

* A product of a query and a key is one sum over a head's numbers, in float32, in tiles as in ``torch_attention``.
* The sum over heads adds one head after another, and each factor and each sum is rounded on its own.
* Of equal scores, those of earlier positions are chosen.

Attention over chosen tokens copies them to pages of their own, in the order of their positions, and runs the kernels of
plain attention over these. Copies have the same bits, so if all tokens are chosen, the result is that of plain
attention over the original pages, bit for bit. So nothing changes abruptly where contexts become longer than the number
of chosen tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from parley.core.sequence import PAGE_SIZE
from parley.native.layer_shape import BlockIndexerShape
from parley.native.layout import RowSpan
from parley.native.pool import LayerPages, PageFormat
from parley.native.torch_forms.torch_attention import KEY_MULTIPLE, TileGroup, pad_rows, plan_tiles
from parley.native.torch_forms.torch_kernels import rotate_rows

# Keys that are scored in one product, multiples of ``torch_attention.KEY_MULTIPLE``: what fits into the cache of a CPU,
# and on other devices more, because each product, and each head of it, is a kernel to start.
KEY_RANGE, DEVICE_KEY_RANGE = 512, 8192


def rotate_part(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool, is_last: bool = False
) -> torch.Tensor:
    """Return rows [T, heads, dim] whose first numbers, or last ones, are rotated by cos and sin, as those of
    ``rope_write``."""
    rotary, still_count = cos.shape[-1], rows.shape[-1] - cos.shape[-1]
    if is_last:
        still, rotated = rows.split([still_count, rotary], -1)
        return torch.cat((still, rotate_rows(rotated.float(), cos, sin, is_interleaved).to(rows.dtype)), -1)
    rotated, still = rows.split([rotary, still_count], -1)
    return torch.cat((rotate_rows(rotated.float(), cos, sin, is_interleaved).to(rows.dtype), still), -1)


def plan_choice(
    spans: list[RowSpan], heads: int, pool: LayerPages, visible_ends: torch.Tensor | None = None
) -> list[TileGroup]:
    """Plan ``choose_tokens`` for the rows of these spans, for all layers of a step. ``visible_ends``: as in
    ``plan_tiles``."""
    pages = pool.data
    return plan_tiles(
        spans,
        heads=heads,
        page_shape=pool.page_format.shape,
        window=None,
        visible_ends=visible_ends,
        zero_page=len(pages) - 1,
        device=pages.device,
    )


def choose_tokens(
    queries: torch.Tensor, weights: torch.Tensor, pool: LayerPages, groups: list[TileGroup], count: int
) -> torch.Tensor:
    """Return the positions of the ``count`` tokens with the best scores for each row, ascending: int64 [T, count].

    queries [T, heads, dim], weights float32 [T, heads]. ``pool``: the keys. ``groups``: the plan of the same rows, each
    of which sees at least ``count`` tokens. A score that is not a number counts as the lowest.
    """
    chosen = torch.empty(len(queries) + 1, count, dtype=torch.int64, device=queries.device)
    for group in groups:
        rows, own_weights = queries, weights
        if group.gather_index is not None:
            rows, own_weights = (numbers.index_select(0, group.gather_index) for numbers in (queries, weights))
        best = _choose_best(_score_tiles(rows, own_weights, pool, group), count)
        if group.scatter_index is None:
            return best
        chosen.index_copy_(0, group.scatter_index, best)
    return chosen[:-1]


def choose_blocks(
    queries: torch.Tensor, pool: LayerPages, groups: list[TileGroup], shape: BlockIndexerShape
) -> torch.Tensor:
    """Return the numbers of the blocks that each head of each row chooses, ascending: int64 [T, heads, top_k].

    queries [T, heads, dim]. ``pool``: the keys. ``groups``: the plan of the same rows, each of which sees more than
    ``shape.top_k`` blocks. A score that is not a number counts as the lowest.
    """
    chosen = torch.empty(len(queries) + 1, shape.heads, shape.top_k, dtype=torch.int64, device=queries.device)
    for group in groups:
        rows = queries if group.gather_index is None else queries.index_select(0, group.gather_index)
        scores = _score_blocks(rows, pool, group, shape)
        best = _choose_best(scores.flatten(0, 1), shape.top_k).view(len(rows), shape.heads, shape.top_k)
        if group.scatter_index is None:
            return best
        chosen.index_copy_(0, group.scatter_index, best)
    return chosen[:-1]


def _score_blocks(queries: torch.Tensor, pool: LayerPages, group: TileGroup, shape: BlockIndexerShape) -> torch.Tensor:
    """Return the scores of the blocks of a group's keys, float32 [tiles * rows, heads, blocks]: inf for those that are
    always chosen, -inf for those that a row does not see."""
    size, rows, length = group.tiles, group.rows, group.keys
    heads, dim = queries.shape[1:]
    query = queries.float().view(size, rows, heads, dim).transpose(1, 2).reshape(size, heads * rows, dim)
    query = pad_rows(query)
    keys = pool.data.view(-1, PAGE_SIZE * dim).index_select(0, group.pages).view(size, length, dim)
    unit = math.lcm(shape.block_size, KEY_MULTIPLE)
    key_range = max(1, (KEY_RANGE if queries.device.type == "cpu" else DEVICE_KEY_RANGE) // unit) * unit
    parts = []
    for first in range(0, length, key_range):
        some = keys[:, first : first + key_range].float().transpose(1, 2)
        products = torch.bmm(query, some)[:, : heads * rows].view(size, heads, rows, -1)
        products.nan_to_num_(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
        masked = max(group.unmasked_keys, first)
        if group.mask is not None and masked < first + products.shape[-1]:
            mask = group.mask[:, 0, :, :, masked - group.unmasked_keys :][..., : first + products.shape[-1] - masked]
            products[..., masked - first :].masked_fill_(mask < 0, -torch.inf)
        products = F.pad(products, (0, -products.shape[-1] % shape.block_size), value=-torch.inf)
        parts.append(products.unflatten(-1, (-1, shape.block_size)).amax(-1))
    scores = torch.cat(parts, -1)
    own = group.positions[:, 0].long() // shape.block_size  # [tiles, 1, rows, 1]
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    scores.masked_fill_((numbers <= own) & (numbers > own - shape.local_blocks), torch.inf)
    return scores.transpose(1, 2).reshape(size * rows, heads, -1)


def _score_tiles(queries: torch.Tensor, weights: torch.Tensor, pool: LayerPages, group: TileGroup) -> torch.Tensor:
    """Return the scores of a group's keys, float32 [tiles * rows, keys]; -inf where a row does not see them."""
    size, rows, length = group.tiles, group.rows, group.keys
    heads, dim = queries.shape[1:]
    query = queries.float().view(size, rows, heads, dim).transpose(1, 2).reshape(size, heads * rows, dim)
    query = pad_rows(query)
    keys = pool.data.view(-1, PAGE_SIZE * dim).index_select(0, group.pages).view(size, length, dim)
    factors = weights.view(size, rows, heads, 1)
    scores = torch.zeros(size, rows, length, device=queries.device)
    key_range = KEY_RANGE if queries.device.type == "cpu" else DEVICE_KEY_RANGE
    for first in range(0, length, key_range):
        some = keys[:, first : first + key_range].float().transpose(1, 2)
        products = torch.bmm(query, some)[:, : heads * rows].relu_().view(size, heads, rows, -1)
        total = scores[..., first : first + key_range]
        for head in range(heads):
            total += products[:, head] * factors[:, :, head]
    scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if group.mask is not None:
        scores[..., group.unmasked_keys :].masked_fill_(group.mask[:, 0, 0] < 0, -torch.inf)
    return scores.view(size * rows, length)


def _choose_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` largest of each row of scores [N, L], ascending: int64 [N, count].

    Of equal scores, the first are chosen. ``topk`` returns equal scores in any order, so only the value of the smallest
    one is used, not its index.
    """
    smallest = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    is_larger, is_equal = scores > smallest, scores == smallest
    equal_count = count - is_larger.sum(-1, keepdim=True)  # how many of the equal ones are chosen
    is_chosen = is_larger | (is_equal & (is_equal.cumsum(-1) <= equal_count))
    columns = torch.where(is_chosen, is_chosen.cumsum(-1) - 1, count)  # others are written to an extra last column
    indices = torch.arange(scores.shape[-1], device=scores.device).expand_as(columns)
    return columns.new_empty(len(scores), count + 1).scatter_(1, columns, indices)[:, :count]


def gather_pages(pool: LayerPages, slots: torch.Tensor) -> LayerPages:
    """Return new pages with only the tokens at ``slots`` (page * PAGE_SIZE + offset, int64 [N, count]).

    The tokens of row i fill whole pages, those from i * ceil(count / PAGE_SIZE) on. The last page is zero.
    """
    count = slots.shape[1]
    tokens = view_tokens(pool)[slots // PAGE_SIZE, slots % PAGE_SIZE]
    tokens = F.pad(tokens, (0, 0, 0, -count % PAGE_SIZE)).view(-1, PAGE_SIZE, tokens.shape[-1])
    copy = LayerPages(pool.data.new_zeros(len(tokens) + 1, *pool.data.shape[1:]), pool.page_format)
    view_tokens(copy)[:-1].copy_(tokens)
    return copy


def split_heads(pool: LayerPages, head_format: PageFormat, chosen: torch.Tensor) -> tuple[LayerPages, torch.Tensor]:
    """Return pages of one key/value head each, of ``head_format``, and which of them have the ``chosen`` pages (int64
    [N, heads, count]) of each head: int64 [N * heads, count]. The last page is zero.

    A tiled page has one head after the other (``pages.h``), so each head of the pool is such a page, and nothing is
    copied. Of other pages, the chosen ones are copied.
    """
    heads = chosen.shape[1]
    numbers = torch.arange(heads, device=chosen.device)[:, None]
    if head_format.tiled:
        head_pages = LayerPages(pool.data.view(len(pool.data) * heads, -1), head_format)
        return head_pages, (chosen * heads + numbers).flatten(0, 1)
    copies = pool.data.new_zeros(chosen.numel() + 1, *head_format.shape)
    copies[:-1] = pool.data[chosen, :, numbers].flatten(0, 2)[:, :, None]
    return LayerPages(copies, head_format), torch.arange(chosen.numel(), device=chosen.device).view(-1, chosen.shape[2])


def view_tokens(pool: LayerPages) -> torch.Tensor:
    """Return pages of latents as [pages, PAGE_SIZE, stored numbers of a token].

    A tiled page (``pages.h``) consists of 32-bit words, each two bfloat16 or four int8 of one token: the first word of
    all 16 tokens, then the second, and so on; in int8 pages the scales of the tokens come last.
    """
    if pool.page_format.tiled:
        return pool.data.view(torch.int32).view(len(pool.data), -1, PAGE_SIZE).transpose(1, 2)
    return pool.data.view(len(pool.data), PAGE_SIZE, -1)
