"""Calls ``kimi_delta.cpp``, and the convolution of Mamba 2: Kimi Delta Attention on bfloat16 rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.compiled_forms.compiled_convolution import convolve_rows
from parley.native.layer import StateWeights
from parley.native.state_shape import MAX_KEY_DIM, KimiDeltaShape

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
KIMI_SIGNATURES: dict[str, list[Any]] = {
    "scan_kimi_delta": [P, P, N, P, P, R, P, N, P, N, P, N, N, N],
    "norm_sigmoid_gated": [P, P, N, P, R, P, N, N, N, N],
}


def scan_kimi_delta(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    weights: StateWeights,
    shape: KimiDeltaShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of Kimi Delta Attention for bfloat16 rows [T, channels + heads + 2 * inner]: bfloat16 [T,
    inner].

    Raises ValueError if rows or states have another width, or if ``dim`` is above MAX_KEY_DIM.
    """
    widths = rows.shape[1], states.shape[1]
    if widths != (sum(shape.row_sizes), shape.size) or shape.dim > MAX_KEY_DIM:
        raise ValueError(f"rows and states of {widths} numbers for {shape}")
    assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
    rows, spans = rows.contiguous(), spans.contiguous()
    assert states.is_contiguous()
    threads = torch.get_num_threads()
    inputs, gates, _, z = rows.split(shape.row_sizes, 1)
    batch = shape.size, spans.data_ptr(), len(spans)
    active, y = convolve_rows(library, inputs, weights, shape, states, spans), torch.empty(z.shape)
    library.scan_kimi_delta(
        active.data_ptr(),
        gates.data_ptr(),
        rows.shape[1],
        weights.decay.data_ptr(),
        weights.step_bias.data_ptr(),
        shape.lower_bound or 0.0,
        states.data_ptr(),
        *batch,
        y.data_ptr(),
        shape.heads,
        shape.dim,
        threads,
    )
    out, norm = torch.empty(z.shape, dtype=torch.bfloat16), weights.norm
    library.norm_sigmoid_gated(
        y.data_ptr(),
        z.data_ptr(),
        rows.shape[1],
        norm.weight.data_ptr(),
        norm.eps,
        out.data_ptr(),
        *z.shape,
        shape.heads,
        threads,
    )
    return out
