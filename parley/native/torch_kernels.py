"""Linear layers, norms and element-wise kernels in torch operators.

Each has the signature that a native kernel of the same name has, and the same promise: on bfloat16 a row's result has
the same bits whatever other rows come with it. The oneDNN linear keeps it up to an inner dimension of 1024; beyond
that, oneDNN splits the sum by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import torch_int4, torch_int8
from parley.native.pool import Pool
from parley.native.torch_attention import store
from parley.native.torch_int4 import Grouped
from parley.native.torch_int8 import Int8Packed, Rows, pack_int8, quantise

__all__ = [
    "Int8Packed",
    "Packed",
    "add_rms_norm",
    "embed",
    "linear",
    "logits",
    "pack",
    "pack_int4",
    "pack_int8",
    "quantise",
    "rms_norm",
    "rope_write",
    "silu_mul",
]

ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight [out, in] in the form its kernel reads, and its bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    onednn: bool


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """Prepare a weight [out, in]. bfloat16 on CPU is laid out for oneDNN, a copy; otherwise the tensor is kept."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and ONEDNN:
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, True)
    return Packed(weight, bias, False)


def pack_int4(weight: Grouped, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
    """Prepare a weight of 4-bit integers for rows of ``dtype``: as what it stands for, which takes more memory."""
    return pack(torch_int4.widen(weight).to(dtype), bias)


def linear(x: torch.Tensor | Rows, packed: Packed | Int8Packed) -> torch.Tensor:
    """x [T, in] times the packed weight, plus bias: [T, out]. A weight in int8 takes its rows quantised or not."""
    if isinstance(packed, Int8Packed):
        return torch_int8.linear(x if isinstance(x, Rows) else quantise(x), packed, packed.dtype)
    assert isinstance(x, torch.Tensor)
    if packed.onednn:
        return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return F.linear(x, packed.weight, packed.bias)


def logits(x: torch.Tensor | Rows, packed: Packed | Int8Packed) -> torch.Tensor:
    """``linear`` for the head: float32 [T, out]."""
    if isinstance(packed, Int8Packed):
        return torch_int8.linear(x if isinstance(x, Rows) else quantise(x), packed, torch.float32)
    return linear(x, packed).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False) -> torch.Tensor | Rows:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; ``int8``: then quantised."""
    norm = F.rms_norm(x, weight.shape[-1:], weight, eps)
    return quantise(norm) if int8 else norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False
) -> tuple[torch.Tensor | Rows, torch.Tensor]:
    """The residual stream after adding x, and its norm: (norm, residual), both [T, hidden]."""
    residual = residual + x
    return rms_norm(residual, weight, eps, int8=int8), residual


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: Pool,
    places: torch.Tensor,
    *,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate the queries and keys in qkv [T, (heads + 2 * kv_heads) * dim], store keys and values: [T, heads, dim].

    Overwrites qkv; the result is a part of it. cos and sin are float32 [T, 1, rotary]: dimension i turns with
    i + rotary / 2, those beyond ``rotary`` stay as they are, and the first half of sin is negative. ``head_norm``
    float32 [heads + kv_heads, dim]: weights of an RMS norm of each head before it is rotated.
    """
    kv_heads, dim = pool.format.layer.heads, pool.format.layer.dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    rotary = cos.shape[-1]
    turning = qkv[:, : heads + kv_heads]
    wide = turning.float()
    if head_norm is not None:
        wide = F.rms_norm(wide, (dim,), None, eps).mul_(head_norm)
        if rotary < dim:
            turning[..., rotary:] = wide[..., rotary:]
    wide = wide[..., :rotary]
    torch.add(wide * cos, wide.roll(rotary // 2, -1).mul_(sin), out=turning[..., :rotary])
    store(qkv[:, heads:], pool, places)
    return qkv[:, :heads]


def silu_mul(gate_up: torch.Tensor, *, int8: bool = False) -> torch.Tensor | Rows:
    """silu(gate) * up, where gate and up are the halves of [T, 2 * width]: [T, width]; ``int8``: then quantised."""
    gate, up = gate_up.chunk(2, -1)
    active = F.silu(gate).mul_(up)
    return quantise(active) if int8 else active


def embed(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table [vocab, hidden]: [T, hidden]."""
    return table.index_select(0, token_ids)
