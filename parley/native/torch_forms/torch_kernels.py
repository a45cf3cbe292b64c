"""Linear layers, norms and element-wise kernels in torch operators.

Each has the signature of the compiled kernel of the same name, and the same guarantee: in bfloat16, a row's result has
the same bits in every batch. For oneDNN's linear layers this is true up to an inner dimension of 1024; beyond that,
oneDNN splits the sum depending on the number of rows. With AMX it does so for smaller ones too, so there it gets blocks
with an equal number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from parley.native.layer_shape import SWIGLU_ALPHA, SWIGLU_LIMIT, Norm
from parley.native.pool import LayerPages
from parley.native.torch_forms import torch_grouped, torch_int8
from parley.native.torch_forms.torch_attention import store_rows
from parley.native.torch_forms.torch_grouped import GroupedWeight
from parley.native.torch_forms.torch_int8 import TorchInt8Packed, TorchRows, pack_int8, quantize_rows

__all__ = [
    "TorchInt8Packed",
    "TorchPacked",
    "activate",
    "add_norm",
    "dequantize_rows",
    "embed_tokens",
    "linear",
    "lm_head_logits",
    "norm_rows",
    "pack_grouped",
    "pack_int8",
    "pack_weight",
    "quantize_rows",
    "rope_write",
    "scale_logits",
]

HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
AMX_BLOCK_ROWS = 32  # rows that oneDNN gets at once where it uses AMX


@dataclass(frozen=True)
class TorchPacked:
    """A linear layer's weight [out, in] in the layout of its kernel, and its bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    onednn: bool


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchPacked:
    """Pack a weight [out, in]. On the CPU, bfloat16 is copied into oneDNN's layout; other tensors are kept."""
    if weight.device.type in ("cpu", "meta") and weight.dtype == torch.bfloat16 and HAS_ONEDNN:
        packed = weight if weight.is_meta else torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return TorchPacked(packed, bias, True)
    return TorchPacked(weight, bias, False)


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> TorchPacked:
    """Pack a weight of 1 to 8 bits in groups for rows of ``dtype``. It is dequantized, which takes more memory."""
    return pack_weight(dequantize_rows(weight, dtype), bias)


def dequantize_rows(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a weight in groups, rounded to ``dtype``: [out, in]."""
    return torch_grouped.dequantize_grouped(weight).to(dtype)


def linear(x: torch.Tensor | TorchRows, packed: TorchPacked | TorchInt8Packed) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]. An int8 weight takes rows quantized or not."""
    if isinstance(packed, TorchInt8Packed):
        return torch_int8.linear_int8(x if isinstance(x, TorchRows) else quantize_rows(x), packed, packed.dtype)
    assert isinstance(x, torch.Tensor)
    if packed.onednn:
        return _linear_onednn(x, packed)
    return F.linear(x, packed.weight, packed.bias)


def _linear_onednn(x: torch.Tensor, packed: TorchPacked) -> torch.Tensor:
    if torch.cpu._is_amx_tile_supported() and len(x) != AMX_BLOCK_ROWS:
        blocks = x.split(AMX_BLOCK_ROWS)
        padded = [F.pad(block, (0, 0, 0, AMX_BLOCK_ROWS - len(block))) for block in blocks]
        return torch.cat([_linear_onednn(block, packed) for block in padded])[: len(x)]
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
    return result


def lm_head_logits(x: torch.Tensor | TorchRows, packed: TorchPacked | TorchInt8Packed) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, out]."""
    if isinstance(packed, TorchInt8Packed):
        return torch_int8.linear_int8(x if isinstance(x, TorchRows) else quantize_rows(x), packed, torch.float32)
    return linear(x, packed).float()


def norm_rows(x: torch.Tensor, norm: Norm | None, *, int8: bool = False) -> torch.Tensor | TorchRows:
    """Return the norm of x [T, hidden], computed in float32, or x itself without one; ``int8`` quantizes it."""
    rows = x if norm is None else _apply_norm(x, norm)
    return quantize_rows(rows) if int8 else rows


def _apply_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    rows = x.float()
    if norm.is_centered:
        rows = rows - rows.mean(-1, keepdim=True)
    rows = F.rms_norm(rows, norm.weight.shape[-1:], norm.weight, norm.eps)
    return (rows if norm.bias is None else rows.add_(norm.bias)).to(x.dtype)


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
    both [T, hidden].

    ``int8`` quantizes the norm. Without a norm the rows stay as they are.
    """
    if after is not None:
        x = _apply_norm(x, after)
    residual = torch.add(residual, x, alpha=scale) if scale != 1 else residual + x
    if total_scale != 1:
        residual *= total_scale
    return norm_rows(residual, norm, int8=int8), residual


def rotate_rows(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Return float32 rows [..., rotary], rotated as ``rope_write`` says."""
    half = rows.shape[-1] // 2
    partners = rows.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if is_interleaved else rows.roll(half, -1)
    return (rows * cos).add_(partners.mul_(sin))


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    indices: torch.Tensor,
    *,
    head_norm: Norm | None = None,
    has_whole_norm: bool = False,
    is_norm_late: bool = False,
    is_interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    has_normed_values: bool = False,
    is_query_only: bool = False,
) -> torch.Tensor:
    """Rotate the queries and keys in qkv [T, (heads + 2 * kv_heads) * dim], and store keys and values in the pages.

    Return the queries [T, heads, dim], a view of qkv, which is overwritten. cos and sin are float32 [T, 1, rotary]:
    dimension i is rotated with i + rotary / 2, or 2 i with 2 i + 1 if ``is_interleaved``; sin is negative at the first
    of both. Those beyond ``rotary`` are unchanged. ``head_norm`` [heads + kv_heads, dim]: the norm of each head before
    its rotation, or after it with ``is_norm_late``, or with ``has_whole_norm`` the RMS norm of all queries and of all
    keys of a token. ``query_scales`` float32 [T] multiply the rotated queries. ``has_normed_values``: each head's value
    gets an RMS norm without weights, with the eps of ``head_norm``. ``is_query_only``: qkv [T, heads * dim] and the
    norm are of queries alone, and nothing is stored.
    """
    kv_heads, dim = 0 if is_query_only else pool.page_format.layer.heads, pool.page_format.layer.dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
    rotary = cos.shape[-1]
    rotated_heads = qkv[:, : heads + kv_heads]
    float_heads = rotated_heads.float()
    if head_norm is not None and not is_norm_late:
        float_heads = _norm_heads(float_heads, head_norm, heads if has_whole_norm else None)
        if rotary < dim:
            rotated_heads[..., rotary:] = float_heads[..., rotary:]
    rotated_heads[..., :rotary] = rotate_rows(float_heads[..., :rotary], cos, sin, is_interleaved)
    if head_norm is not None and is_norm_late:
        rotated_heads.copy_(_norm_heads(rotated_heads.float(), head_norm, None))
    if query_scales is not None:
        qkv[:, :heads] = qkv[:, :heads].float() * query_scales[:, None, None]
    if has_normed_values and head_norm is not None:
        values = qkv[:, heads + kv_heads :]
        values.copy_(F.rms_norm(values.float(), (dim,), None, head_norm.eps))
    if not is_query_only:
        store_rows(qkv[:, heads:], pool, indices)
    return qkv[:, :heads]


def _norm_heads(x: torch.Tensor, norm: Norm, whole_after: int | None) -> torch.Tensor:
    """Return the norm of each head in float32 [T, heads, dim], or of the first ``whole_after`` and of all others."""
    if whole_after is not None:
        parts = x[:, :whole_after], x[:, whole_after:]
        return torch.cat([F.rms_norm(part, part.shape[1:], None, norm.eps) for part in parts], 1) * norm.weight
    if norm.is_centered:
        x = x - x.mean(-1, keepdim=True)
    x = F.rms_norm(x, x.shape[-1:], None, norm.eps).mul_(norm.weight)
    return x if norm.bias is None else x.add_(norm.bias)


_ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
    "clamped_swiglu": lambda x: _clamped_gate(x.float().clamp_max(SWIGLU_LIMIT)).to(x.dtype),
}


def _clamped_gate(gate: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(alpha * gate)."""
    return F.silu(gate * SWIGLU_ALPHA) / SWIGLU_ALPHA


def _xielu(x: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Return positive * x² above 0 and negative * (e^x - 1 - x) below, plus linear * x, with these ``factors``.
    Computed in float64, because the bits of float32's exponential function depend on a number's index in the tensor."""
    positive, negative, linear = factors
    double_x = x.double()
    curve = torch.where(
        double_x > 0, positive * double_x.square(), negative * (double_x.clamp_max(0).expm1() - double_x)
    )
    return (curve + linear * double_x).to(x.dtype)


def activate(
    rows: torch.Tensor, activation: str, *, is_gated: bool = True, factors: Sequence[float] = (), int8: bool = False
) -> torch.Tensor | TorchRows:
    """Return activation(gate) * up, where gate and up are the halves of [T, 2 * width], or the activation of all
    unless ``is_gated``: [T, width]; ``int8`` quantizes it. ``factors``: those of xielu."""
    gate, up = rows.chunk(2, -1) if is_gated else (rows, None)
    active = _xielu(gate, factors) if activation == "xielu" else _ACTIVATION_FUNCTIONS[activation](gate)
    if up is not None and activation == "clamped_swiglu":
        up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    if up is not None:
        active = active.mul_(up)
    return quantize_rows(active) if int8 else active


def scale_logits(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(scale * logits / cap), or scale * logits without a cap; float32 [R, V], overwritten."""
    return logits.mul_(scale) if cap is None else logits.mul_(scale / cap).tanh_().mul_(cap)


class EmbeddingRows(Protocol):
    """An embedding table [vocab, hidden]: a tensor, or an object that computes rows when needed."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def index_select(self, dim: int, index: torch.Tensor, /) -> torch.Tensor:
        """Return the rows of tokens [T, hidden] (``dim`` 0, int64 [T])."""


def embed_tokens(token_ids: torch.Tensor, table: EmbeddingRows) -> torch.Tensor:
    """Return rows of the embedding table [vocab, hidden]: [T, hidden]."""
    return table.index_select(0, token_ids)
