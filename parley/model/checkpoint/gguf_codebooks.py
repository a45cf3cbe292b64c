"""The types IQ1, IQ2 and IQ3 of GGUF files, whose numbers are points of codebooks.

Such a type stores groups of adjacent numbers as the index of a point of a codebook, and their signs. A point has eight
digits of 3 values (IQ1, IQ2) or four of 8 values (IQ3); the first digit is the lowest of the point's number. The points
are sorted by their numbers, so a codebook is a set: one bit for each number, those of a byte from the lowest on. The
sets are those of ggml (ggml-common.h: iq2xxs_grid, iq2xs_grid, iq2s_grid, iq1s_grid, iq3xxs_grid, iq3s_grid),
compressed by zlib and in base 85 (``gguf_codebooks.json``).
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from pathlib import Path

import torch

from parley.model.checkpoint.gguf_bits import BlockParts, pair_nibbles, scale_heads, split_bits, spread_bits

POINT_SETS_FILE = Path(__file__).with_name("gguf_codebooks.json")
VALUES = {"iq3_xxs": 8, "iq3_s": 8}  # of a digit; others have 3


@functools.cache
def read_codebook(name: str) -> torch.Tensor:
    """Return the points of a codebook, by their index: digits as uint8 [points, 8], or [points, 4] of IQ3."""
    point_set = json.loads(POINT_SETS_FILE.read_text("utf-8"))[name]
    packed = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(point_set))), dtype=torch.uint8)
    numbers = (packed[:, None] >> torch.arange(8) & 1).flatten().nonzero().flatten()
    base = VALUES.get(name, 3)
    powers = base ** torch.arange(4 if base == 8 else 8)
    return (numbers[:, None] // powers % base).to(torch.uint8)


# Seven signs as eight: the last one makes their number even
EVEN_SIGNS = torch.tensor([signs | signs.bit_count() % 2 << 7 for signs in range(128)], dtype=torch.uint8)
# The codes of the digits -1, 0 and 1 of IQ1 with 0.125 added, then subtracted (BLOCK_NUMBERS of native)
IQ1_CODES = torch.tensor((12, 3, 5, 13, 11, 4), dtype=torch.uint8)


def _read_points(name: str, indices: torch.Tensor) -> torch.Tensor:
    """Return the digits of points: int [blocks, points] -> uint8 [blocks, numbers]."""
    return read_codebook(name).index_select(0, indices.flatten().int()).view(len(indices), -1)


def _read_words(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the words in bytes: int32 [blocks, words]. Words of 16 bits are not negative."""
    words = data.contiguous().view(dtype).int()
    return words & 0xFFFF if dtype == torch.int16 else words


def _odd_scales(scales: torch.Tensor, groups: int) -> torch.Tensor:
    """Return 2 * scale + 1 of each group, as int8 [blocks, groups]. Adjacent groups may share a scale."""
    return (2 * scales + 1).to(torch.int8).repeat_interleave(groups // scales.shape[1], 1)


def _split_sign_words(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the signs and scales in words: four times seven bits of signs, then the scale of 4 bits."""
    signs = words[..., None] >> torch.tensor((0, 7, 14, 21)) & 127
    return EVEN_SIGNS[signs.flatten(1)], words >> 28 & 15


def block_iq2_xxs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 8 times 4 indices and a word of signs and a scale."""
    words = _read_words(blocks[:, 2:], torch.int32)
    signs, scales = _split_sign_words(words[:, 1::2])
    numbers = _read_points("iq2_xxs", blocks[:, 2:].reshape(-1, 8, 8)[..., :4].flatten(1))
    return numbers | spread_bits(signs) << 3, scale_heads(blocks[:, :2], _odd_scales(scales, 16))


def block_iq2_xs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 times an index of 9 bits and seven signs, 16 scales of 4 bits."""
    words = _read_words(blocks[:, 2:66], torch.int16)
    numbers = _read_points("iq2_xs", words & 511) | spread_bits(EVEN_SIGNS[words >> 9]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 66:]), 16))


def block_iq2_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 indices, 256 signs, 2 further bits of each index, 16 scales of 4 bits."""
    high = split_bits(blocks[:, 66:74], 2).mT.flatten(1)
    numbers = _read_points("iq2_s", blocks[:, 2:34].int() | high.int() << 8) | spread_bits(blocks[:, 34:66]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 74:]), 16))


def block_iq3_xxs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 64 indices, 8 words of signs and a scale."""
    signs, scales = _split_sign_words(_read_words(blocks[:, 66:], torch.int32))
    numbers = _read_points("iq3_xxs", blocks[:, 2:66]) | spread_bits(signs) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(scales, 8))


def block_iq3_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 64 indices, a ninth bit of each, 256 signs, 8 scales of 4 bits."""
    indices = blocks[:, 2:66].int() | spread_bits(blocks[:, 66:74]).int() << 8
    numbers = _read_points("iq3_s", indices) | spread_bits(blocks[:, 74:106]) << 3
    return numbers, scale_heads(blocks[:, :2], _odd_scales(pair_nibbles(blocks[:, 106:]), 8))


def block_iq1_s(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 32 indices, and 8 times 3 further bits of 4 indices, a scale of 3 bits and the sign of what
    is added."""
    words = _read_words(blocks[:, 34:], torch.int16)
    high = (words[..., None] >> torch.tensor((0, 3, 6, 9)) & 7).flatten(1)
    digits = _read_points("iq1", blocks[:, 2:34].int() | high << 8)
    negative = (words >> 15).repeat_interleave(32, 1)
    return IQ1_CODES[digits.int() + 3 * negative], scale_heads(blocks[:, :2], _odd_scales(words >> 12 & 7, 16))


def block_iq1_m(blocks: torch.Tensor) -> BlockParts:
    """32 indices, 3 further bits of each and the sign of what is added, and 4 times 4 scales of 3 bits and 4 bits of
    the scale of the scales."""
    rest = pair_nibbles(blocks[:, 32:48]).int()
    digits = _read_points("iq1", blocks[:, :32].int() | (rest & 7) << 8)
    words = _read_words(blocks[:, 48:], torch.int16)
    scales = (words[..., None] >> torch.tensor((0, 3, 6, 9)) & 7).flatten(1)
    factors = ((words >> 12) << torch.tensor((0, 4, 8, 12))).sum(1, dtype=torch.int32, keepdim=True)
    codes = IQ1_CODES[digits.int() + 3 * (rest >> 3).repeat_interleave(8, 1)]
    return codes, scale_heads(factors.view(torch.uint8)[:, :2], _odd_scales(scales, 16))
