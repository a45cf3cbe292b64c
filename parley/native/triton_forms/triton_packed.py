"""The packed weights of the kernels for GPUs. Plain data, importable without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TritonPacked:
    """A linear layer's weight [out, in] as it is, and its bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class TritonInt8Packed:
    """A linear layer's weight int8 [out, in], scales float32 [out] and bias [out], for results of ``dtype``."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True)
class TritonGroupedPacked:
    """A weight of 4 or 8 bits in the layout of ``triton_grouped``: ``weight`` uint8 [out, bytes of a row].

    ``scales`` and ``zeros`` [groups, out] are also there for groups that are padding alone. ``out_scales`` float32
    [out]. ``order`` int64 [into]: the permutation of a row's numbers that the weight needs, or None. ``piece``: columns
    that are multiplied at once.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    out_scales: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None
    code: str
    group: int
    piece: int
    in_features: int
