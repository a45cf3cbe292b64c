"""The numbers in the blocks of a GGUF file, in torch.

Each function takes blocks as uint8 [blocks, bytes of a block]. Those that begin with ``decode`` return the numbers,
float32 [blocks, numbers of a block], computed as ggml's reference does (ggml-quants.c), so that the bits are the same.
Those that begin with ``split`` return scales [blocks, groups] and integers [blocks, groups, numbers of a group], both
float32, for types without minimums: a number is the product of both. Those that begin with ``block`` return the
integers of K types as uint8 [blocks, numbers of a block], and the heads of ``native.BlockedWeight`` as uint8 [blocks,
bytes]: float16 scale and minimum, then an int8 scale for each group, and after each its minimum if there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from parley.native import BlockedWeight, GroupedWeight

SplitBlocks = tuple[torch.Tensor, torch.Tensor]
BlockParts = tuple[torch.Tensor, torch.Tensor]
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of the format


def _float16(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 in two bytes: float32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes, then the high halves: uint8 [..., 2 * bytes]."""
    return torch.cat((data & 15, data >> 4), -1)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lowest ``width`` bits of all bytes, then the next: uint8 [..., 8 / width, bytes]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (data[..., None, :] >> shifts) & ((1 << width) - 1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of four bytes, each as 0 or 16: uint8 [blocks, 32]."""
    return _bits(data, 1).transpose(-1, -2).flatten(-2) << 4


def split_q4_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 4 bits."""
    return _float16(blocks[:, :2]), _nibbles(blocks[:, 2:]).float()[:, None] - 8


def decode_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, 32 numbers of 4 bits."""
    return _float16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).float() + _float16(blocks[:, 2:4])


def split_q5_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _float16(blocks[:, :2]), numbers.float()[:, None] - 16


def decode_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _float16(blocks[:, :2]) * numbers.float() + _float16(blocks[:, 2:4])


def split_q8_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 8 bits."""
    return _float16(blocks[:, :2]), blocks[:, 2:].view(torch.int8).float()[:, None]


def block_q2_k(blocks: torch.Tensor) -> BlockParts:
    """16 scales and minimums of 4 bits each, 256 numbers of 2 bits, scale of the scales, scale of the minimums."""
    scales = torch.stack((blocks[:, :16] & 15, blocks[:, :16] >> 4), -1)
    return _bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1), torch.cat((blocks[:, 80:], scales.flatten(1)), -1)


def block_q3_k(blocks: torch.Tensor) -> BlockParts:
    """256 third bits, 256 numbers of 2 bits, 16 scales of 6 bits in 12 bytes, scale of the scales."""
    low, high = _nibbles(blocks[:, 96:104]), _bits(blocks[:, 104:108], 2).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    third = _bits(blocks[:, :32], 1).flatten(1)
    numbers = _bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    return (numbers | third << 2) + 4, _scale_heads(blocks[:, 108:], scales)


def _scale_heads(factors: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the heads of blocks without minimums, of float16 factors uint8 [blocks, 2] and scales int8."""
    return torch.cat((factors, torch.zeros_like(factors), scales.view(torch.uint8)), -1)


def unpack_k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8 scales and 8 minimums of 6 bits in 12 bytes, as Q4_K and Q5_K have them: uint8 [blocks, 8] each."""
    scales, minimums, high = packed.split(4, -1)
    return (
        torch.cat((scales & 63, high & 15 | (scales >> 2) & 48), -1),
        torch.cat((minimums & 63, high >> 4 | (minimums >> 2) & 48), -1),
    )


def _k_heads(blocks: torch.Tensor) -> torch.Tensor:
    """Return the heads of blocks that begin as Q4_K does."""
    return torch.cat((blocks[:, :4], torch.stack(unpack_k_scales(blocks[:, 4:16]), -1).flatten(1)), -1)


def block_q4_k(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales and of the minimums, 8 of each of 6 bits in 12 bytes, 256 numbers of 4 bits."""
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), _k_heads(blocks)


def block_q5_k(blocks: torch.Tensor) -> BlockParts:
    """As Q4_K, with 256 fifth bits before the numbers."""
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return low | _bits(blocks[:, 16:48], 1).flatten(1) << 4, _k_heads(blocks)


def block_q6_k(blocks: torch.Tensor) -> BlockParts:
    """256 numbers of 4 bits, their 2 further bits, 16 scales of 8 bits, scale of the scales."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    return low | high << 4, _scale_heads(blocks[:, 208:], blocks[:, 192:208])


def split_iq4_nl(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 indices of 4 bits into a table."""
    return _float16(blocks[:, :2]), torch.tensor(IQ4_VALUES).float()[_nibbles(blocks[:, 2:]).int()][:, None]


def split_iq4_xs(blocks: torch.Tensor) -> SplitBlocks:
    """Scale of the scales, 8 scales of 6 bits (high bits in two bytes, then low ones), 256 indices of 4 bits."""
    high = _bits(blocks[:, 2:4], 2).transpose(-1, -2).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = _float16(blocks[:, :2]) * ((low | high << 4).float() - 32)
    return scales, torch.tensor(IQ4_VALUES).float()[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).int()]


def split_mxfp4(blocks: torch.Tensor) -> SplitBlocks:
    """Exponent of a power of two, 32 numbers e2m1."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23)  # half of the power of two
    numbers = torch.tensor(MXFP4_VALUES).float()[_nibbles(blocks[:, 1:]).int()]
    return bits.int().view(torch.float32), numbers[:, None]


class BlockKind(NamedTuple):
    """A type that kernels read as it is: its rearrangement, bits of a number with scales, middle of its integers."""

    rearrange: Callable[[torch.Tensor], BlockParts]
    bits: float
    middle: int


SPLITTERS: dict[str, Callable[[torch.Tensor], SplitBlocks]] = {
    "Q4_0": split_q4_0,
    "Q5_0": split_q5_0,
    "Q8_0": split_q8_0,
    "IQ4_NL": split_iq4_nl,
    "IQ4_XS": split_iq4_xs,
    "MXFP4": split_mxfp4,
}
DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_1": decode_q4_1, "Q5_1": decode_q5_1}
# The middle is 0 for types with minimums
K_TYPES = {
    "Q2_K": BlockKind(block_q2_k, 5.125, 0),
    "Q3_K": BlockKind(block_q3_k, 4.625, 8),
    "Q4_K": BlockKind(block_q4_k, 4.625, 0),
    "Q5_K": BlockKind(block_q5_k, 5.625, 0),
    "Q6_K": BlockKind(block_q6_k, 6.625, 32),
}


def decode_blocks(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers of blocks of a type: uint8 [blocks, bytes of a block] -> float32 [blocks, numbers]."""
    if kind in DECODERS:
        return DECODERS[kind](blocks)
    if kind in K_TYPES:
        return _decode_k(*K_TYPES[kind].rearrange(blocks), K_TYPES[kind].middle)
    scales, numbers = SPLITTERS[kind](blocks)
    return (scales[..., None] * numbers).flatten(1)


def _decode_k(values: torch.Tensor, heads: torch.Tensor, middle: int) -> torch.Tensor:
    """Return the numbers of blocks of a K type from its parts."""
    groups = heads[:, 4:].view(torch.int8).float()
    if middle:
        scales = _float16(heads[:, :2]) * groups
        return (scales[..., None] * (values.float() - middle).view(*scales.shape, -1)).flatten(1)
    scales, minimums = _float16(heads[:, :2]) * groups[:, ::2], _float16(heads[:, 2:4]) * groups[:, 1::2]
    return (scales[..., None] * values.float().view(*scales.shape, -1) - minimums[..., None]).flatten(1)


def grouped_bits(kind: str) -> float | None:
    """Return the bits of a number in the form of ``group_blocks``, scales included; None for types that have none."""
    if kind in K_TYPES:
        return K_TYPES[kind].bits
    return None if kind not in SPLITTERS else 5 if kind == "Q4_0" else 9


def group_blocks(blocks: torch.Tensor, kind: str, rows: int) -> GroupedWeight | BlockedWeight | None:
    """Return the weight of ``rows`` outputs in a form that kernels read, without rounding; None if it has none."""
    if kind in K_TYPES:
        numbers, heads = K_TYPES[kind].rearrange(blocks)
        words = heads.contiguous().view(torch.int32)
        return BlockedWeight(numbers.view(rows, -1), words.view(rows, -1, words.shape[1]), kind.lower())
    if kind not in SPLITTERS:
        return None
    scales, numbers = SPLITTERS[kind](blocks)
    code, middle = ("int4", 8) if kind == "Q4_0" else ("int8", 128)
    values = (numbers + middle).to(torch.uint8).view(rows, -1)
    scales = scales.reshape(rows, -1)
    return GroupedWeight(
        values, scales, torch.full_like(scales, middle, dtype=torch.uint8), numbers.shape[-1], code=code
    )
