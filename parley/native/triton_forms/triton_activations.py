"""Activations of MLPs on a GPU. ``torch_kernels.activate`` defines them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parley.native.layer_shape import SWIGLU_ALPHA, SWIGLU_LIMIT
from parley.native.triton_forms.launch import NO_FUSION

BLOCK = 1024  # columns of a program
LIMIT, ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)
SQRT_HALF = tl.constexpr(0.7071067811865476)
TANH_SCALE, TANH_CUBE = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)


@dataclass(frozen=True)
class ActivationShape:
    """The constants of a kernel: rows have ``width`` numbers of the gate, and as many of up if there is a gate."""

    width: int
    block: int
    activation: str
    is_gated: bool


@triton.jit
def _activation(gate: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """Return the activation of float32 numbers."""
    if activation == "silu":
        return gate * tl.sigmoid(gate)
    if activation == "clamped_swiglu":
        gate = tl.minimum(gate, LIMIT)
        return gate * tl.sigmoid(gate * ALPHA)
    if activation == "relu":
        return tl.maximum(gate, 0.0)
    if activation == "relu2":
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    if activation == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))
    inner = TANH_SCALE * (gate + TANH_CUBE * gate * gate * gate)
    return gate * tl.sigmoid(2.0 * inner)  # (1 + tanh(x)) / 2


@triton.jit
def activate_numbers(
    gate: tl.tensor, up: tl.tensor, stored: tl.constexpr, activation: tl.constexpr, is_gated: tl.constexpr
) -> tl.tensor:
    """Return activation(gate) * up, or the activation of the gate alone; all float32, of numbers in dtype ``stored``.

    The activation is rounded to this dtype before the multiplication.
    """
    active = _activation(gate, activation)
    if is_gated:
        active = active.to(stored).to(tl.float32)
        if activation == "clamped_swiglu":
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        active *= up
    return active


@triton.jit
def _activate_kernel(rows: tl.tensor, out: tl.tensor, shape: tl.constexpr) -> None:
    columns = tl.program_id(1) * shape.block + tl.arange(0, shape.block)
    is_column = columns < shape.width
    row = tl.program_id(0).to(tl.int64)
    source = rows + row * (shape.width * (2 if shape.is_gated else 1)) + columns
    stored = rows.dtype.element_ty
    gate = tl.load(source, is_column, 0).to(tl.float32)
    up = tl.load(source + shape.width, is_column, 0).to(tl.float32) if shape.is_gated else gate
    active = activate_numbers(gate, up, stored, shape.activation, shape.is_gated)
    tl.store(out + row * shape.width + columns, active.to(stored), is_column)


def activate(rows: torch.Tensor, activation: str, *, is_gated: bool = True) -> torch.Tensor:
    """Return activation(gate) * up, where gate and up are the halves of [T, 2 * width], or the activation of all
    unless ``is_gated``: [T, width]."""
    count, width = len(rows), rows.shape[1] // (2 if is_gated else 1)
    shape = ActivationShape(width, min(BLOCK, triton.next_power_of_2(width)), activation, is_gated)
    out = rows.new_empty(count, width)
    _activate_kernel[(count, triton.cdiv(width, shape.block))](rows.contiguous(), out, shape, **NO_FUSION)
    return out
