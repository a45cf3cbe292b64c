"""The struct of a norm, as the kernels read it."""

from __future__ import annotations

import ctypes
from typing import Any

from parley.native.layer_shape import Norm


class NormStruct(ctypes.Structure):
    """``Norm`` in ``kernels.h``."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("is_centered", ctypes.c_int64),
        ("eps", ctypes.c_float),
    ]

    @classmethod
    def from_norm(cls, norm: Norm) -> NormStruct:
        """Return the struct of a norm. It does not keep the tensors alive."""
        bias = None if norm.bias is None else norm.bias.data_ptr()
        return cls(norm.weight.data_ptr(), bias, norm.is_centered, norm.eps)


def norm_pointer(norm: Norm | None) -> Any:
    """Return the argument of a kernel for a norm, or for none."""
    return None if norm is None else ctypes.byref(NormStruct.from_norm(norm))
