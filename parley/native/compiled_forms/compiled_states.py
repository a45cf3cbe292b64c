"""Calls ``delta.cpp``, and the convolution and norm of Mamba 2: layers that keep a state, on bfloat16 rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.compiled_forms.compiled_convolution import convolve_rows
from parley.native.layer import StateWeights
from parley.native.state_shape import MAX_KEY_DIM, GatedDeltaShape, ShortConvolutionShape

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
STATES_SIGNATURES: dict[str, list[Any]] = {
    "scan_delta": [P, P, N, P, P, R, P, N, P, N, P, N, N, N, N, N],
    "convolve_gated": [P, P, P, P, N, P, N, P, N, N, N],
    "gate_rows": [P, P, N, N, N, N],
}


def scan_gated_delta(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    gates: torch.Tensor,
    weights: StateWeights,
    shape: GatedDeltaShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule for bfloat16 rows [T, channels + inner]: bfloat16 [T, inner].

    Raises ValueError if rows, gates or states have another width, or if ``key_dim`` is above MAX_KEY_DIM.
    """
    widths = rows.shape[1], gates.shape[1], states.shape[1]
    if widths != (shape.channels + shape.inner, 2 * shape.value_heads, shape.size) or shape.key_dim > MAX_KEY_DIM:
        raise ValueError(f"rows, gates and states of {widths} numbers for {shape}")
    assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
    rows, gates, spans = rows.contiguous(), gates.contiguous(), spans.contiguous()
    assert states.is_contiguous()
    threads = torch.get_num_threads()
    inputs, z = rows.split([shape.channels, shape.inner], 1)
    batch = shape.size, spans.data_ptr(), len(spans)
    active, y = convolve_rows(library, inputs, weights, shape, states, spans), torch.empty(z.shape)
    library.scan_delta(
        active.data_ptr(),
        gates.data_ptr(),
        gates.shape[1],
        weights.decay.data_ptr(),
        weights.step_bias.data_ptr(),
        shape.max_strength,
        states.data_ptr(),
        *batch,
        y.data_ptr(),
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        threads,
    )
    out, norm = torch.empty(z.shape, dtype=torch.bfloat16), weights.norm
    library.norm_gated(
        y.data_ptr(),
        z.data_ptr(),
        rows.shape[1],
        norm.weight.data_ptr(),
        norm.eps,
        1.0,
        False,
        out.data_ptr(),
        *z.shape,
        shape.value_heads,
        threads,
    )
    return out


def convolve_gated(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    weights: StateWeights,
    shape: ShortConvolutionShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a gated short convolution for bfloat16 rows [T, 3 * width]: bfloat16 [T, width].

    Raises ValueError if rows or states have another width.
    """
    if rows.shape[1] != 3 * shape.width or states.shape[1] != shape.size:
        raise ValueError(f"rows of {rows.shape[1]} numbers and states of {states.shape[1]} for {shape}")
    rows, spans = rows.contiguous(), spans.contiguous()
    assert states.is_contiguous()
    out = torch.empty(len(rows), shape.width, dtype=torch.bfloat16)
    library.convolve_gated(
        rows.data_ptr(),
        weights.convolution.data_ptr(),
        None if weights.convolution_bias is None else weights.convolution_bias.data_ptr(),
        states.data_ptr(),
        shape.size,
        spans.data_ptr(),
        len(spans),
        out.data_ptr(),
        shape.width,
        shape.kernel,
        torch.get_num_threads(),
    )
    return out


def gate_rows(library: ctypes.CDLL, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Multiply contiguous bfloat16 rows [T, width] by sigmoid(gates), and return them. Rows of gates may lie apart."""
    assert rows.is_contiguous() and gates.stride(1) == 1 and gates.shape == rows.shape
    library.gate_rows(rows.data_ptr(), gates.data_ptr(), gates.stride(0), *rows.shape, torch.get_num_threads())
    return rows
