"""Helpers that take the blocks of GGUF files apart: bits of bytes, and float16s in two bytes."""

from __future__ import annotations

import torch

# The numbers of blocks as uint8 [blocks, numbers], and their heads as uint8 [blocks, bytes] (``gguf_blocks.py``)
BlockParts = tuple[torch.Tensor, torch.Tensor]
# The bits of each byte as 8 bytes, in one number of 64 bits, and the same as a part of a table
BYTE_BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64).flatten()


def read_float16(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 in two bytes: float32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def split_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes, then the high halves: uint8 [..., 2 * bytes]."""
    return torch.cat((data & 15, data >> 4), -1)


def pair_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low half of each byte, and its high half after it: uint8 [blocks, 2 * bytes]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)


def split_bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lowest ``width`` bits of all bytes, then the next: uint8 [..., 8 / width, bytes]."""
    mask = (1 << width) - 1
    return torch.stack([(data >> shift) & mask for shift in range(0, 8, width)], -2)


def spread_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes, those of each from the lowest on: uint8 [blocks, 8 * bytes]."""
    return BYTE_BITS.index_select(0, data.int().flatten()).view(len(data), -1).view(torch.uint8)


def scale_heads(factors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the heads of blocks without minimums, of float16 factors uint8 [blocks, 2] and scales int8."""
    return torch.cat((factors, torch.zeros_like(factors), scales.view(torch.uint8)), -1)
