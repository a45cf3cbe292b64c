"""The compiled kernels: bfloat16 on the CPU.

Each method does the same as the function of that name in ``torch_kernels``, and keeps its promise without limits: the
bits of a row depend neither on other rows nor on the number of threads. The caller loads the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from parley.native import compiled_int4, compiled_int8, compiled_lora, memory
from parley.native.compiled_int4 import Int4Packed
from parley.native.compiled_int8 import Int8Packed, Rows, room
from parley.native.layout import LayerKV, Span
from parley.native.lowrank import LowRank
from parley.native.pool import Format, Pool
from parley.native.torch_int4 import Grouped

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "packed_size": [N, N],
    "pack": [P, P, N, N, N],
    "linear": [P, P, P, P, N, N, N, N, N],
    "add_rms_norm": [P, P, P, P, P, P, P, P, N, N, R, N],
    "silu_mul": [P, P, P, P, P, N, N, N],
    "rope_write": [P, P, P, P, P, P, R, N, N, N, N, N, N, N],
    "write": [P, P, P, P, N, N, N, N, N, N],
    "argmax": [P, P, P, N, N, N],
    "top_k": [P, P, P, N, N, N, N],
    "totals": [P, P, P, N, N, N],
    "best": [P, P, N],
    "strike": [P, P, N],
    "attend_dim": [],
    "page_bytes": [N, N, N, N],
    "attend": [P, N, P, P, P, N, P, P, N, N, N, N, N, N, R, R, N],
    **compiled_int4.ARGUMENTS,
    **compiled_int8.ARGUMENTS,
    **compiled_lora.ARGUMENTS,
}
# Functions that return an int64.
NUMBERS = (
    "packed_size", "attend_dim", "page_bytes", "best",
    *compiled_int4.NUMBERS, *compiled_int8.NUMBERS, *compiled_lora.NUMBERS,
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight in the layout that ``linear.cpp`` describes, for rows of ``into`` numbers."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: int
    into: int


@dataclass(frozen=True)
class Cut:
    """The attention plan of a batch: int64 tensors as ``attention.cpp`` describes them."""

    spans: torch.Tensor  # [S, 4]
    table: torch.Tensor  # the page tables of all spans, concatenated
    window: int | None


def plan(spans: list[Span], window: int | None) -> Cut:
    """Plan the attention of a batch. One plan serves all layers with the same window."""
    rows: list[int] = []
    table: list[int] = []
    for span in spans:
        rows += (span.first, span.count, span.length, len(table))
        table += span.table
    # Through numpy, which converts lists three times as fast.
    spans_of, table_of = (torch.from_numpy(np.array(each, np.int64)) for each in (rows, table))
    return Cut(spans_of.view(-1, 4), table_of, window)


class Kernels:
    """The kernels of one library."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, N if name in NUMBERS else None
        self._c = library
        self.name = Path(library._name).name
        self._attend_dim = library.attend_dim()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        out, into = weight.shape
        weight = weight.contiguous()
        packed = memory.mapped(self._c.packed_size(out, into), torch.bfloat16)
        self._c.pack(weight.data_ptr(), packed.data_ptr(), out, into, torch.get_num_threads())
        return Packed(packed, None if bias is None else bias.to(torch.bfloat16).contiguous(), out, into)

    def pack_int8(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Int8Packed:
        return compiled_int8.pack(self._c, values, scales, bias)

    def pack_int4(self, weight: Grouped, bias: torch.Tensor | None = None) -> Int4Packed:
        return compiled_int4.pack(self._c, weight, bias)

    def adapter(self, sites: Sequence[Sequence[LowRank]]) -> compiled_lora.Adapter:
        return compiled_lora.Adapter(self._c, sites)

    def adapted(self, groups: Sequence[tuple[compiled_lora.Adapter, Sequence[int]]]) -> compiled_lora.Adapted:
        return compiled_lora.Adapted(self._c, groups)

    def quantise(self, x: torch.Tensor) -> Rows:
        return compiled_int8.quantise(self._c, x)

    def linear(self, x: torch.Tensor | Rows, packed: Packed | Int8Packed | Int4Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.bfloat16)

    def logits(self, x: torch.Tensor | Rows, packed: Packed | Int8Packed | Int4Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.float32)

    def _multiply(
        self, x: torch.Tensor | Rows, packed: Packed | Int8Packed | Int4Packed, dtype: torch.dtype
    ) -> torch.Tensor:
        if isinstance(packed, Int8Packed):
            return compiled_int8.multiply(self._c, x, packed, dtype)
        assert isinstance(x, torch.Tensor)
        if isinstance(packed, Int4Packed):
            return compiled_int4.multiply(self._c, x, packed, dtype)
        into, out = packed.into, packed.out
        if x.shape[-1] != into:
            raise ValueError(f"rows of {x.shape[-1]} numbers for a layer of {into}")
        rows = F.pad(x, (0, 1)) if into % 2 else x.contiguous()
        y = torch.empty(*x.shape[:-1], out, dtype=dtype)
        self._c.linear(
            rows.data_ptr(),
            packed.weight.data_ptr(),
            0 if packed.bias is None else packed.bias.data_ptr(),
            y.data_ptr(),
            y.numel() // max(out, 1),
            out,
            into + into % 2,
            dtype == torch.float32,
            torch.get_num_threads(),
        )
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False) -> torch.Tensor | Rows:
        return self._norm(0, x.contiguous(), 0, weight, eps, int8)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False
    ) -> tuple[torch.Tensor | Rows, torch.Tensor]:
        x, total = x.contiguous(), torch.empty_like(x)
        return self._norm(x.data_ptr(), residual.contiguous(), total.data_ptr(), weight, eps, int8), total

    def _norm(
        self, x: int, residual: torch.Tensor, total: int, weight: torch.Tensor, eps: float, int8: bool
    ) -> torch.Tensor | Rows:
        width = weight.shape[0]
        count = residual.numel() // width
        out, pointers = room(residual.shape, count, width, int8)
        threads = torch.get_num_threads()
        self._c.add_rms_norm(x, residual.data_ptr(), total, weight.data_ptr(), *pointers, count, width, eps, threads)
        return out

    def silu_mul(self, gate_up: torch.Tensor, *, int8: bool = False) -> torch.Tensor | Rows:
        gate_up = gate_up.contiguous()
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, pointers = room((count, width), count, width, int8)
        self._c.silu_mul(gate_up.data_ptr(), *pointers, count, width, torch.get_num_threads())
        return out

    def format(self, layer: LayerKV, dtype: torch.dtype) -> Format | None:
        """Return the format of pages of bfloat16 or int8, or None if the head dimension is not compiled."""
        if max(layer.dim, layer.value_dim) > self._attend_dim:
            return None
        size = self._c.page_bytes(layer.heads, layer.dim, layer.value_dim, dtype == torch.int8)
        return Format(layer, (size // dtype.itemsize,), dtype, True)

    def write(self, keys: torch.Tensor, values: torch.Tensor, pool: Pool, slots: torch.Tensor) -> None:
        layer, dtype = pool.format.layer, torch.bfloat16
        keys, values, slots = keys.to(dtype).contiguous(), values.to(dtype).contiguous(), slots.contiguous()
        self._c.write(
            keys.data_ptr(),
            values.data_ptr(),
            pool.data.data_ptr(),
            slots.data_ptr(),
            len(slots),
            layer.heads,
            layer.dim,
            layer.value_dim,
            pool.format.dtype == torch.int8,
            torch.get_num_threads(),
        )

    def rope_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: Pool,
        slots: torch.Tensor,
        *,
        head_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        kv_heads, dim = pool.format.layer.heads, pool.format.layer.dim
        cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
        rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
        self._c.rope_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            pool.data.data_ptr(),
            slots.data_ptr(),
            0 if head_norm is None else head_norm.data_ptr(),
            eps,
            rows,
            heads,
            kv_heads,
            dim,
            cos.shape[-1],
            pool.format.dtype == torch.int8,
            torch.get_num_threads(),
        )
        return qkv.view(rows, heads + 2 * kv_heads, dim)[:, :heads]

    def attend(
        self,
        queries: torch.Tensor,
        pool: Pool,
        cut: Cut,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layer = pool.format.layer
        dtype, queries = queries.dtype, queries.to(torch.bfloat16)
        rows, heads, dim = queries.shape
        if queries.stride()[1:] != (dim, 1):
            queries = queries.contiguous()
        out = torch.empty(rows, heads, layer.value_dim, dtype=torch.bfloat16)
        sinks = None if sinks is None else sinks.float().contiguous()
        self._c.attend(
            queries.data_ptr(),
            queries.stride(0),
            pool.data.data_ptr(),
            out.data_ptr(),
            cut.spans.data_ptr(),
            len(cut.spans),
            cut.table.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            heads,
            layer.heads,
            dim,
            layer.value_dim,
            pool.format.dtype == torch.int8,
            cut.window or 0,
            scale,
            softcap or 0.0,
            torch.get_num_threads(),
        )
        return out.to(dtype)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, (rows, vocab) = logits.contiguous(), logits.shape
        values, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._c.argmax(logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, vocab, threads)
        return values, ids

    def top_k(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of equal logits, those with the lowest ids are chosen and come first."""
        logits, (rows, vocab) = logits.contiguous(), logits.shape
        count = min(count, vocab)
        values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._c.top_k(logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, vocab, count, threads)
        return values, ids

    def totals(self, logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        logits, peaks, (rows, vocab) = logits.contiguous(), peaks.contiguous(), logits.shape
        sums = torch.empty(rows, dtype=torch.int64)
        threads = torch.get_num_threads()
        self._c.totals(logits.data_ptr(), peaks.data_ptr(), sums.data_ptr(), rows, vocab, threads)
        return sums

    def best(self, logits: torch.Tensor, bits: np.ndarray) -> int:
        assert logits.is_contiguous() and bits.flags.c_contiguous
        return self._c.best(logits.data_ptr(), bits.ctypes.data, len(logits))

    def strike(self, logits: torch.Tensor, bits: np.ndarray) -> None:
        assert logits.is_contiguous() and bits.flags.c_contiguous
        self._c.strike(logits.data_ptr(), bits.ctypes.data, len(logits))
