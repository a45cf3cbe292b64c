"""The kernels of the CPU path, by name. One signature each; a row's bits never depend on the other rows.

This is the table: the model calls ``native.linear``, ``native.attend`` and so on, and what stands behind a name is
chosen here, per call. bfloat16 on the CPU goes to the compiled kernels where there are any; everything else (float32,
an accelerator, a machine without a compiler) goes to the torch forms, whose docstrings say what each kernel does.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from parley.native import compiled, library, torch_attention, torch_kernels
from parley.native.layout import LayerKV, Span
from parley.native.torch_attention import places, write
from parley.native.torch_int8 import Rows
from parley.native.torch_kernels import embed

Packed = compiled.Packed | compiled.Int8Packed | torch_kernels.Packed | torch_kernels.Int8Packed
Plan = compiled.Cut | list[torch_attention.Group]

__all__ = [
    "Packed",
    "Plan",
    "Rows",
    "add_rms_norm",
    "attend",
    "embed",
    "linear",
    "logits",
    "pack",
    "pack_int8",
    "places",
    "plan",
    "quantise",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "write",
]


@functools.cache
def _compiled() -> compiled.Kernels | None:
    found = library.load()
    return None if found is None else compiled.Kernels(found)


def _form(x: torch.Tensor) -> Any:
    """Where the kernels for such a tensor are."""
    form: compiled.Kernels | ModuleType | None = _compiled() if x.dtype == torch.bfloat16 and x.is_cpu else None
    return form or torch_kernels


def _reader(packed: Packed) -> Any:
    """Where the kernels for such a weight are."""
    return _compiled() if isinstance(packed, compiled.Packed | compiled.Int8Packed) else torch_kernels


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
    return _form(weight).pack(weight, bias)


def pack_int8(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Packed:
    """A weight int8 [out, in] with scales float32 [out], for rows of ``dtype``."""
    form: Any = (_compiled() if dtype == torch.bfloat16 and values.is_cpu else None) or torch_kernels
    return form.pack_int8(values, scales, bias, dtype)


def _int8(to: Packed | None) -> bool:
    """Whether that layer quantises its rows, so that the kernel before it can do so in the same pass."""
    return isinstance(to, compiled.Int8Packed | torch_kernels.Int8Packed)


def quantise(x: torch.Tensor) -> Rows:
    return _form(x).quantise(x)


def linear(x: torch.Tensor | Rows, packed: Packed) -> torch.Tensor:
    return _reader(packed).linear(x, packed)


def logits(x: torch.Tensor | Rows, packed: Packed) -> torch.Tensor:
    return _reader(packed).logits(x, packed)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, to: Packed | None = None) -> Any:
    """``to``: the layer that reads the result and nobody else does; it gets it as a tensor or as Rows."""
    return _form(x).rms_norm(x, weight, eps, int8=_int8(to))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, to: Packed | None = None
) -> tuple[Any, torch.Tensor]:
    return _form(x).add_rms_norm(x, residual, weight, eps, int8=_int8(to))


def silu_mul(gate_up: torch.Tensor, *, to: Packed | None = None) -> Any:
    return _form(gate_up).silu_mul(gate_up, int8=_int8(to))


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    *,
    head_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    return _form(qkv).rope_write(qkv, cos, sin, pages, places, head_norm=head_norm, eps=eps)


def plan(
    spans: list[Span],
    *,
    heads: int,
    layer: LayerKV,
    window: int | None,
    zero_page: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """How a batch's rows attend to pages of ``dtype``. One plan serves all layers of one shape."""
    kernels = _compiled() if dtype == torch.bfloat16 and device.type == "cpu" else None
    cut = kernels.plan(spans, heads=heads, layer=layer, window=window) if kernels else None
    return cut or torch_attention.plan(
        spans,
        heads=heads,
        kv_heads=layer.heads,
        dim=max(layer.dim, layer.value_dim),
        window=window,
        zero_page=zero_page,
        device=device,
    )


def attend(
    queries: torch.Tensor,
    pages: torch.Tensor,
    plan: Plan,
    *,
    scale: float,
    value_dim: int,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if isinstance(plan, compiled.Cut):
        kernels = _compiled()
        assert kernels is not None
        dtype, queries = queries.dtype, queries.to(pages.dtype)
        done = kernels.attend(queries, pages, plan, scale=scale, value_dim=value_dim, softcap=softcap, sinks=sinks)
        return done.to(dtype)
    return torch_attention.attend(queries, pages, plan, scale=scale, value_dim=value_dim, softcap=softcap, sinks=sinks)
