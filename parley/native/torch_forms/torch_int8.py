"""Linear layers on int8 in torch operators: rows quantized at run time, integer products, one rounding at the end.

Sums of int8 products are exact in int32, so the order of additions cannot change a result: the compiled kernels give
the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

MIN_ABSMAX = 2.0**-100  # a row whose largest number is smaller counts as zero: its reciprocal would overflow float32
EXACT_PRODUCTS = 1024  # int8 products whose sum float32 holds exactly: 127 * 127 * 1024 < 2^24
MAX_INNER = 1 << 17  # the largest inner dimension: sums of products stay below 2^31


@dataclass(frozen=True)
class TorchRows:
    """Rows as int8 with a scale each: row i is ``values[i] * scales[i]``, or NaN if the row was not finite.

    ``values`` int8 [T, width]; ``scales`` float32 [T].
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True)
class TorchInt8Packed:
    """A linear layer's weight int8 [out, in], scales float32 [out] and bias [out], for results of ``dtype``."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


def quantize_rows(x: torch.Tensor) -> TorchRows:
    """Quantize x [T, K]. The scale of a row is its largest absolute value / 127; rounds half to even."""
    rows = x.float()
    largest = rows.abs().amax(-1) if x.shape[-1] else rows.new_zeros(rows.shape[:-1])
    is_finite = largest.isfinite()
    # 127 / x rounds twice.
    inverse = torch.where(is_finite & (largest >= MIN_ABSMAX), torch.full_like(largest, 127).div_(largest), 0.0)
    values = torch.where(is_finite[:, None], rows * inverse[:, None], 0.0).round_().to(torch.int8)
    return TorchRows(values, torch.where(is_finite, largest / 127, torch.nan))


def pack_int8(
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> TorchInt8Packed:
    """Pack a weight for rows of ``dtype``: output n is ``values[n] * scales[n]``, int8 [out, in] and float32 [out]."""
    check_int8_shape(values)
    return TorchInt8Packed(values.contiguous(), scales.float(), bias, dtype)


def check_int8_shape(values: torch.Tensor) -> tuple[int, int]:
    """Return the shape (out, in) of an int8 weight. Raises ValueError if its inner dimension is above MAX_INNER."""
    out_features, in_features = values.shape
    if in_features > MAX_INNER:
        raise ValueError(f"sums over {in_features} numbers of int8 do not fit 32 bits")
    return out_features, in_features


def linear_int8(rows: TorchRows, packed: TorchInt8Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [T, in] times the packed weight, plus bias: [T, out]."""
    sums = _multiply_exact(rows.values, packed.weight)
    y = sums.float().mul_(rows.scales[:, None]).mul_(packed.scales)
    if packed.bias is not None:
        y += packed.bias.float()
    return y.to(dtype)


def _multiply_exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [T, in] int8 times the transpose of weight [out, in] int8, exactly: int32 [T, out]."""
    # torch 2.13 multiplies an inner dimension of 1 wrongly.
    if x.is_cpu and x.numel() and weight.numel() and x.shape[1] > 1 and int_mm_is_exact():
        return torch._int_mm(x, weight.t())
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for part, columns in zip(x.split(EXACT_PRODUCTS, 1), weight.split(EXACT_PRODUCTS, 1), strict=True):
        sums += F.linear(part.float(), columns.float()).int()
    return sums


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether torch's int8 product is exact. Without VNNI, some implementations add pairs in 16 bits."""
    extremes = torch.full((64, 128), 127, dtype=torch.int8)
    return bool((torch._int_mm(extremes, -extremes.t()) == -127 * 127 * 128).all())
