"""The kernels for GPUs, under the names and with the signatures of the torch forms. Imports Triton.

Rows are bfloat16 or float16. An operator that has no kernel here runs in its torch form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley.native.layer_shape import Norm
from parley.native.torch_forms import torch_kernels
from parley.native.torch_forms.torch_grouped import GroupedWeight
from parley.native.torch_forms.torch_int8 import TorchRows
from parley.native.torch_forms.torch_kernels import TorchPacked
from parley.native.triton_forms import triton_activations, triton_grouped, triton_int8, triton_linear, triton_norms
from parley.native.triton_forms.triton_attention import attend
from parley.native.triton_forms.triton_experts import linear_heads, mix_experts
from parley.native.triton_forms.triton_grouped import piece_width
from parley.native.triton_forms.triton_int8 import pack_int8, quantize_rows
from parley.native.triton_forms.triton_latent import absorb_queries, write_latents
from parley.native.triton_forms.triton_packed import TritonGroupedPacked, TritonInt8Packed, TritonPacked
from parley.native.triton_forms.triton_rope import rope_write
from parley.native.triton_forms.triton_streams import match_sizes, sparsify_gates

__all__ = [
    "absorb_queries",
    "activate",
    "add_norm",
    "attend",
    "linear",
    "linear_heads",
    "lm_head_logits",
    "match_sizes",
    "mix_experts",
    "norm_rows",
    "pack_grouped",
    "pack_int8",
    "pack_weight",
    "quantize_rows",
    "rope_write",
    "sparsify_gates",
    "write_latents",
]


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> TritonPacked | TorchPacked:
    """Pack a weight [out, in] for Triton's product, or for cuBLAS's where that is used (``uses_cublas``)."""
    if triton_linear.uses_cublas(weight.device):
        return torch_kernels.pack_weight(weight, bias)
    return TritonPacked(weight.contiguous(), bias)


def pack_grouped(
    weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> TritonGroupedPacked | TritonPacked | TorchPacked:
    """Pack a weight of 4 or 8 bits in groups for rows of ``dtype``. Others, and groups that are too small, are
    dequantized."""
    if piece_width(weight):
        return triton_grouped.pack_grouped(weight, bias)
    return pack_weight(torch_kernels.dequantize_rows(weight, dtype), bias)


def linear(x: torch.Tensor | TorchRows, packed: TritonPacked | TritonInt8Packed | TritonGroupedPacked) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]. An int8 weight takes rows quantized or not."""
    return _multiply(x, packed, None)


def lm_head_logits(
    x: torch.Tensor | TorchRows, packed: TritonPacked | TritonInt8Packed | TritonGroupedPacked
) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, out]."""
    return _multiply(x, packed, torch.float32)


def _multiply(
    x: torch.Tensor | TorchRows,
    packed: TritonPacked | TritonInt8Packed | TritonGroupedPacked,
    result: torch.dtype | None,
) -> torch.Tensor:
    if isinstance(packed, TritonInt8Packed):
        return triton_int8.multiply_int8(x, packed, result or packed.dtype)
    assert isinstance(x, torch.Tensor)
    if isinstance(packed, TritonGroupedPacked):
        return triton_grouped.multiply_grouped(x, packed, result or x.dtype)
    return triton_linear.multiply_rows(x, packed, result or x.dtype)


def norm_rows(x: torch.Tensor, norm: Norm | None, *, int8: bool = False) -> torch.Tensor | TorchRows:
    """Return the norm of x [T, hidden], computed in float32, or x itself without one; ``int8`` quantizes it."""
    rows = triton_norms.norm_rows(x, norm)
    return quantize_rows(rows) if int8 else rows


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    after: Norm | None = None,
    scale: float = 1.0,
    total_scale: float = 1.0,
    int8: bool = False,
) -> tuple[torch.Tensor | TorchRows, torch.Tensor]:
    """Add scale * after(x) to the residual stream, and multiply it by ``total_scale``. Return (its norm, the residual),
    both [T, hidden]."""
    rows, residual = triton_norms.add_norm(x, residual, norm, after=after, scale=scale, total_scale=total_scale)
    return quantize_rows(rows) if int8 else rows, residual


def activate(
    rows: torch.Tensor, activation: str, *, is_gated: bool = True, factors: Sequence[float] = (), int8: bool = False
) -> torch.Tensor | TorchRows:
    """Return activation(gate) * up, where gate and up are the halves of [T, 2 * width]: [T, width]. xielu is torch's
    form, with ``factors``."""
    if activation == "xielu":
        return torch_kernels.activate(rows, activation, is_gated=is_gated, factors=factors, int8=int8)
    active = triton_activations.activate(rows, activation, is_gated=is_gated)
    return quantize_rows(active) if int8 else active
