"""The types of packed linear weights, one per kernel implementation."""

from __future__ import annotations

from parley.native import compiled, torch_kernels
from parley.native.compiled_int4 import Int4Packed
from parley.native.compiled_int8 import Int8Packed

COMPILED_WEIGHTS = compiled.Bf16Packed | Int8Packed | Int4Packed
PackedWeight = COMPILED_WEIGHTS | torch_kernels.TorchPacked | torch_kernels.TorchInt8Packed
