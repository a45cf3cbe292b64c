"""Mamba 1 (arXiv 2312.00752) in torch operators: the definition of the kernels, and their implementation without them.

Between the two functions, linear layers compute the steps, B and C of each token from its convolved channels. ``spans``
are those of ``torch_states``, and bits are as independent of batches and steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.native.layer import StateWeights
from parley.native.state_shape import Mamba1Shape
from parley.native.torch_forms.torch_states import begin_spans, convolve_rows, silu


def convolve_channels(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba1Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return SiLU of the causal convolution of the first ``inner`` numbers of rows [T, 2 * inner]: [T, inner].

    The second part of each state becomes the last inputs.
    """
    out = rows.new_empty(len(rows), shape.inner)
    for span in begin_spans(states[:, shape.recurrent_size :], spans):
        inputs = rows[span.rows, : shape.inner].float()
        out[span.rows] = silu(convolve_rows(inputs, span.state.view(-1, shape.inner), weights))
    return out


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
    """Return the outputs of a Mamba 1 layer before its output layer: [T, inner], in the dtype of ``rows``.

    ``rows`` [T, 2 * inner] hold gates after the inputs of ``convolve_channels``, whose result is ``active``. ``steps``
    [T, inner]; ``keys`` [T, 2 * state_dim]: B and C. A channel's state S [state_dim] and output y become

        step = softplus(step + step_bias)
        S = exp(decay * step) * S + B (step * x)
        y = (C S + skip * x) * silu(gate)
    """
    assert weights.decay is not None and weights.step_bias is not None and weights.skip is not None
    out = torch.empty_like(active)
    wide_steps = F.softplus(steps.double() + weights.step_bias.double())
    for span in begin_spans(states[:, : shape.recurrent_size], spans):
        state, first = span.state.view(shape.state_dim, -1), span.rows.start
        x, some = active[span.rows].float(), wide_steps[span.rows]
        b, c = keys[span.rows].float()[..., None].split(shape.state_dim, 1)
        gates = silu(rows[span.rows, shape.inner :].float())
        for t in range(len(x)):
            state *= (some[t] * weights.decay.double()).exp().float()
            state += b[t] * (some[t].float() * x[t])
            out[first + t] = ((c[t] * state).sum(0) + weights.skip * x[t]) * gates[t]
    return out
