"""Layers that keep a state of each sequence: delta rules, Mamba and short convolutions."""

from __future__ import annotations

import torch

from parley.native.kernel_choice import form_for_rows
from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape, ShortConvolutionShape


def scan_mamba2(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba2Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a Mamba 2 layer for rows [T, inner + channels + heads]: [T, inner]; advance the states.

    ``torch_mamba`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_mamba2", rows).scan_mamba2(rows, weights, shape, states, spans)
    return result


def convolve_channels(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba1Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the convolved channels of a Mamba 1 layer for rows [T, 2 * inner]: [T, inner]; advance their part of the
    states. ``torch_selective`` defines it."""
    result: torch.Tensor = form_for_rows("convolve_channels", rows).convolve_channels(
        rows, weights, shape, states, spans
    )
    return result


def scan_channels(
    rows: torch.Tensor,
    active: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    weights: StateWeights,
    shape: Mamba1Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a Mamba 1 layer for rows [T, 2 * inner]: [T, inner]; advance the states.

    ``torch_selective`` defines it.
    """
    result: torch.Tensor = form_for_rows("scan_channels", rows).scan_channels(
        rows, active, steps, keys, weights, shape, states, spans
    )
    return result


def scan_gated_delta(
    rows: torch.Tensor,
    gates: torch.Tensor,
    weights: StateWeights,
    shape: GatedDeltaShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule for rows [T, channels + inner]: [T, inner]; advance the states.

    ``torch_states`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_gated_delta", rows).scan_gated_delta(
        rows, gates, weights, shape, states, spans
    )
    return result


def scan_kimi_delta(
    rows: torch.Tensor, weights: StateWeights, shape: KimiDeltaShape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of Kimi Delta Attention for rows [T, channels + heads + 2 * inner]: [T, inner]; advance the
    states.

    ``torch_states`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_kimi_delta", rows).scan_kimi_delta(rows, weights, shape, states, spans)
    return result


def convolve_gated(
    rows: torch.Tensor,
    weights: StateWeights,
    shape: ShortConvolutionShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a gated short convolution for rows [T, 3 * width]: [T, width]; advance the states."""
    result: torch.Tensor = form_for_rows("convolve_gated", rows).convolve_gated(rows, weights, shape, states, spans)
    return result
