"""Reads keys and values out of pages of any layout: an implementation independent of the kernels."""

from __future__ import annotations

import torch

from parley.core.sequence import PAGE_SIZE
from parley.native.pool import LayerPages

NAN = 0xFF  # a byte that makes every float and every scale NaN


def fill_with_nan(pool: LayerPages) -> None:
    """Fill all pages but the last with NaN, as a previous owner might have left them."""
    pool.data[:-1].view(torch.uint8).fill_(NAN)


def unpack_pages(pool: LayerPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as float32 [pages, 16, heads, dim or value_dim]."""
    layer, data = pool.page_format.layer, pool.data
    sizes = (layer.dim, layer.value_dim)[: 1 if layer.has_latents else 2]
    int8 = data.dtype == torch.int8
    if not pool.page_format.tiled:
        parts = []
        for rows, size in zip(data.unbind(1), sizes, strict=True):
            scale = rows[..., -4:].contiguous().view(torch.float32) if int8 else 1
            parts.append((rows[..., :size].float() * scale).transpose(1, 2))
        return parts[0], parts[-1][..., : layer.value_dim]
    side = 4 if int8 else 2
    pages, key_groups, value_columns = len(data), -(-layer.dim // side), -(-layer.value_dim // PAGE_SIZE) * PAGE_SIZE
    heads = data.view(pages, layer.heads, -1)
    keys, values, scales = heads.split(
        [
            key_groups * PAGE_SIZE * side,
            0 if layer.has_latents else PAGE_SIZE * value_columns,
            len(sizes) * PAGE_SIZE * 4 if int8 else 0,
        ],
        -1,
    )
    keys = keys.reshape(pages, layer.heads, key_groups, PAGE_SIZE, side).permute(0, 3, 1, 2, 4).flatten(3)
    parts = [keys.float()]
    if not layer.has_latents:
        values = values.reshape(pages, layer.heads, -1, value_columns, side).permute(0, 2, 4, 1, 3).flatten(1, 2)
        parts.append(values.float())
    if int8:
        factors = scales.contiguous().view(torch.float32).view(pages, layer.heads, len(sizes), PAGE_SIZE)
        parts = [part * factor[..., None] for part, factor in zip(parts, factors.permute(2, 0, 3, 1), strict=True)]
    return parts[0][..., : layer.dim], parts[-1][..., : layer.value_dim]
