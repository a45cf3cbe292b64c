"""Linear layers, norms and element-wise kernels in torch operators.

Each has the signature of the compiled kernel of the same name, and the same promise: in bfloat16, a row's result has
the same bits in every batch. The oneDNN linear keeps it up to an inner dimension of 1024; beyond that, oneDNN splits
the sum depending on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import torch_grouped, torch_int8
from parley.native.pool import PagePool
from parley.native.torch_attention import store_rows
from parley.native.torch_grouped import GroupedWeight
from parley.native.torch_int8 import TorchInt8Packed, TorchRows, pack_int8, quantize_rows

__all__ = [
    "TorchInt8Packed",
    "TorchPacked",
    "add_rms_norm",
    "embed_tokens",
    "linear",
    "lm_head_logits",
    "pack_grouped",
    "pack_int8",
    "pack_weight",
    "quantize_rows",
    "rms_norm",
    "rope_write",
    "silu_mul",
]

HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class TorchPacked:
    """A linear layer's weight [out, in] in the layout of its kernel, and its bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    onednn: bool


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchPacked:
    """Pack a weight [out, in]. On the CPU, bfloat16 is copied into oneDNN's layout; other tensors are kept."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and HAS_ONEDNN:
        return TorchPacked(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, True)
    return TorchPacked(weight, bias, False)


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> TorchPacked:
    """Pack a weight of 4 or 8 bits in groups for rows of ``dtype``. It is dequantized, which takes more memory."""
    return pack_weight(torch_grouped.dequantize_grouped(weight).to(dtype), bias)


def linear(x: torch.Tensor | TorchRows, packed: TorchPacked | TorchInt8Packed) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]. An int8 weight takes rows quantized or not."""
    if isinstance(packed, TorchInt8Packed):
        return torch_int8.linear_int8(x if isinstance(x, TorchRows) else quantize_rows(x), packed, packed.dtype)
    assert isinstance(x, torch.Tensor)
    if packed.onednn:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return result
    return F.linear(x, packed.weight, packed.bias)


def lm_head_logits(x: torch.Tensor | TorchRows, packed: TorchPacked | TorchInt8Packed) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, out]."""
    if isinstance(packed, TorchInt8Packed):
        return torch_int8.linear_int8(x if isinstance(x, TorchRows) else quantize_rows(x), packed, torch.float32)
    return linear(x, packed).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False) -> torch.Tensor | TorchRows:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; ``int8`` quantizes it."""
    norm = F.rms_norm(x, weight.shape[-1:], weight, eps)
    return quantize_rows(norm) if int8 else norm


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False
) -> tuple[torch.Tensor | TorchRows, torch.Tensor]:
    """Add x to the residual stream. Return (its norm, the residual), both [T, hidden]; ``int8`` quantizes the norm."""
    residual = residual + x
    return rms_norm(residual, weight, eps, int8=int8), residual


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: PagePool,
    indices: torch.Tensor,
    *,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate the queries and keys in qkv [T, (heads + 2 * kv_heads) * dim], and store keys and values in the pages.

    Return the queries [T, heads, dim], a view of qkv, which is overwritten. cos and sin are float32 [T, 1, rotary]:
    dimension i turns with i + rotary / 2, those beyond ``rotary`` are unchanged, and the first half of sin is negative.
    ``head_norm`` float32 [heads + kv_heads, dim] holds the weights of an RMS norm of each head before its rotation.
    """
    kv_heads, dim = pool.page_format.layer.heads, pool.page_format.layer.dim
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
    store_rows(qkv[:, heads:], pool, indices)
    return qkv[:, :heads]


def silu_mul(gate_up: torch.Tensor, *, int8: bool = False) -> torch.Tensor | TorchRows:
    """Return silu(gate) * up, where gate and up are the halves of [T, 2 * width]: [T, width]; ``int8`` quantizes it."""
    gate, up = gate_up.chunk(2, -1)
    active = F.silu(gate).mul_(up)
    return quantize_rows(active) if int8 else active


def embed_tokens(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return rows of the embedding table [vocab, hidden]: [T, hidden]."""
    return table.index_select(0, token_ids)
