"""What the weight of a linear layer is once it is packed: one of the forms that some kernel reads."""

from __future__ import annotations

from parley.native import compiled, torch_kernels
from parley.native.compiled_int4 import Int4Packed
from parley.native.compiled_int8 import Int8Packed

COMPILED = compiled.Packed | Int8Packed | Int4Packed
Packed = COMPILED | torch_kernels.Packed | torch_kernels.Int8Packed
