"""Calls ``selective.cpp``, and the convolution of ``mamba.cpp``: Mamba 1 on bfloat16 rows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.compiled_forms.compiled_convolution import convolve_rows
from parley.native.layer import StateWeights
from parley.native.state_shape import Mamba1Shape

P, N = ctypes.c_void_p, ctypes.c_int64
SELECTIVE_SIGNATURES: dict[str, list[Any]] = {
    "scan_channels": [P, P, P, P, N, P, P, P, P, N, P, N, P, N, N, N],
}


def convolve_channels(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    weights: StateWeights,
    shape: Mamba1Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the convolved channels of bfloat16 rows [T, 2 * inner]: bfloat16 [T, inner].

    Raises ValueError if rows or states have another width.
    """
    _check_widths(rows, shape, states)
    rows, spans = rows.contiguous(), spans.contiguous()
    return convolve_rows(library, rows[:, : shape.inner], weights, shape, states, spans).to(torch.bfloat16)


def scan_channels(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    active: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    weights: StateWeights,
    shape: Mamba1Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a Mamba 1 layer, bfloat16 [T, inner]. Raises ValueError as ``convolve_channels`` does."""
    _check_widths(rows, shape, states)
    if steps.shape != active.shape or keys.shape != (len(rows), 2 * shape.state_dim):
        raise ValueError(f"steps {list(steps.shape)} and keys {list(keys.shape)} for {shape}")
    assert weights.decay is not None and weights.step_bias is not None and weights.skip is not None
    rows, active, steps, spans = (tensor.contiguous() for tensor in (rows, active, steps, spans))
    wide_keys, out = keys.float().contiguous(), torch.empty_like(active)
    library.scan_channels(
        active.data_ptr(),
        steps.data_ptr(),
        wide_keys.data_ptr(),
        rows.data_ptr() + shape.inner * rows.itemsize,
        rows.shape[1],
        weights.decay.data_ptr(),
        weights.step_bias.data_ptr(),
        weights.skip.data_ptr(),
        states.data_ptr(),
        shape.size,
        spans.data_ptr(),
        len(spans),
        out.data_ptr(),
        shape.inner,
        shape.state_dim,
        torch.get_num_threads(),
    )
    return out


def _check_widths(rows: torch.Tensor, shape: Mamba1Shape, states: torch.Tensor) -> None:
    if rows.shape[1] != 2 * shape.inner or states.shape[1] != shape.size:
        raise ValueError(f"rows of {rows.shape[1]} numbers and states of {states.shape[1]} for {shape}")
    assert states.is_contiguous()
