"""Indexers (``IndexerShape``): the scores of tokens, the choice of the best, and pages with only these.

All of it runs in torch's operators, on every device. On a CPU a row's choice depends on its own query and on the keys
that it sees, bit for bit, not on the batch or on how a prompt was cut into steps. On GPUs the same holds if their
products of float32 do not round by the number of rows, which no test has shown.

* A product of a query and a key is one sum over a head's numbers, in float32, in tiles as in ``torch_attention``.
* The sum over heads adds one head after another, and each factor and each sum is rounded on its own.
* The choice knows no order among equal scores but that of positions.

Attention over chosen tokens copies them to pages of their own, in the order of their positions, and runs the kernels of
plain attention over these. A copied token has the bits that it had, so if all tokens were chosen, the result would be
that of plain attention over the original pages, bit for bit: there is no seam where contexts become longer than the
number of chosen tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.core.sequence import BLOCK_SIZE
from parley.native.layout import Span
from parley.native.pool import PagePool
from parley.native.torch_forms.torch_attention import TileGroup, pad_rows, plan_tiles
from parley.native.torch_forms.torch_kernels import rotate_rows

# Keys that are scored in one product, multiples of ``torch_attention.KEY_MULTIPLE``: what fits into the cache of a CPU,
# and on other devices more, because each product, and each head of it, is a kernel to start.
KEY_RANGE, DEVICE_KEY_RANGE = 512, 8192


def rotate_first(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """Return rows [T, heads, dim] whose first numbers are rotated by cos and sin, as those of ``rope_write``."""
    rotated, still = rows.split([cos.shape[-1], rows.shape[-1] - cos.shape[-1]], -1)
    return torch.cat((rotate_rows(rotated.float(), cos, sin, is_interleaved).to(rows.dtype), still), -1)


def plan_choice(spans: list[Span], heads: int, pool: PagePool) -> list[TileGroup]:
    """Plan ``choose_tokens`` for the rows of these spans, for all layers of a step."""
    pages = pool.data
    return plan_tiles(
        spans,
        heads=heads,
        page_shape=pool.page_format.shape,
        window=None,
        ends=None,
        zero_page=len(pages) - 1,
        device=pages.device,
    )


def choose_tokens(
    queries: torch.Tensor, weights: torch.Tensor, pool: PagePool, groups: list[TileGroup], count: int
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


def _score_tiles(queries: torch.Tensor, weights: torch.Tensor, pool: PagePool, group: TileGroup) -> torch.Tensor:
    """Return the scores of a group's keys, float32 [tiles * rows, keys]; -inf where a row does not see them."""
    size, rows, length = group.tiles, group.rows, group.keys
    heads, dim = queries.shape[1:]
    query = queries.float().view(size, rows, heads, dim).transpose(1, 2).reshape(size, heads * rows, dim)
    query = pad_rows(query)
    keys = pool.data.view(-1, BLOCK_SIZE * dim).index_select(0, group.pages).view(size, length, dim)
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
    """Return the places of the ``count`` largest of each row of scores [N, L], ascending: int64 [N, count].

    Of equal scores, the first are taken. The value of the least one that is taken does not depend on the order in which
    ``topk`` finds equal ones, its index does.
    """
    least = scores.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, scores == least
    missing = count - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= missing))
    places = torch.where(taken, taken.cumsum(-1) - 1, count)  # all that are not taken go to one more column
    numbers = torch.arange(scores.shape[-1], device=scores.device).expand_as(places)
    return places.new_empty(len(scores), count + 1).scatter_(1, places, numbers)[:, :count]


def gather_pages(pool: PagePool, slots: torch.Tensor) -> PagePool:
    """Return new pages with only the tokens at ``slots`` (page * BLOCK_SIZE + offset, int64 [N, count]).

    The tokens of row i fill whole pages, those from i * ceil(count / BLOCK_SIZE) on. The last page is zero.
    """
    count = slots.shape[1]
    tokens = _view_tokens(pool)[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
    tokens = F.pad(tokens, (0, 0, 0, -count % BLOCK_SIZE)).view(-1, BLOCK_SIZE, tokens.shape[-1])
    copy = PagePool(pool.data.new_zeros(len(tokens) + 1, *pool.data.shape[1:]), pool.page_format)
    _view_tokens(copy)[:-1].copy_(tokens)
    return copy


def _view_tokens(pool: PagePool) -> torch.Tensor:
    """Return pages of latents as [pages, BLOCK_SIZE, any]: all that is stored of each token.

    A tiled page (``pages.h``) has groups of four bytes of each token, one token after another: pairs of bfloat16 or
    fours of int8, and lastly the scale of int8.
    """
    if pool.page_format.tiled:
        return pool.data.view(torch.int32).view(len(pool.data), -1, BLOCK_SIZE).transpose(1, 2)
    return pool.data.view(len(pool.data), BLOCK_SIZE, -1)
