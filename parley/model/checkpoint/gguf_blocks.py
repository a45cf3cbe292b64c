"""The numbers in the blocks of a GGUF file, in torch.

Each function takes blocks as uint8 [blocks, bytes of a block]. Those that begin with ``decode`` return the numbers,
float32 [blocks, numbers of a block], computed as ggml's reference does (ggml-quants.c), so that the bits are the same.
Those that begin with ``split`` return scales float32 [blocks, 1] and bits uint8 [blocks, numbers of a block] of a code
of ``native.GroupedWeight``: a number is the product of both. Those that begin with ``block`` return the integers of
other types as uint8 [blocks, numbers of a block], and the heads of ``native.BlockedWeight`` as uint8 [blocks, bytes]:
float16 scale and minimum, then an int8 scale for each group, and after each its minimum if there are any; of Q2_K both
of a group are in one byte, the scale in the low bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from parley.native import BlockedWeight, GroupedWeight, dequantize_grouped
from parley.native.torch_forms.torch_grouped import IQ4_NUMBERS

SplitBlocks = tuple[torch.Tensor, torch.Tensor]
BlockParts = tuple[torch.Tensor, torch.Tensor]


# The bits of each byte as 8 bytes, 0 or 16, in one number of 64 bits.
FIFTH_BITS = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) * 16).to(torch.uint8).view(torch.int64).flatten()


def _float16(data: torch.Tensor) -> torch.Tensor:
    """Return the float16 in two bytes: float32 [blocks, 1]."""
    return data.contiguous().view(torch.float16).float()


def _split_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes, then the high halves: uint8 [..., 2 * bytes]."""
    return torch.cat((data & 15, data >> 4), -1)


def _split_bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lowest ``width`` bits of all bytes, then the next: uint8 [..., 8 / width, bytes]."""
    mask = (1 << width) - 1
    return torch.stack([(data >> shift) & mask for shift in range(0, 8, width)], -2)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of four bytes, each as 0 or 16: uint8 [blocks, 32]."""
    return FIFTH_BITS.index_select(0, data.int().flatten()).view(len(data), 4).view(torch.uint8)


def split_q4_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 4 bits."""
    return _float16(blocks[:, :2]), _split_nibbles(blocks[:, 2:])


def _negate_halves(half: torch.Tensor) -> torch.Tensor:
    """Return float16s in two bytes with the other sign: uint8 [blocks, 2]."""
    return half ^ torch.tensor([0, 128], dtype=torch.uint8)


def block_q4_1(blocks: torch.Tensor) -> BlockParts:
    """Scale, minimum (which is added), 32 numbers of 4 bits."""
    return _split_nibbles(blocks[:, 4:]), torch.cat((blocks[:, :2], _negate_halves(blocks[:, 2:4])), -1)


def block_q5_0(blocks: torch.Tensor) -> BlockParts:
    """Scale, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _split_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers, torch.cat((blocks[:, :2], torch.zeros_like(blocks[:, :2])), -1)


def block_q5_1(blocks: torch.Tensor) -> BlockParts:
    """Scale, minimum (which is added), 32 fifth bits, 32 numbers of 4 bits."""
    numbers = _split_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, torch.cat((blocks[:, :2], _negate_halves(blocks[:, 2:4])), -1)


def split_q8_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 8 bits."""
    return _float16(blocks[:, :2]), blocks[:, 2:] ^ 128


def block_q2_k(blocks: torch.Tensor) -> BlockParts:
    """16 scales and minimums of 4 bits each, 256 numbers of 2 bits, scale of the scales, scale of the minimums."""
    numbers = _split_bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    return numbers, torch.cat((blocks[:, 80:], blocks[:, :16]), -1)


def block_q3_k(blocks: torch.Tensor) -> BlockParts:
    """256 third bits, 256 numbers of 2 bits, 16 scales of 6 bits in 12 bytes, scale of the scales."""
    low, high = _split_nibbles(blocks[:, 96:104]), _split_bits(blocks[:, 104:108], 2).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    third = _split_bits(blocks[:, :32], 1).flatten(1)
    numbers = _split_bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
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
    return _split_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), _k_heads(blocks)


def block_q5_k(blocks: torch.Tensor) -> BlockParts:
    """As Q4_K, with 256 fifth bits before the numbers."""
    low = _split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return low | _split_bits(blocks[:, 16:48], 1).flatten(1) << 4, _k_heads(blocks)


def block_q6_k(blocks: torch.Tensor) -> BlockParts:
    """256 numbers of 4 bits, their 2 further bits, 16 scales of 8 bits, scale of the scales."""
    low = _split_nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _split_bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    return low | high << 4, _scale_heads(blocks[:, 208:], blocks[:, 192:208])


def split_iq4_nl(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 indices of 4 bits into a table."""
    return _float16(blocks[:, :2]), _split_nibbles(blocks[:, 2:])


def block_iq4_xs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 8 scales of 6 bits (high bits in two bytes, then low ones), 256 indices of 4 bits."""
    high = _split_bits(blocks[:, 2:4], 2).transpose(-1, -2).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return _split_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1), _scale_heads(blocks[:, :2], scales)


def split_mxfp4(blocks: torch.Tensor) -> SplitBlocks:
    """Exponent of a power of two, 32 numbers e2m1."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 1, 0x400000, exponents << 23)
    return bits.int().view(torch.float32), _split_nibbles(blocks[:, 1:])


class BlockKind(NamedTuple):
    """A type in blocks: its rearrangement, bits of a number with scales as kernels read it, and middle of its integers,
    None for those of a table. The middle is 0 for types with minimums. ``has_nibbles``: scales and minimums of groups
    have 4 bits."""

    rearrange: Callable[[torch.Tensor], BlockParts]
    bits: float
    middle: int | None
    has_nibbles: bool = False


class SplitKind(NamedTuple):
    """A type with one scale in a block: its rearrangement, bits of a number as kernels read it, and code."""

    split: Callable[[torch.Tensor], SplitBlocks]
    bits: float
    code: str


SPLIT_KINDS = {
    "Q4_0": SplitKind(split_q4_0, 4.5, "q4_0"),
    "Q8_0": SplitKind(split_q8_0, 8.5, "q8_0"),
    "IQ4_NL": SplitKind(split_iq4_nl, 4.5, "iq4_nl"),
    "MXFP4": SplitKind(split_mxfp4, 4.5, "e2m1"),
}
BLOCK_KINDS = {
    "Q2_K": BlockKind(block_q2_k, 2.625, 0, has_nibbles=True),
    "Q3_K": BlockKind(block_q3_k, 3.625, 8),
    "Q4_K": BlockKind(block_q4_k, 4.625, 0),
    "Q5_K": BlockKind(block_q5_k, 5.625, 0),
    "Q6_K": BlockKind(block_q6_k, 6.625, 32),
    "Q4_1": BlockKind(block_q4_1, 5.0, 0),
    "Q5_0": BlockKind(block_q5_0, 6.0, 16),
    "Q5_1": BlockKind(block_q5_1, 6.0, 0),
    "IQ4_XS": BlockKind(block_iq4_xs, 4.375, None),
}


def decode_blocks(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers of blocks of a type: uint8 [blocks, bytes of a block] -> float32 [blocks, numbers]."""
    if kind in BLOCK_KINDS:
        return _decode_heads(*BLOCK_KINDS[kind].rearrange(blocks), BLOCK_KINDS[kind])
    scales, bits = SPLIT_KINDS[kind].split(blocks)
    group = bits.shape[1]
    return dequantize_grouped(GroupedWeight(bits, scales, None, group, code=SPLIT_KINDS[kind].code))


def _decode_heads(values: torch.Tensor, heads: torch.Tensor, kind: BlockKind) -> torch.Tensor:
    """Return the numbers of blocks from the results of their type's ``rearrange``."""
    middle, integers = kind.middle, heads[:, 4:]
    if kind.has_nibbles:
        integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1)
    factors, groups = _float16(heads[:, :2]), integers.view(torch.int8).float()
    if not groups.shape[1]:
        groups = torch.ones(len(heads), 1 if middle else 2)
    if middle == 0:
        scales, minimums = factors * groups[:, ::2], _float16(heads[:, 2:4]) * groups[:, 1::2]
        return (scales[..., None] * values.float().view(*scales.shape, -1) - minimums[..., None]).flatten(1)
    numbers = torch.tensor(IQ4_NUMBERS).float()[values.int()] if middle is None else values.float() - middle
    scales = factors * groups
    return (scales[..., None] * numbers.view(*scales.shape, -1)).flatten(1)


def grouped_bits(kind: str) -> float:
    """Return the bits of a number in the form of ``group_blocks``, scales included."""
    return (BLOCK_KINDS.get(kind) or SPLIT_KINDS[kind]).bits


def group_blocks(blocks: torch.Tensor, kind: str, rows: int) -> GroupedWeight | BlockedWeight:
    """Return the weight of ``rows`` outputs in a form that kernels read, without rounding."""
    if kind in BLOCK_KINDS:
        numbers, heads = BLOCK_KINDS[kind].rearrange(blocks)
        words = heads.contiguous().view(torch.int32)
        return BlockedWeight(numbers.view(rows, -1), words.view(rows, -1, words.shape[1]), kind.lower())
    scales, bits = SPLIT_KINDS[kind].split(blocks)
    group = bits.shape[1]
    return GroupedWeight(bits.view(rows, -1), scales.view(rows, -1), None, group, code=SPLIT_KINDS[kind].code)
