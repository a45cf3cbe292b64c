"""Weights of 1 to 8 bits in groups, in torch operators: their format, and how to make and dequantize them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

# The values of e2m1: a sign, two bits of exponent and one of mantissa.
E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Of bitsandbytes: quantiles of a normal distribution (arXiv 2305.14314, appendix E). The kernel rounds them to bf16.
NF4_NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Of bitsandbytes, times 12: a sign, then the numbers of three bits
FP4_NUMBERS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
# Of IQ1 and IQ2, and of both kinds of IQ3: sizes, then the same with the other sign
IQ2_NUMBERS = (1.0, 3.125, 5.375, 0.125, 0.875, 1.125, 0.0, 0.0, -1.0, -3.125, -5.375, -0.125, -0.875, -1.125, 0.0, 0.0)
IQ3_XXS_NUMBERS = (1, 3, 5, 7, 9, 11, 13, 15.5, -1, -3, -5, -7, -9, -11, -13, -15.5)
IQ3_S_NUMBERS = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
# Of blocks whose values are indices
BLOCK_NUMBERS = {"iq4_xs": IQ4_NUMBERS, "iq2": IQ2_NUMBERS, "iq3_xxs": IQ3_XXS_NUMBERS, "iq3_s": IQ3_S_NUMBERS}
CODE_NUMBERS = {"e2m1": E2M1_NUMBERS, "iq4_nl": IQ4_NUMBERS, "nf4": NF4_NUMBERS, "fp4": FP4_NUMBERS}
# The dtype of the scales and zeros of codes whose zeros are floats
FLOAT_ZERO_DTYPES = {
    "zero4_f16": torch.float16, "zero4_bf16": torch.bfloat16, "zero8_f16": torch.float16,
    "zero8_bf16": torch.bfloat16, "shift4_f16": torch.float16, "shift4_bf16": torch.bfloat16,
    "zero1_f16": torch.float16, "zero1_bf16": torch.bfloat16, "zero2_f16": torch.float16,
    "zero2_bf16": torch.bfloat16, "zero3_f16": torch.float16, "zero3_bf16": torch.bfloat16,
    "least4_f16": torch.float16, "least4_bf16": torch.bfloat16, "least8_f16": torch.float16,
    "least8_bf16": torch.bfloat16,
}  # fmt: skip
# Codes whose zeros are added to the product of scale and integer, and the integer that counts as 0
SHIFTED_CODES = {
    "shift4_f16": 8,
    "shift4_bf16": 8,
    "least4_f16": 0,
    "least4_bf16": 0,
    "least8_f16": 0,
    "least8_bf16": 0,
}
CODE_MIDDLES = {"q4_0": 8, "q8_0": 128}  # subtracted from the bits
ROUNDING_PORTION = 1 << 18  # numbers rounded at a time, so that intermediate tensors fit in the CPU cache


class GroupedWeight(NamedTuple):
    """A weight [out, in] as scale * (value - zero), with one scale and zero per output and group of columns.

    ``values`` uint8 [out, in] are the bits of a ``code``:

    * "int2", "int3", "int4" and "int8": unsigned integers, with ``zeros`` uint8 [out, groups] of the same range;
    * "q4_0" and "q8_0": integers minus their CODE_MIDDLES, without zeros;
    * "e4m3": float8_e4m3fn, without zeros;
    * "e2m1", "iq4_nl", "nf4" and "fp4": indices into CODE_NUMBERS, without zeros;
    * those of FLOAT_ZERO_DTYPES: integers, with ``zeros`` [out, groups] that are floats of that dtype. SHIFTED_CODES
      add the zero: scale * (value - 8) + zero, or scale * value + zero.

    ``scales`` [out, groups] are floats; ``out_scales`` [out], if any, multiply them. Group g has columns g * group to
    (g + 1) * group; the last may have fewer. ``order`` int64 [in]: column i is multiplied by number ``order[i]`` of a
    row; None: by number i.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    order: torch.Tensor | None = None
    code: str = "int4"
    out_scales: torch.Tensor | None = None


class PackedBlockWeight(NamedTuple):
    """A weight [out, in] in blocks of a GGUF file, with their bits rearranged and no number rounded.

    ``values`` uint8 [out, in]: integers of 4 bits, of 5 for Q5_0, Q5_1 and Q5_K, 6 for Q6_K, 2 for Q2_K; those of Q3_K,
    of 3 bits, count from 4; those of BLOCK_NUMBERS are indices. ``heads`` int32 [out, blocks, words]: the scales and
    minimums of each block, as ``grouped_weights.cpp`` describes them. ``code`` names the type, such as "q4_k".
    """

    values: torch.Tensor
    heads: torch.Tensor
    code: str


class GroupedPieces(NamedTuple):
    """A weight of ``out_features`` outputs, as pieces of them in order: each is made when it is packed, so that they
    never lie in memory together. All have the same code and groups, and all but the last can be packed alone."""

    out_features: int
    pieces: Iterable[GroupedWeight | PackedBlockWeight]


def round_int4(weight: torch.Tensor, group: int) -> GroupedWeight:
    """Round a weight to 4 bits. Each group's range runs from its smallest to its largest number and includes zero."""
    parts = [_round_groups(rows, group) for rows in weight.split(max(1, ROUNDING_PORTION // max(weight.shape[1], 1)))]
    values, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return GroupedWeight(values, scales, zeros, group)


def _round_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out_features, in_features = weight.shape
    groups = -(-in_features // group)
    parts = F.pad(weight.float(), (0, groups * group - in_features)).view(out_features, groups, group)
    low, high = parts.amin(-1).clamp_max_(0), parts.amax(-1).clamp_min_(0)
    scales = (high - low) / 15
    inverse = scales.reciprocal().nan_to_num_(0, 0, 0)
    zeros = (-low * inverse).round_().nan_to_num_(0)
    values = parts.mul(inverse[..., None]).round_().add_(zeros[..., None]).nan_to_num_(0).clamp_(0, 15)
    return values.view(out_features, groups * group)[:, :in_features].to(torch.uint8), scales, zeros.to(torch.uint8)


def _decode_values(bits: torch.Tensor, code: str) -> torch.Tensor:
    """Return the numbers of a code: float32."""
    if code in CODE_NUMBERS:
        return torch.tensor(CODE_NUMBERS[code], device=bits.device, dtype=torch.float32)[bits.long()]
    if code in CODE_MIDDLES:
        return bits.float() - CODE_MIDDLES[code]
    return (bits.view(torch.float8_e4m3fn) if code == "e4m3" else bits).float()


def dequantize_grouped(weight: GroupedWeight) -> torch.Tensor:
    """Dequantize a weight, with columns in the order of the rows: float32 [out_features, in_features]."""
    in_features = weight.values.shape[1]

    def spread_groups(group_numbers: torch.Tensor) -> torch.Tensor:
        return group_numbers.float().repeat_interleave(weight.group, 1)[:, :in_features]

    numbers = _decode_values(weight.values, weight.code)
    if weight.code in SHIFTED_CODES:
        numbers -= SHIFTED_CODES[weight.code]
    elif weight.zeros is not None:
        numbers -= spread_groups(weight.zeros)
    numbers *= spread_groups(weight.scales)
    if weight.code in SHIFTED_CODES and weight.zeros is not None:
        numbers += spread_groups(weight.zeros)
    if weight.out_scales is not None:
        numbers *= weight.out_scales.float()[:, None]
    return numbers if weight.order is None else numbers[:, weight.order.argsort()]
