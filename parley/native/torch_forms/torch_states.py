"""Layers that keep a state, in torch operators. Their docstrings define the compiled kernels.

Tokens of a sequence are computed one after another, so the bits of a row depend neither on other rows nor on how a
sequence is cut into steps. ``spans`` int64 [S, 5]: for each span of a sequence, its first row, its count of rows, the
rows of ``states`` float32 [rows, size] that hold the state before it (-1: a state of zeros) and get the state after it,
which may be the same row, and 1 if it continues the sequence of the span before, whose last state is then its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, ShortConvolutionShape

QUERY_EPS = 1e-6  # of the L2 norms of queries and keys


class StateSpan(NamedTuple):
    """The rows of a span, and the state that they advance."""

    rows: slice
    state: torch.Tensor


def begin_spans(states: torch.Tensor, spans: torch.Tensor) -> Iterator[StateSpan]:
    """Yield the rows of each span, and its last state, which is its first one until it is advanced."""
    for first, count, source, target, _ in spans.tolist():
        state = states[target]
        if source < 0:
            state.zero_()
        elif source != target:
            state.copy_(states[source])
        yield StateSpan(slice(first, first + count), state)


def convolve_rows(rows: torch.Tensor, tail: torch.Tensor, weights: StateWeights) -> torch.Tensor:
    """Return the causal convolution of float32 rows [T, channels] that follow ``tail`` [kernel - 1, channels].

    ``tail`` becomes the last inputs.
    """
    inputs, kernel = torch.cat((tail, rows)), len(weights.convolution)
    total = inputs[: len(rows)] * weights.convolution[0]
    for i in range(1, kernel):
        total = total + inputs[i : i + len(rows)] * weights.convolution[i]
    tail.copy_(inputs[len(inputs) - kernel + 1 :])
    return total if weights.convolution_bias is None else total + weights.convolution_bias


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x) of float32 numbers. Computed in float64, because the bits of torch's exponential function
    in float32 differ at the end of a vector."""
    double_x = x.double()
    return (double_x * double_x.sigmoid()).float()


def scan_gated_delta(
    rows: torch.Tensor,
    gates: torch.Tensor,
    weights: StateWeights,
    shape: GatedDeltaShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule before the output layer: [T, inner], in the dtype of ``rows``.

    ``rows`` [T, channels + inner]: queries, keys and values of all heads, and the gates z of the outputs. ``gates``
    [T, 2 * value_heads]: b, and then a. Queries, keys and values pass the convolution and SiLU. With q and k divided by
    their L2 norms, and q by sqrt(key_dim), a head's state S [key_dim, value_dim] and output o become

        S = exp(decay * softplus(a + step_bias)) * S
        S = S + k (max_strength * sigmoid(b) * (v - k S))
        o = norm(q S) * silu(z)
    """
    assert weights.decay is not None and weights.step_bias is not None and weights.norm is not None
    out = rows.new_empty(len(rows), shape.inner)
    share = shape.value_heads // shape.key_heads
    for span in begin_spans(states, spans):
        state, tail = span.state.split([shape.recurrent_size, shape.size - shape.recurrent_size])
        state = state.view(shape.value_heads, shape.key_dim, shape.value_dim)
        inputs, z = rows[span.rows].float().split([shape.channels, shape.inner], 1)
        active = silu(convolve_rows(inputs, tail.view(-1, shape.channels), weights))
        q, k, v = (
            part.unflatten(1, (heads, -1))
            for part, heads in zip(
                active.split(shape.convolved_sizes, 1),
                (shape.key_heads, shape.key_heads, shape.value_heads),
                strict=True,
            )
        )
        q, k = (scale_to_unit(part).repeat_interleave(share, 1) for part in (q, k))
        b, a = gates[span.rows].double().chunk(2, 1)
        strength = shape.max_strength * b.sigmoid().float()[..., None]
        decay = (weights.decay.double() * F.softplus(a + weights.step_bias.double())).exp().float()[..., None, None]
        heads_out = apply_delta_rule(q / shape.key_dim**0.5, k, v, decay, strength, state)
        normed = F.rms_norm(heads_out, (shape.value_dim,), None, weights.norm.eps).flatten(1) * weights.norm.weight
        out[span.rows] = (normed * silu(z)).to(rows.dtype)
    return out


def scale_to_unit(heads: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [T, heads, dim] divided by their L2 norms."""
    return heads * (heads.square().sum(-1, keepdim=True) + QUERY_EPS).rsqrt()


def apply_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay_factors: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of tokens with these queries and keys [T, heads, key_dim] and values [T, heads, value_dim]:
    float32 [T, heads, value_dim]; advance the ``state`` [heads, key_dim, value_dim].

    ``decay_factors`` [T, heads, 1 or key_dim, 1]: the factor of the state before each token's change. ``strength`` [T,
    heads, 1]: the factor of that change.
    """
    q, k = q[..., None], k[..., None]
    outputs = torch.empty_like(v)
    for t in range(len(v)):
        state *= decay_factors[t]
        change = (v[t] - (state * k[t]).sum(1)) * strength[t]
        state += k[t] * change[:, None]
        outputs[t] = (state * q[t]).sum(1)
    return outputs


def scan_kimi_delta(
    rows: torch.Tensor, weights: StateWeights, shape: KimiDeltaShape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of Kimi Delta Attention before the output layer: [T, inner], in the dtype of ``rows``.

    ``rows`` [T, channels + heads + 2 * inner]: queries, keys and values of all heads, strengths b, numbers f of decays,
    and the gates z of the outputs. Queries, keys and values pass the convolution and SiLU. With q and k divided by
    their L2 norms, and q by sqrt(dim), a head's state S [dim, dim] and output o become

        a = exp(decay * softplus(f + step_bias))
        S = a S, each row of S times its own number
        S = S + k (sigmoid(b) * (v - k S))
        o = norm(q S) * sigmoid(z)

    With a ``lower_bound``, a = exp(lower_bound * sigmoid(-decay * (f + step_bias))).
    """
    assert weights.norm is not None
    out = rows.new_empty(len(rows), shape.inner)
    for span in begin_spans(states, spans):
        state, tail = span.state.split([shape.recurrent_size, shape.size - shape.recurrent_size])
        inputs, b, f, z = rows[span.rows].float().split(shape.row_sizes, 1)
        active = silu(convolve_rows(inputs, tail.view(-1, shape.channels), weights))
        q, k, v = (part.unflatten(1, (shape.heads, -1)) for part in active.chunk(3, 1))
        decay_factors = _decay_factors(f, weights, shape)[..., None]
        strength = b.double().sigmoid().float()[..., None]
        q, k, state = scale_to_unit(q) / shape.dim**0.5, scale_to_unit(k), state.view(shape.heads, shape.dim, -1)
        heads_out = apply_delta_rule(q, k, v, decay_factors, strength, state)
        normed = F.rms_norm(heads_out, (shape.dim,), None, weights.norm.eps).flatten(1) * weights.norm.weight
        out[span.rows] = (normed * z.double().sigmoid().float()).to(rows.dtype)
    return out


def _decay_factors(numbers: torch.Tensor, weights: StateWeights, shape: KimiDeltaShape) -> torch.Tensor:
    """Return the factor of each row of each head's state before a token's change: float32 [T, heads, dim]."""
    assert weights.decay is not None and weights.step_bias is not None
    steps = (numbers.double() + weights.step_bias.double()).unflatten(1, (shape.heads, -1))
    decay = weights.decay.double()[:, None]
    logs: torch.Tensor = decay * F.softplus(steps)
    if shape.lower_bound is not None:
        logs = shape.lower_bound * (-decay * steps).sigmoid()
    return logs.exp().float()


def convolve_gated(
    rows: torch.Tensor,
    weights: StateWeights,
    shape: ShortConvolutionShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return c * convolution(b * x) for rows [T, 3 * width] of b, c and x: [T, width], in the dtype of ``rows``."""
    out = rows.new_empty(len(rows), shape.width)
    for span in begin_spans(states, spans):
        b, c, x = rows[span.rows].float().chunk(3, 1)
        out[span.rows] = (c * convolve_rows(b * x, span.state.view(-1, shape.width), weights)).to(rows.dtype)
    return out


def gate_rows(rows: torch.Tensor, gates: torch.Tensor, *, has_softplus: bool = False) -> torch.Tensor:
    """Return rows * sigmoid(gates), or rows * softplus(gates): [T, width], in the dtype of ``rows``."""
    double_gates = gates.double()
    return (rows.float() * (F.softplus(double_gates) if has_softplus else double_gates.sigmoid()).float()).to(
        rows.dtype
    )
