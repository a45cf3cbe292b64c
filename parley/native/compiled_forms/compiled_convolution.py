"""Calls the convolution of ``mamba.cpp``, with which several layers that keep a state begin."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape

P, N = ctypes.c_void_p, ctypes.c_int64
CONVOLUTION_SIGNATURES: dict[str, list[Any]] = {"convolve_rows": [P, N, P, P, P, N, P, N, P, N, N, N]}


def convolve_rows(
    library: ctypes.CDLL,
    inputs: torch.Tensor,
    weights: StateWeights,
    shape: GatedDeltaShape | KimiDeltaShape | Mamba1Shape | Mamba2Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the convolved inputs, float32 [T, channels], and update the last inputs in the contiguous float32 states.

    ``inputs``: bfloat16 [T, channels]; rows may lie apart. ``spans``: contiguous.
    """
    active = torch.empty(inputs.shape)
    library.convolve_rows(
        inputs.data_ptr(),
        inputs.stride(0),
        weights.convolution.data_ptr(),
        None if weights.convolution_bias is None else weights.convolution_bias.data_ptr(),
        states.data_ptr() + shape.recurrent_size * states.itemsize,
        shape.size,
        spans.data_ptr(),
        len(spans),
        active.data_ptr(),
        shape.channels,
        shape.kernel,
        torch.get_num_threads(),
    )
    return active
