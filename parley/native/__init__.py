"""The kernel table: one function per kernel of the CPU path. The bits of a row never depend on the other rows.

The model calls ``native.linear``, ``native.attend`` and so on; this module chooses the implementation at each call.
bfloat16 on the CPU runs on the compiled kernels, if there are any. Everything else (float32, an accelerator, a machine
without a compiler) runs on the torch implementations, whose docstrings define each kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from parley.native import (
    compiled,
    compiled_int8,
    compiled_lora,
    library,
    torch_attention,
    torch_int8,
    torch_kernels,
    torch_lora,
    torch_vocabulary,
)
from parley.native.compiled_int8 import Int8Packed
from parley.native.compiled_layers import Stack
from parley.native.layer import Layer
from parley.native.layout import LayerKV, Span
from parley.native.lowrank import LowRank
from parley.native.packed import COMPILED, Packed
from parley.native.pool import Format, Pool
from parley.native.torch_int4 import Grouped, round_int4, widen
from parley.native.torch_kernels import embed

Rows = torch_int8.Rows | compiled_int8.Rows
Plan = compiled.Cut | list[torch_attention.Group]
Adapter = compiled_lora.Adapter | torch_lora.Adapter
Adapted = compiled_lora.Adapted | torch_lora.Adapted

__all__ = [
    "Adapted",
    "Adapter",
    "Format",
    "Grouped",
    "Layer",
    "LowRank",
    "Packed",
    "Plan",
    "Pool",
    "Rows",
    "Stack",
    "adapted",
    "adapter",
    "add_rms_norm",
    "argmax",
    "attend",
    "best",
    "embed",
    "format",
    "identity",
    "linear",
    "logits",
    "pack",
    "pack_int4",
    "pack_int8",
    "places",
    "plan",
    "quantise",
    "rms_norm",
    "rope_write",
    "round_int4",
    "silu_mul",
    "stack",
    "strike",
    "top_k",
    "totals",
    "widen",
    "write",
]


@functools.cache
def _compiled() -> compiled.Kernels | None:
    found = library.load()
    return None if found is None else compiled.Kernels(found)


def _form(x: torch.Tensor) -> Any:
    """Return the implementation of the kernels for tensors of this dtype and device."""
    form: compiled.Kernels | ModuleType | None = _compiled() if x.dtype == torch.bfloat16 and x.is_cpu else None
    return form or torch_kernels


def _reader(packed: Packed) -> Any:
    """Return the implementation that packed this weight."""
    return _compiled() if isinstance(packed, COMPILED) else torch_kernels


def identity() -> str | None:
    """Return a name for the layout of packed weights, or None if torch decides it."""
    kernels = _compiled()
    return None if kernels is None else kernels.name


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    """Pack a weight [out, in], and its bias [out], for ``linear``."""
    return _form(weight).pack(weight, bias)


def pack_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
    """Pack a weight int8 [out, in] with scales float32 [out], for rows of ``dtype``."""
    form: Any = (_compiled() if dtype == torch.bfloat16 and values.is_cpu else None) or torch_kernels
    return form.pack_int8(values, scales, bias, dtype)


def pack_int4(weight: Grouped, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
    """Pack a weight of 4-bit integers, for rows of ``dtype``."""
    kernels = _compiled() if dtype == torch.bfloat16 and weight.values.is_cpu else None
    return kernels.pack_int4(weight, bias) if kernels else torch_kernels.pack_int4(weight, bias, dtype)


def _int8(to: Packed | None) -> bool:
    """Whether this layer takes int8 rows, so that the kernel before it can quantize them in the same pass."""
    return isinstance(to, Int8Packed | torch_kernels.Int8Packed)


def quantise(x: torch.Tensor) -> Rows:
    """Quantize rows [T, width] to int8, with one scale per row."""
    return _form(x).quantise(x)


def linear(x: torch.Tensor | Rows, packed: Packed) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]."""
    return _reader(packed).linear(x, packed)


def logits(x: torch.Tensor | Rows, packed: Packed) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, vocab]."""
    return _reader(packed).logits(x, packed)


def adapter(sites: Sequence[Sequence[LowRank]], dtype: torch.dtype, device: torch.device) -> Adapter:
    """Pack a LoRA adapter for rows of ``dtype``: ``sites`` holds its parts for each linear layer, by number."""
    kernels = _compiled() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return kernels.adapter(sites) if kernels else torch_lora.Adapter(sites, dtype, device)


def adapted(groups: Sequence[tuple[Any, Sequence[int]]], device: torch.device) -> Adapted:
    """Assign adapters to rows of a batch. Call ``add_lora`` of the result after each linear layer."""
    if groups and isinstance(groups[0][0], torch_lora.Adapter):
        return torch_lora.Adapted(groups, device)
    kernels = _compiled()
    assert kernels is not None
    return kernels.adapted(groups)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, to: Packed | None = None) -> Any:
    """RMS norm of x. If ``consumer``, the only layer that reads the result, takes int8, the result is quantized."""
    return _form(x).rms_norm(x, weight, eps, int8=_int8(to))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, to: Packed | None = None
) -> tuple[Any, torch.Tensor]:
    """Return (RMS norm of residual + x, residual + x). ``consumer`` is that of ``rms_norm``."""
    return _form(x).add_rms_norm(x, residual, weight, eps, int8=_int8(to))


def silu_mul(gate_up: torch.Tensor, *, to: Packed | None = None) -> Any:
    """Return silu(gate) * up for gate_up [T, 2 * width]. ``consumer`` is that of ``rms_norm``."""
    return _form(gate_up).silu_mul(gate_up, int8=_int8(to))


def format(layer: LayerKV, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> Format:
    """Choose the page layout of a layer, for a model of ``dtype``. All functions below depend on it.

    ``int8``: keys and values are stored as int8, with one scale per token and head.
    """
    stored = torch.int8 if int8 else dtype
    kernels = _compiled() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return (kernels and kernels.format(layer, stored)) or torch_attention.format(layer, stored)


def _tiled(pool: Pool) -> compiled.Kernels | None:
    """Return the compiled kernels if they own the pages, else None."""
    return _compiled() if pool.format.tiled else None


def places(slots: torch.Tensor, format: Format) -> torch.Tensor:
    """Convert slots (page * BLOCK_SIZE + offset, int64 [T]) into the indices that ``write_kv`` takes."""
    return slots if format.tiled else torch_attention.places(slots, format.layer.heads)


def write(keys: torch.Tensor, values: torch.Tensor, pool: Pool, places: torch.Tensor) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim]."""
    (_tiled(pool) or torch_attention).write(keys, values, pool, places)


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
    """Rotate queries and keys in ``qkv``, and store keys and values in the pages. Return the queries."""
    form = _tiled(pool) or torch_kernels
    return form.rope_write(qkv, cos, sin, pool, places, head_norm=head_norm, eps=eps)


def plan(
    spans: list[Span],
    *,
    heads: int,
    format: Format,
    window: int | None,
    zero_page: int,
    device: torch.device,
) -> Plan:
    """Plan the attention of a batch. One plan serves all layers of the same page format, head count and window."""
    if format.tiled:
        return compiled.plan(spans, window)
    layer = format.layer
    return torch_attention.plan(
        spans,
        heads=heads,
        kv_heads=layer.heads,
        dim=format.shape[-1],
        window=window,
        zero_page=zero_page,
        device=device,
    )


def attend(
    queries: torch.Tensor,
    pool: Pool,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, key_dim] over the pages: [T, heads, value_dim]."""
    form: Any = _tiled(pool) or torch_attention
    return form.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks)


def stack(
    layers: Sequence[Layer],
    embedding: torch.Tensor,
    norm: torch.Tensor,
    angles: torch.Tensor,
    heads: int,
    kv: LayerKV,
    *,
    eps: float,
    scale: float,
) -> Stack | None:
    """Return one kernel for the embedding and all layers, or None if these layers must run kernel by kernel.

    ``embedding`` [vocab, hidden] is applied before the layers, ``norm`` [hidden] after the last. ``angles`` float32
    [positions, 2, rotary / 2] holds cosines and sines.
    """
    found = library.load()
    if found is None or not Stack.takes(layers) or not format(kv, torch.bfloat16, norm.device).tiled:
        return None
    return Stack(
        found, layers, embedding, norm, angles, heads=heads, kv_heads=kv.heads, dim=kv.dim, eps=eps, scale=scale
    )


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row and its id."""
    return _vocabulary(logits).argmax(logits)


def top_k(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row, descending, and their ids."""
    return _vocabulary(logits).top_k(logits, count)


def totals(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's integer softmax weights. ``peaks`` [R] holds the largest logits."""
    return _vocabulary(logits).totals(logits, peaks)


def best(logits: torch.Tensor, bits: np.ndarray) -> int:
    """Return the id of the largest logit whose bit is 1. logits [V]; bits uint8 [V / 8 or more], low bit first."""
    return _vocabulary(logits).best(logits, bits)


def strike(logits: torch.Tensor, bits: np.ndarray) -> None:
    """Set the logits whose bit is 0 to -inf, in place. Shapes as in ``masked_argmax``."""
    _vocabulary(logits).strike(logits, bits)


def _vocabulary(logits: torch.Tensor) -> Any:
    return (_compiled() if logits.is_cpu and logits.dtype == torch.float32 else None) or torch_vocabulary
