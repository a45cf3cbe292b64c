"""The definitions of layers that keep a state, for the numeric check: float32, one token after another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parley.native.layer import StateWeights
from parley.native.state_shape import (
    GatedDeltaShape,
    KimiDeltaShape,
    Mamba1Shape,
    Mamba2Shape,
    ShortConvolutionShape,
    StateShape,
)


def convolve_inputs(x: torch.Tensor, weights: StateWeights) -> torch.Tensor:
    """Return the causal convolution of a whole sequence [T, channels]: number i of token t is the sum over j of number
    i of token t - j times its weight j before the last."""
    kernel = len(weights.convolution)
    rows = [
        sum(
            (x[t - j] * weights.convolution[kernel - 1 - j] for j in range(min(kernel, t + 1))),
            start=torch.zeros(x.shape[1]),
        )
        for t in range(len(x))
    ]
    total = torch.stack(rows)
    return total if weights.convolution_bias is None else total + weights.convolution_bias


def run_state_layer(
    shape: StateShape,
    weights: StateWeights,
    rows: torch.Tensor,
    gates: torch.Tensor,
    project: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """Return the outputs of a whole sequence before the output layer, float32 [T, inner].

    ``rows`` float32 [T, ...]: outputs of the layer's input; ``gates`` float32 [T, ...]: of its gates, if it has any.
    ``project`` applies a linear layer of the layer to rows.
    """
    if isinstance(shape, Mamba1Shape):
        return run_mamba1(shape, weights, rows, project)
    if isinstance(shape, KimiDeltaShape):
        return run_kimi_delta(shape, weights, rows, project)
    if isinstance(shape, GatedDeltaShape):
        return run_gated_delta(shape, weights, rows, gates)
    if isinstance(shape, Mamba2Shape):
        return run_mamba2(shape, weights, rows)
    return run_short_convolution(shape, weights, rows)


def run_short_convolution(shape: ShortConvolutionShape, weights: StateWeights, rows: torch.Tensor) -> torch.Tensor:
    """Return c * convolution(b * x) of rows [T, 3 * width], which hold b, c and x: [T, width]."""
    b, c, x = rows.split(shape.width, 1)
    result: torch.Tensor = c * convolve_inputs(b * x, weights)
    return result


def run_gated_delta(
    shape: GatedDeltaShape, weights: StateWeights, rows: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of the gated delta rule (arXiv 2412.06464, equation 10), each head by itself:
    S_t = S_(t-1) (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T and o_t = S_t q_t."""
    assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
    mixed, z = rows[:, : shape.channels], rows[:, shape.channels :]
    active = convolve_inputs(mixed, weights)
    active = active * active.sigmoid()
    key_width = shape.key_heads * shape.key_dim
    b, a = gates[:, : shape.value_heads], gates[:, shape.value_heads :]
    beta, alpha = shape.max_strength * b.sigmoid(), (weights.decay * (1 + (a + weights.step_bias).exp()).log()).exp()
    outputs = []
    for head in range(shape.value_heads):
        key_head = head * shape.key_heads // shape.value_heads
        first, value_first = key_head * shape.key_dim, 2 * key_width + head * shape.value_dim
        q, k = active[:, first : first + shape.key_dim], active[:, key_width + first :][:, : shape.key_dim]
        v = active[:, value_first : value_first + shape.value_dim]
        q, k = (heads / (heads.square().sum(1, keepdim=True) + 1e-6).sqrt() for heads in (q, k))
        state, identity = torch.zeros(shape.value_dim, shape.key_dim), torch.eye(shape.key_dim)
        rows_of_head = []
        for t in range(len(rows)):
            erased = identity - beta[t, head] * torch.outer(k[t], k[t])
            state = state @ (alpha[t, head] * erased) + beta[t, head] * torch.outer(v[t], k[t])
            rows_of_head.append(state @ q[t] / shape.key_dim**0.5)
        out = torch.stack(rows_of_head)
        out = out / (out.square().mean(1, keepdim=True) + weights.norm.eps).sqrt()
        gate = z[:, head * shape.value_dim : (head + 1) * shape.value_dim]
        outputs.append(out * gate * gate.sigmoid())
    return torch.cat(outputs, 1) * weights.norm.weight


def run_kimi_delta(
    shape: KimiDeltaShape,
    weights: StateWeights,
    rows: torch.Tensor,
    project: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """Return the outputs of Kimi Delta Attention (arXiv 2510.26692, equation 1), each head by itself:
    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_(t-1) + beta_t k_t v_t^T and o_t = S_t^T q_t."""
    assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
    low = shape.rank or shape.inner
    mixed, b, numbers, z = rows.split([shape.channels, shape.heads, low, low], 1)
    if shape.rank:
        numbers, z = project(numbers, "state_step"), project(z, "state_gates")
    active = convolve_inputs(mixed, weights)
    active = active * active.sigmoid()
    numbers = numbers + weights.step_bias
    outputs = []
    for head in range(shape.heads):
        channels = slice(head * shape.dim, (head + 1) * shape.dim)
        q, k, v = (part[:, channels] for part in active.split(shape.inner, 1))
        q, k = (part / (part.square().sum(1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        if shape.lower_bound is None:
            alpha = (weights.decay[head] * (1 + numbers[:, channels].exp()).log()).exp()
        else:
            alpha = (shape.lower_bound / (1 + (weights.decay[head] * numbers[:, channels]).exp())).exp()
        beta, state, identity = b[:, head].sigmoid(), torch.zeros(shape.dim, shape.dim), torch.eye(shape.dim)
        rows_of_head = []
        for t in range(len(rows)):
            erased = identity - beta[t] * torch.outer(k[t], k[t])
            state = erased @ (alpha[t][:, None] * state) + beta[t] * torch.outer(k[t], v[t])
            rows_of_head.append(q[t] @ state / shape.dim**0.5)
        out = torch.stack(rows_of_head)
        outputs.append(out / (out.square().mean(1, keepdim=True) + weights.norm.eps).sqrt())
    gated: torch.Tensor = torch.cat(outputs, 1) * weights.norm.weight * z.sigmoid()
    return gated


def run_mamba2(shape: Mamba2Shape, weights: StateWeights, rows: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a Mamba 2 layer (arXiv 2405.21060, equation 2), each head by itself:
    S_t = exp(A step_t) S_(t-1) + step_t x_t B_t^T and y_t = S_t C_t + D x_t."""
    assert weights.decay is not None
    z, mixed, steps = rows.split(shape.row_sizes, 1)
    active = convolve_inputs(mixed, weights)
    active = active * active.sigmoid()
    if shape.has_steps:
        shifted = steps * shape.step_scale + (0 if weights.step_bias is None else weights.step_bias)
        steps = torch.logaddexp(shifted, torch.zeros(())).clamp(*shape.step_limits)
    else:
        steps = torch.ones(len(rows), shape.heads)
    skip = torch.zeros(shape.heads) if weights.skip is None else weights.skip
    key_width = shape.groups * shape.state_dim
    x, b, c = active.split([shape.inner, key_width, key_width], 1)
    x = x.unflatten(1, (shape.heads, -1))
    b, c = (keys.unflatten(1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, 1) for keys in (b, c))
    state, outputs = torch.zeros(shape.heads, shape.head_dim, shape.state_dim), []
    for t in range(len(rows)):
        decay, added = (weights.decay * steps[t]).exp(), steps[t, :, None] * x[t]
        state = decay[:, None, None] * state + added[:, :, None] * b[t][:, None]
        outputs.append(torch.einsum("hpn,hn->hp", state, c[t]) + skip[:, None] * x[t])
    y: torch.Tensor = torch.stack(outputs).flatten(1)
    gate: torch.Tensor = z * shape.gate_scale
    gate = gate.sigmoid() if shape.has_sigmoid_gates else gate * gate.sigmoid()
    if weights.norm is None:
        return y * gate
    parts = (y * gate if shape.is_gate_first else y).unflatten(1, (shape.norm_groups, -1))
    parts = parts / (parts.square().mean(-1, keepdim=True) + weights.norm.eps).sqrt()
    normed: torch.Tensor = parts.flatten(1) * weights.norm.weight
    return normed if shape.is_gate_first else normed * gate


def run_mamba1(
    shape: Mamba1Shape,
    weights: StateWeights,
    rows: torch.Tensor,
    project: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """Return the outputs of a Mamba 1 layer (arXiv 2312.00752, algorithm 2), each channel by itself:
    S_t = exp(A step_t) S_(t-1) + step_t x_t B_t and y_t = S_t C_t + D x_t."""
    assert weights.decay is not None and weights.step_bias is not None and weights.skip is not None
    mixed, gate = rows.split(shape.inner, 1)
    x = convolve_inputs(mixed, weights)
    x = x * x.sigmoid()
    parts = list(project(x, "state_parameters").split(shape.parameter_sizes, 1))
    for i, norm in enumerate(weights.parameter_norms):
        parts[i] = parts[i] / (parts[i].square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight
    step_rank, b, c = parts
    steps = torch.logaddexp(project(step_rank, "state_step") + weights.step_bias, torch.zeros(()))
    state, outputs = torch.zeros(shape.inner, shape.state_dim), []
    for t in range(len(rows)):
        decay = (weights.decay.t() * steps[t, :, None]).exp()
        state = decay * state + (steps[t] * x[t])[:, None] * b[t]
        outputs.append(state @ c[t] + weights.skip * x[t])
    y: torch.Tensor = torch.stack(outputs) * gate * gate.sigmoid()
    return y
