"""Describes packed weights to kernels that call other kernels: ``Linear`` of ``weight.h``. No tensor is copied."""

from __future__ import annotations

import ctypes

import torch

from parley.native.compiled_forms.compiled_grouped import GROUPED_CODES, GroupedPacked
from parley.native.compiled_forms.compiled_int8 import Int8Packed
from parley.native.packed import Bf16Packed

P, N = ctypes.c_void_p, ctypes.c_int64
WEIGHT_TYPES = (Bf16Packed, Int8Packed, GroupedPacked)  # numbered as in weight.h
ROW_UNIT = 8  # rows whose length is a multiple of it need no padding in any kernel


class LinearStruct(ctypes.Structure):
    """One linear layer's weight, or that of several experts."""

    _fields_ = [
        *((name, N) for name in ("form", "out_features", "in_features", "code", "group")),
        *((name, P) for name in ("weight", "scales", "bias", "order")),
    ]


def linear_struct(packed: object) -> LinearStruct:
    """Describe a packed weight, which must outlive the result."""
    assert isinstance(packed, WEIGHT_TYPES) and packed.in_features % ROW_UNIT == 0
    return LinearStruct(
        WEIGHT_TYPES.index(type(packed)),
        packed.out_features,
        packed.in_features,
        *((GROUPED_CODES.index(packed.code), packed.group) if isinstance(packed, GroupedPacked) else (0, 0)),
        packed.weight.data_ptr(),
        None if isinstance(packed, Bf16Packed) else address_of(packed.scales),
        address_of(packed.bias),
        address_of(packed.order if isinstance(packed, GroupedPacked) else None),
    )


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, None for None."""
    return None if tensor is None else tensor.data_ptr()
