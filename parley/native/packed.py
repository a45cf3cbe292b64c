"""The types of packed linear weights, one per kernel implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.compiled_forms.compiled_grouped import GroupedPacked
from parley.native.compiled_forms.compiled_int8 import Int8Packed
from parley.native.torch_forms import torch_kernels
from parley.native.triton_forms.triton_packed import TritonGroupedPacked, TritonInt8Packed, TritonPacked


@dataclass(frozen=True)
class Bf16Packed:
    """A linear layer's weight in the layout that ``linear.cpp`` describes, for rows of ``in_features`` numbers."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int


COMPILED_WEIGHTS = Bf16Packed | Int8Packed | GroupedPacked
TORCH_WEIGHTS = torch_kernels.TorchPacked | torch_kernels.TorchInt8Packed
TRITON_WEIGHTS = TritonPacked | TritonInt8Packed | TritonGroupedPacked
PackedWeight = COMPILED_WEIGHTS | TORCH_WEIGHTS | TRITON_WEIGHTS
