"""The numbers in the blocks of a GGUF file, in torch.

Each function takes blocks as uint8 [blocks, bytes of a block]. Those that begin with ``decode`` return the numbers,
float32 [blocks, numbers of a block], computed as ggml's reference does (ggml-quants.c), so that the bits are the same.
Those that begin with ``split`` return scales float32 [blocks, 1] and bits uint8 [blocks, numbers of a block] of a code
of ``native.GroupedWeight``: a number is the product of both. Those that begin with ``block`` return the integers of
other types as uint8 [blocks, numbers of a block], and the heads of ``native.PackedBlockWeight`` as uint8 [blocks,
bytes]: float16 scale and minimum, then an int8 scale for each group, and after each its minimum if there are any; of
Q2_K both of a group are in one byte, the scale in the low bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from parley.model.checkpoint.gguf_bits import (
    BlockParts,
    read_float16,
    scale_heads,
    split_bits,
    split_nibbles,
    spread_bits,
)
from parley.model.checkpoint.gguf_codebooks import (
    block_iq1_m,
    block_iq1_s,
    block_iq2_s,
    block_iq2_xs,
    block_iq2_xxs,
    block_iq3_s,
    block_iq3_xxs,
)
from parley.native import GroupedWeight, PackedBlockWeight, dequantize_grouped
from parley.native.torch_forms.torch_grouped import BLOCK_NUMBERS

SplitBlocks = tuple[torch.Tensor, torch.Tensor]


def split_q4_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 4 bits."""
    return read_float16(blocks[:, :2]), split_nibbles(blocks[:, 2:])


def _negate_halves(half: torch.Tensor) -> torch.Tensor:
    """Return float16s in two bytes with the other sign: uint8 [blocks, 2]."""
    return half ^ torch.tensor([0, 128], dtype=torch.uint8)


def block_q4_1(blocks: torch.Tensor) -> BlockParts:
    """Scale, minimum (which is added), 32 numbers of 4 bits."""
    return split_nibbles(blocks[:, 4:]), torch.cat((blocks[:, :2], _negate_halves(blocks[:, 2:4])), -1)


def block_q5_0(blocks: torch.Tensor) -> BlockParts:
    """Scale, 32 fifth bits, 32 numbers of 4 bits."""
    numbers = split_nibbles(blocks[:, 6:]) | spread_bits(blocks[:, 2:6]) << 4
    return numbers, torch.cat((blocks[:, :2], torch.zeros_like(blocks[:, :2])), -1)


def block_q5_1(blocks: torch.Tensor) -> BlockParts:
    """Scale, minimum (which is added), 32 fifth bits, 32 numbers of 4 bits."""
    numbers = split_nibbles(blocks[:, 8:]) | spread_bits(blocks[:, 4:8]) << 4
    return numbers, torch.cat((blocks[:, :2], _negate_halves(blocks[:, 2:4])), -1)


def split_q8_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 numbers of 8 bits."""
    return read_float16(blocks[:, :2]), blocks[:, 2:] ^ 128


def block_q2_k(blocks: torch.Tensor) -> BlockParts:
    """16 scales and minimums of 4 bits each, 256 numbers of 2 bits, scale of the scales, scale of the minimums."""
    numbers = split_bits(blocks[:, 16:80].reshape(-1, 2, 32), 2).flatten(1)
    return numbers, torch.cat((blocks[:, 80:], blocks[:, :16]), -1)


def block_q3_k(blocks: torch.Tensor) -> BlockParts:
    """256 third bits, 256 numbers of 2 bits, 16 scales of 6 bits in 12 bytes, scale of the scales."""
    low, high = split_nibbles(blocks[:, 96:104]), split_bits(blocks[:, 104:108], 2).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    third = split_bits(blocks[:, :32], 1).flatten(1)
    numbers = split_bits(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    return (numbers | third << 2) + 4, scale_heads(blocks[:, 108:], scales)


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
    return split_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), _k_heads(blocks)


def block_q5_k(blocks: torch.Tensor) -> BlockParts:
    """The layout of Q4_K, with 256 fifth bits before the numbers."""
    low = split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1)
    return low | split_bits(blocks[:, 16:48], 1).flatten(1) << 4, _k_heads(blocks)


def block_q6_k(blocks: torch.Tensor) -> BlockParts:
    """256 numbers of 4 bits, their 2 further bits, 16 scales of 8 bits, scale of the scales."""
    low = split_nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = split_bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    return low | high << 4, scale_heads(blocks[:, 208:], blocks[:, 192:208])


def split_iq4_nl(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 32 indices of 4 bits into a table."""
    return read_float16(blocks[:, :2]), split_nibbles(blocks[:, 2:])


def block_iq4_xs(blocks: torch.Tensor) -> BlockParts:
    """Scale of the scales, 8 scales of 6 bits (high bits in two bytes, then low ones), 256 indices of 4 bits."""
    high = split_bits(blocks[:, 2:4], 2).transpose(-1, -2).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return split_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1), scale_heads(blocks[:, :2], scales)


def split_q1_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 128 signs: numbers 0 or 2, whose zero point is 1."""
    return read_float16(blocks[:, :2]), spread_bits(blocks[:, 2:]) << 1


def split_q2_0(blocks: torch.Tensor) -> SplitBlocks:
    """Scale, 64 or 128 adjacent numbers of 2 bits, whose zero point is 1."""
    return read_float16(blocks[:, :2]), split_bits(blocks[:, 2:], 2).mT.flatten(1)


def split_tq2_0(blocks: torch.Tensor) -> SplitBlocks:
    """256 numbers of 2 bits, whose zero point is 1, and their scale."""
    numbers = split_bits(blocks[:, :64].reshape(-1, 2, 32), 2).flatten(1)
    return read_float16(blocks[:, 64:]), numbers


def split_tq1_0(blocks: torch.Tensor) -> SplitBlocks:
    """256 digits of base 3, whose zero point is 1, and their scale. A byte is a fraction of 256 with five digits: 32
    bytes, then 16, and 4 with four digits."""
    digits = []
    for part, count in zip(blocks[:, :52].split((32, 16, 4), 1), (5, 5, 4), strict=True):
        shifted = part[:, None].int() * (3 ** torch.arange(count, dtype=torch.int32))[:, None] & 255
        digits.append((shifted * 3 >> 8).to(torch.uint8).flatten(1))
    return read_float16(blocks[:, 52:]), torch.cat(digits, 1)


def split_nvfp4(blocks: torch.Tensor) -> SplitBlocks:
    """4 scales e4m3 without a sign, of 16 numbers e2m1 each. As in ggml, the scale of all ones is 0."""
    scales = ((blocks[:, :4].int() & 127) << 20).view(torch.float32) * 2.0**120
    return scales.masked_fill(blocks[:, :4] == 127, 0.0), split_nibbles(blocks[:, 4:].reshape(-1, 4, 8)).flatten(1)


def split_mxfp4(blocks: torch.Tensor) -> SplitBlocks:
    """Exponent of a power of two, 32 numbers e2m1."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 1, 0x400000, exponents << 23)
    return bits.int().view(torch.float32), split_nibbles(blocks[:, 1:])


class BlockKind(NamedTuple):
    """A type in blocks: its rearrangement, bits of a number with scales as kernels read it, middle of its integers, and
    code. The middle is 0 for types with minimums, and None if BLOCK_NUMBERS has the numbers of the code.
    ``has_nibbles``: scales and minimums of groups have 4 bits."""

    rearrange: Callable[[torch.Tensor], BlockParts]
    bits: float
    middle: int | None
    code: str
    has_nibbles: bool = False


class SplitKind(NamedTuple):
    """A type without scales of scales: its rearrangement, bits of a number as kernels read it, code, and zero point if
    the code has one."""

    split: Callable[[torch.Tensor], SplitBlocks]
    bits: float
    code: str
    zero: int | None = None


SPLIT_KINDS = {
    "Q4_0": SplitKind(split_q4_0, 4.5, "q4_0"),
    "Q8_0": SplitKind(split_q8_0, 8.5, "q8_0"),
    "IQ4_NL": SplitKind(split_iq4_nl, 4.5, "iq4_nl"),
    "MXFP4": SplitKind(split_mxfp4, 4.5, "e2m1"),
    "NVFP4": SplitKind(split_nvfp4, 5.0, "e2m1"),
    "Q1_0": SplitKind(split_q1_0, 2.25, "int2", 1),
    "Q2_0": SplitKind(split_q2_0, 2.5, "int2", 1),
    "TQ1_0": SplitKind(split_tq1_0, 2.125, "int2", 1),
    "TQ2_0": SplitKind(split_tq2_0, 2.125, "int2", 1),
}
BLOCK_KINDS = {
    "Q2_K": BlockKind(block_q2_k, 2.625, 0, "q2_k", has_nibbles=True),
    "Q3_K": BlockKind(block_q3_k, 3.625, 8, "q3_k"),
    "Q4_K": BlockKind(block_q4_k, 4.625, 0, "q4_k"),
    "Q5_K": BlockKind(block_q5_k, 5.625, 0, "q5_k"),
    "Q6_K": BlockKind(block_q6_k, 6.625, 32, "q6_k"),
    "Q4_1": BlockKind(block_q4_1, 5.0, 0, "q4_1"),
    "Q5_0": BlockKind(block_q5_0, 6.0, 16, "q5_0"),
    "Q5_1": BlockKind(block_q5_1, 6.0, 0, "q5_1"),
    "IQ4_XS": BlockKind(block_iq4_xs, 4.375, None, "iq4_xs"),
    "IQ1_S": BlockKind(block_iq1_s, 4.625, None, "iq2"),
    "IQ1_M": BlockKind(block_iq1_m, 4.625, None, "iq2"),
    "IQ2_XXS": BlockKind(block_iq2_xxs, 4.625, None, "iq2"),
    "IQ2_XS": BlockKind(block_iq2_xs, 4.625, None, "iq2"),
    "IQ2_S": BlockKind(block_iq2_s, 4.625, None, "iq2"),
    "IQ3_XXS": BlockKind(block_iq3_xxs, 4.375, None, "iq3_xxs"),
    "IQ3_S": BlockKind(block_iq3_s, 4.375, None, "iq3_s"),
}


def decode_blocks(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the numbers of blocks of a type: uint8 [blocks, bytes of a block] -> float32 [blocks, numbers]."""
    if kind in BLOCK_KINDS:
        return _decode_heads(*BLOCK_KINDS[kind].rearrange(blocks), BLOCK_KINDS[kind])
    return dequantize_grouped(_split_groups(blocks, SPLIT_KINDS[kind], len(blocks)))


def _decode_heads(values: torch.Tensor, heads: torch.Tensor, kind: BlockKind) -> torch.Tensor:
    """Return the numbers of blocks from the results of their type's ``rearrange``."""
    middle, integers = kind.middle, heads[:, 4:]
    if kind.has_nibbles:
        integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1)
    factors, groups = read_float16(heads[:, :2]), integers.view(torch.int8).float()
    if not groups.shape[1]:
        groups = torch.ones(len(heads), 1 if middle else 2)
    if middle == 0:
        scales, minimums = factors * groups[:, ::2], read_float16(heads[:, 2:4]) * groups[:, 1::2]
        return (scales[..., None] * values.float().view(*scales.shape, -1) - minimums[..., None]).flatten(1)
    table = torch.tensor(BLOCK_NUMBERS[kind.code]).float() if middle is None else None
    numbers = values.float() - (middle or 0) if table is None else table[values.int()]
    scales = factors * groups
    return (scales[..., None] * numbers.view(*scales.shape, -1)).flatten(1)


def grouped_bits(kind: str) -> float:
    """Return the bits of a number in the form of ``group_blocks``, scales included."""
    return (BLOCK_KINDS.get(kind) or SPLIT_KINDS[kind]).bits


def group_blocks(blocks: torch.Tensor, kind: str, rows: int) -> GroupedWeight | PackedBlockWeight:
    """Return the weight of ``rows`` outputs in a form that kernels read, without rounding."""
    if kind in BLOCK_KINDS:
        numbers, heads = BLOCK_KINDS[kind].rearrange(blocks)
        words = heads.contiguous().view(torch.int32)
        return PackedBlockWeight(numbers.view(rows, -1), words.view(rows, -1, words.shape[1]), BLOCK_KINDS[kind].code)
    return _split_groups(blocks, SPLIT_KINDS[kind], rows)


def _split_groups(blocks: torch.Tensor, kind: SplitKind, rows: int) -> GroupedWeight:
    scales, bits = kind.split(blocks)
    group = bits.shape[1] // scales.shape[1]
    scales = scales.view(rows, -1)
    zeros = None if kind.zero is None else torch.full_like(scales, kind.zero, dtype=torch.uint8)
    return GroupedWeight(bits.view(rows, -1), scales, zeros, group, code=kind.code)
