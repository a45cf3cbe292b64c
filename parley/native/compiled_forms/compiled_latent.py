"""Calls the kernels of latent attention on bfloat16 rows, which ``rows.cpp`` and ``linear.cpp`` define."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from parley.native.packed import Bf16Packed
from parley.native.pool import LayerPages

P, N = ctypes.c_void_p, ctypes.c_int64
LATENT_SIGNATURES: dict[str, list[Any]] = {
    "linear_heads": [P, P, P, N, N, N, N, N],
    "join_queries": [P, P, N, P, P, P, N, N, N, N, N, N, N],
    "write_latents": [P, N, P, P, P, P, P, N, N, N, N, N, N],
}


def linear_heads(library: ctypes.CDLL, x: torch.Tensor, packed: Bf16Packed) -> torch.Tensor:
    """Return each head's rows times its own weight: x [T, heads, in] -> [heads, T, out]. Raises ValueError if ``in``
    differs."""
    rows = x.transpose(0, 1).contiguous()
    heads, count, in_features = rows.shape
    if in_features != packed.in_features or in_features % 2:
        raise ValueError(f"rows of {in_features} numbers for heads of {packed.in_features}")
    y = torch.empty(heads, count, packed.out_features, dtype=torch.bfloat16)
    sizes = count, heads, packed.out_features, in_features, torch.get_num_threads()
    library.linear_heads(rows.data_ptr(), packed.weight.data_ptr(), y.data_ptr(), *sizes)
    return y


def absorb_queries(
    library: ctypes.CDLL,
    queries: torch.Tensor,
    key_up: Bf16Packed,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool,
) -> torch.Tensor:
    """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary]."""
    queries, cos, sin = queries.contiguous(), cos.contiguous(), sin.contiguous()
    (count, heads, size), rotary = queries.shape, cos.shape[-1]
    latents = linear_heads(library, queries[..., : size - rotary], key_up)
    out = torch.empty(count, heads, key_up.out_features + rotary, dtype=torch.bfloat16)
    library.join_queries(
        latents.data_ptr(),
        queries.data_ptr(),
        heads * size,
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        count,
        heads,
        key_up.out_features,
        size - rotary,
        rotary,
        is_interleaved,
        torch.get_num_threads(),
    )
    return out


def write_latents(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    norm: Any,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    slots: torch.Tensor,
    *,
    is_interleaved: bool,
) -> None:
    """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both at ``slots`` as one key.

    ``norm``: a pointer to its struct.
    """
    rows, cos, sin, slots = rows.contiguous(), cos.contiguous(), sin.contiguous(), slots.contiguous()
    count, width = rows.shape
    rotary = cos.shape[-1]
    library.write_latents(
        rows.data_ptr(),
        width,
        norm,
        cos.data_ptr(),
        sin.data_ptr(),
        pool.data.data_ptr(),
        slots.data_ptr(),
        count,
        width - rotary,
        rotary,
        is_interleaved,
        pool.page_format.dtype == torch.int8,
        torch.get_num_threads(),
    )
