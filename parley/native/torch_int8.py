"""Linear layers on int8 in torch operators: rows quantised as they come, integer products, one rounding at the end.

Sums of int8 products are exact in int32, so a row's result cannot depend on how they were added up: the compiled
kernels give the same bits as these forms.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

LEAST = 2.0**-100  # a row whose largest number is below is zero: its reciprocal would be beyond float32
EXACT = 1024  # int8 products whose sum float32 holds exactly: 127 * 127 * 1024 < 2^24
MOST = 1 << 17  # inner dimension up to which sums of products are below 2^31


@dataclass(frozen=True)
class Rows:
    """Rows as int8 with a scale each: row i is ``values[i] * scales[i]``, and not a number where it held none.

    ``values`` int8 [T, width]; ``scales`` float32 [T].
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class Int8Packed:
    """A linear layer's weight int8 [out, in], float32 scales [out] and bias [out], for results of ``dtype``."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


def quantise(x: torch.Tensor) -> Rows:
    """x [T, K] with a scale for each row, its largest absolute value / 127; to the nearest, ties to even."""
    wide = x.float()
    most = wide.abs().amax(-1) if x.shape[-1] else wide.new_zeros(wide.shape[:-1])
    sound = most.isfinite()
    inverse = torch.where(sound & (most >= LEAST), torch.full_like(most, 127).div_(most), 0.0)  # 127 / x rounds twice
    values = torch.where(sound[:, None], wide * inverse[:, None], 0.0).round_().to(torch.int8)
    return Rows(values, torch.where(sound, most / 127, torch.nan))


def pack_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Int8Packed:
    """Prepare a weight: output n is ``values[n] * scales[n]``, int8 [out, in] and float32 [out]."""
    check(values)
    return Int8Packed(values.contiguous(), scales.float(), bias, dtype)


def check(values: torch.Tensor) -> tuple[int, int]:
    """The shape (out, in) of a weight that can be packed. Raises ValueError."""
    out, into = values.shape
    if into > MOST:
        raise ValueError(f"sums over {into} numbers of int8 do not fit 32 bits")
    return out, into


def linear(rows: Rows, packed: Int8Packed, dtype: torch.dtype) -> torch.Tensor:
    """rows [T, in] times the packed weight, plus bias: [T, out]."""
    sums = _multiply(rows.values, packed.weight)
    y = sums.float().mul_(rows.scales[:, None]).mul_(packed.scales)
    if packed.bias is not None:
        y += packed.bias.float()
    return y.to(dtype)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] int8 times weight [out, in] int8, transposed: exactly, as int32 [T, out]."""
    # An inner dimension of 1 is multiplied wrongly there (torch 2.13).
    if x.is_cpu and x.numel() and weight.numel() and x.shape[1] > 1 and _whole():
        return torch._int_mm(x, weight.t())
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for part, columns in zip(x.split(EXACT, 1), weight.split(EXACT, 1), strict=True):
        sums += F.linear(part.float(), columns.float()).int()
    return sums


@functools.cache
def _whole() -> bool:
    """Whether torch's own product keeps whole numbers: without VNNI some of its forms add pairs up in 16 bits."""
    ends = torch.full((64, 128), 127, dtype=torch.int8)
    return bool((torch._int_mm(ends, -ends.t()) == -127 * 127 * 128).all())
