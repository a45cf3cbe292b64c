"""The types of packed linear weights, one per kernel implementation."""

from __future__ import annotations

from parley.native import compiled, torch_kernels
from parley.native.compiled_int4 import Int4Packed
from parley.native.compiled_int8 import Int8Packed

COMPILED = compiled.Packed | Int8Packed | Int4Packed
Packed = COMPILED | torch_kernels.Packed | torch_kernels.Int8Packed
