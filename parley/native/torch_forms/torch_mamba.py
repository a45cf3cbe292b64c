"""Mamba 2 (arXiv 2405.21060) in torch operators: the definition of the kernel, and its implementation without it.

``spans`` and ``states`` are those of ``torch_states``, and bits are as independent of batches and steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.native.layer import StateWeights
from parley.native.layer_shape import Norm
from parley.native.state_shape import Mamba2Shape
from parley.native.torch_forms.torch_states import begin_spans, convolve_rows, silu


def scan_mamba2(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba2Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a Mamba 2 layer before its output layer: [T, inner], in the dtype of ``rows``.

    ``rows`` [T, inner + channels + heads]: gates, inputs of the convolution, and steps; without these all are 1. The
    convolution and SiLU give x, B and C. A head's state S [state_dim, head_dim] and output y become

        step = softplus(step_scale * step + step_bias), limited to step_limits
        S = exp(decay * step) * S + B (step * x)
        y = C S + skip * x

    and the result is norm(y * silu(gate_scale * gate)), or norm(y) * silu(gate_scale * gate), or norm(y) *
    sigmoid(gate).
    """
    out = rows.new_empty(len(rows), shape.inner)
    for span in begin_spans(states, spans):
        recurrent, tail = span.state.split([shape.recurrent_size, shape.size - shape.recurrent_size])
        gates, inputs, steps = rows[span.rows].float().split(shape.row_sizes, 1)
        active = silu(convolve_rows(inputs, tail.view(-1, shape.channels), weights))
        y = _scan_heads(active, steps, weights, shape, recurrent.view(shape.heads, shape.state_dim, -1))
        factors = gates.double().sigmoid().float() if shape.has_sigmoid_gates else silu(gates * shape.gate_scale)
        out[span.rows] = _norm_gated(y, factors, weights.norm, shape)
    return out


def _scan_heads(
    active: torch.Tensor, steps: torch.Tensor, weights: StateWeights, shape: Mamba2Shape, recurrent: torch.Tensor
) -> torch.Tensor:
    """Return y of all heads, float32 [T, inner], and advance the recurrent state [heads, state_dim, head_dim]."""
    assert weights.decay is not None
    key_width = shape.groups * shape.state_dim
    x, b, c = active.split([shape.inner, key_width, key_width], 1)
    x = x.unflatten(1, (shape.heads, 1, -1))
    b, c = (
        tensor.unflatten(1, (shape.groups, -1, 1)).repeat_interleave(shape.heads // shape.groups, 1)
        for tensor in (b, c)
    )
    if shape.has_steps:
        assert weights.step_bias is not None
        double_steps = F.softplus(steps.double() * shape.step_scale + weights.step_bias.double()).clamp(
            *shape.step_limits
        )
    else:
        double_steps = steps.new_ones(len(x), shape.heads).double()
    decay = (double_steps * weights.decay.double()).exp().float()[..., None, None]
    step = double_steps.float()[..., None, None]
    y = torch.empty_like(x[:, :, 0])
    for t in range(len(x)):
        recurrent *= decay[t]
        recurrent += b[t] * (step[t] * x[t])
        y[t] = (c[t] * recurrent).sum(1)
    outputs: torch.Tensor = y if weights.skip is None else y + weights.skip[:, None] * x[:, :, 0]
    return outputs.flatten(1)


def _norm_gated(y: torch.Tensor, factors: torch.Tensor, norm: Norm | None, shape: Mamba2Shape) -> torch.Tensor:
    """Return the rows y [T, inner], multiplied by the gates' ``factors`` before or after the norm."""
    if norm is None:
        return y * factors
    if shape.is_gate_first:
        y = y * factors
    parts = y.unflatten(1, (shape.norm_groups, -1))
    normed: torch.Tensor = F.rms_norm(parts, parts.shape[-1:], None, norm.eps)
    y = normed.flatten(1) * norm.weight
    return y if shape.is_gate_first else y * factors
