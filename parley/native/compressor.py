"""Compressed entries (``EntryShape``): how a layer's pages hold them, and how they are made of the rows of tokens.

All of it runs in torch's operators, on every device. An entry depends bit for bit on the rows of its own tokens alone.

A page holds the entries whose last token is in it, so an entry never changes in a page that another sequence shares,
and the rows of its tokens, until the entry is made and after. Both are in the dtype of the model in all pages.
"""

from __future__ import annotations

import torch

from parley.core.sequence import PAGE_SIZE
from parley.native.layer import CompressorWeights
from parley.native.layer_shape import EntryShape
from parley.native.layout import LayerKV
from parley.native.pool import LayerPages


def entry_layers(shape: EntryShape, dim: int) -> list[LayerKV]:
    """Return the KV caches of a layer's entries of ``dim`` numbers, and of the rows and gates that they are made of."""
    row_width = 2 * dim * (1 + shape.is_chosen)
    widths = dim * shape.page_entries(PAGE_SIZE) // PAGE_SIZE, row_width
    return [LayerKV(1, width, 0, has_latents=True) for width in widths]


def view_entries(pool: LayerPages, dim: int) -> torch.Tensor:
    """Return the entries in a pool, [pages * entries of a page, dim]."""
    return pool.data.view(-1, dim)


def view_rows(pool: LayerPages) -> torch.Tensor:
    """Return the rows of tokens in a pool, [pages * PAGE_SIZE, width]."""
    return pool.data.view(-1, pool.data.shape[-1])


def sum_windows(
    rows: torch.Tensor, earlier: torch.Tensor | None, is_first: torch.Tensor, weights: CompressorWeights
) -> torch.Tensor:
    """Return entries before their norm, float32 [W, dim], of the rows [W, tokens, width] of their own tokens.

    ``earlier``: the rows of those before, of entries that are chosen, else None; those with ``is_first`` (bool [W])
    have none, and ``earlier`` may hold anything.
    """
    values, gates = rows.float().chunk(2, -1)
    gates = gates + weights.bias
    if earlier is not None:
        earlier_values, earlier_gates = earlier.float().chunk(2, -1)
        earlier_gates = earlier_gates + weights.bias
        nothing, dim = is_first[:, None, None], values.shape[-1] // 2
        earlier_values = earlier_values[..., :dim].masked_fill(nothing, 0.0)
        earlier_gates = earlier_gates[..., :dim].masked_fill(nothing, -torch.inf)
        values = torch.cat((earlier_values, values[..., dim:]), 1)
        gates = torch.cat((earlier_gates, gates[..., dim:]), 1)
    # Over the last axis, where torch computes row by row
    shares = gates.transpose(1, 2).contiguous().softmax(-1)
    total = torch.zeros_like(values[:, 0])
    for place in range(values.shape[1]):
        total += shares[..., place] * values[:, place]
    return total
