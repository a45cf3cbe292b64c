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
from parley.native.state_shape import GatedDeltaShape, ShortConvolutionShape

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
    """Return x * sigmoid(x) of float32 numbers. Through float64: torch's exponential function in float32 has other bits
    at the end of a vector."""
    wide = x.double()
    return (wide * wide.sigmoid()).float()


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
        S = S + k (most_strength * sigmoid(b) * (v - k S))
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
        q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + QUERY_EPS).rsqrt() for tensor in (q, k))
        q, k = (tensor.repeat_interleave(share, 1)[..., None] for tensor in (q / shape.key_dim**0.5, k))
        b, a = gates[span.rows].double().chunk(2, 1)
        strength = shape.most_strength * b.sigmoid().float()[..., None]
        decay = (weights.decay.double() * F.softplus(a + weights.step_bias.double())).exp().float()[..., None, None]
        heads_out = torch.empty_like(v)
        for t in range(len(v)):
            state *= decay[t]
            change = (v[t] - (state * k[t]).sum(1)) * strength[t]
            state += k[t] * change[:, None]
            heads_out[t] = (state * q[t]).sum(1)
        normed = F.rms_norm(heads_out, (shape.value_dim,), None, weights.norm.eps).flatten(1) * weights.norm.weight
        out[span.rows] = (normed * silu(z)).to(rows.dtype)
    return out


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


def gate_rows(rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return rows * sigmoid(gates): [T, width], in the dtype of ``rows``."""
    return (rows.float() * gates.double().sigmoid().float()).to(rows.dtype)
