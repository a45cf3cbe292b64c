"""Calls ``mamba.cpp``, and the gated norm of ``rows.cpp``: Mamba 2 on bfloat16 rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.compiled_forms.compiled_convolution import convolve_rows
from parley.native.compiled_forms.weight_struct import address_of
from parley.native.layer import StateWeights
from parley.native.layer_shape import Norm
from parley.native.state_shape import Mamba2Shape

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
MAMBA_SIGNATURES: dict[str, list[Any]] = {
    "scan_heads": [P, P, N, P, P, P, R, R, R, P, N, P, N, P, N, N, N, N, N],
    "norm_gated": [P, P, N, P, R, R, N, P, N, N, N, N],
}


def scan_mamba2(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    weights: StateWeights,
    shape: Mamba2Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a Mamba 2 layer for bfloat16 rows [T, inner + channels + heads]: bfloat16 [T, inner].

    Raises ValueError if rows or states have another width.
    """
    if rows.shape[1] != sum(shape.row_sizes) or states.shape[1] != shape.size:
        raise ValueError(f"rows of {rows.shape[1]} numbers and states of {states.shape[1]} for {shape}")
    rows, spans = rows.contiguous(), spans.contiguous()
    assert states.is_contiguous()
    gates, inputs, steps = rows.split(shape.row_sizes, 1)
    active, y = convolve_rows(library, inputs, weights, shape, states, spans), torch.empty(gates.shape)
    assert weights.decay is not None
    library.scan_heads(
        active.data_ptr(),
        steps.data_ptr() if shape.has_steps else None,
        rows.shape[1],
        weights.decay.data_ptr(),
        address_of(weights.step_bias),
        address_of(weights.skip),
        shape.step_scale,
        *shape.step_limits,
        states.data_ptr(),
        shape.size,
        spans.data_ptr(),
        len(spans),
        y.data_ptr(),
        shape.heads,
        shape.head_dim,
        shape.groups,
        shape.state_dim,
        torch.get_num_threads(),
    )
    return _norm_gated(library, y, gates, weights.norm, shape)


def _norm_gated(
    library: ctypes.CDLL, y: torch.Tensor, gates: torch.Tensor, norm: Norm | None, shape: Mamba2Shape
) -> torch.Tensor:
    """Return the outputs y float32 [T, inner] times the activated gates, normed in groups: bfloat16 [T, inner].

    ``gates`` bfloat16 [T, inner] are columns of wider rows.
    """
    out = torch.empty(gates.shape, dtype=torch.bfloat16)
    shared = *gates.shape, shape.norm_groups, torch.get_num_threads()
    if shape.has_sigmoid_gates:
        assert norm is not None
        library.norm_sigmoid_gated(
            y.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            norm.weight.data_ptr(),
            norm.eps,
            out.data_ptr(),
            *shared,
        )
        return out
    library.norm_gated(
        y.data_ptr(),
        gates.data_ptr(),
        gates.stride(0),
        0 if norm is None else norm.weight.data_ptr(),
        0.0 if norm is None else norm.eps,
        shape.gate_scale,
        shape.is_gate_first,
        out.data_ptr(),
        *shared,
    )
    return out
