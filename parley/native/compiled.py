"""The compiled kernels behind the names of the table: bfloat16 on the CPU.

Each function has the meaning of its namesake in ``torch_kernels``, and the same promise without the limits: a row's
bits do not depend on other rows, nor on the number of threads. It knows no file; it is given a loaded library.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import compiled_int4, memory, torch_kernels
from parley.native.compiled_int4 import Int4Packed
from parley.native.layout import LayerKV, Span
from parley.native.torch_int4 import Grouped
from parley.native.torch_int8 import Rows

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "packed_size": [N, N],
    "pack": [P, P, N, N, N],
    "linear": [P, P, P, P, N, N, N, N, N],
    "add_rms_norm": [P, P, P, P, P, N, N, R, N],
    "silu_mul": [P, P, N, N, N],
    "max_dim": [],
    "rope_write": [P, P, P, P, P, P, R, N, N, N, N, N, N],
    "attend_dim": [],
    "attend_fold": [],
    "attend": [P, N, P, P, P, P, P, N, P, N, N, N, N, N, N, R, R, N],
    **compiled_int4.ARGUMENTS,
}
NUMBERS = ("packed_size", "max_dim", "attend_dim", "attend_fold", *compiled_int4.NUMBERS)  # what gives one


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight in the order that ``linear.cpp`` describes, for rows of ``into`` numbers."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: int
    into: int


@dataclass(frozen=True)
class Cut:
    """How a batch's attention is cut into units; int64 tensors as ``attention.cpp`` describes them."""

    spans: torch.Tensor  # [S, 4]
    table: torch.Tensor  # the spans' page tables, one behind the other
    units: torch.Tensor  # [U, 3]
    window: int | None


class Kernels:
    """The kernels of one library."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, N if name in NUMBERS else None
        self._c = library
        self._max_dim = library.max_dim()
        self._attend_dim, self._attend_fold = library.attend_dim(), library.attend_fold()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        out, into = weight.shape
        weight = weight.contiguous()
        packed = memory.mapped(self._c.packed_size(out, into), torch.bfloat16)
        self._c.pack(weight.data_ptr(), packed.data_ptr(), out, into, torch.get_num_threads())
        return Packed(packed, None if bias is None else bias.to(torch.bfloat16).contiguous(), out, into)

    def pack_int4(self, weight: Grouped, bias: torch.Tensor | None = None) -> Int4Packed:
        return compiled_int4.pack(self._c, weight, bias)

    def linear(self, x: torch.Tensor, packed: Packed | Int4Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.bfloat16)

    def logits(self, x: torch.Tensor, packed: Packed | Int4Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.float32)

    def _multiply(self, x: torch.Tensor, packed: Packed | Int4Packed, dtype: torch.dtype) -> torch.Tensor:
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
        norm = self._norm(0, x.contiguous(), 0, weight, eps)
        return torch_kernels.quantise(norm) if int8 else norm

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, int8: bool = False
    ) -> tuple[torch.Tensor | Rows, torch.Tensor]:
        x, total = x.contiguous(), torch.empty_like(x)
        norm = self._norm(x.data_ptr(), residual.contiguous(), total.data_ptr(), weight, eps)
        return torch_kernels.quantise(norm) if int8 else norm, total

    def _norm(self, x: int, residual: torch.Tensor, total: int, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(residual)
        width = weight.shape[0]
        rows = residual.numel() // width
        threads = torch.get_num_threads()
        self._c.add_rms_norm(
            x, residual.data_ptr(), total, weight.data_ptr(), out.data_ptr(), rows, width, eps, threads
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor, *, int8: bool = False) -> torch.Tensor | Rows:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=torch.bfloat16)
        self._c.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())
        return torch_kernels.quantise(out) if int8 else out

    def rope_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: torch.Tensor,
        places: torch.Tensor,
        *,
        head_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        kv_heads, dim = pages.shape[2], pages.shape[-1]
        if dim > self._max_dim:
            return torch_kernels.rope_write(qkv, cos, sin, pages, places, head_norm=head_norm, eps=eps)
        cos, sin, places = cos.contiguous(), sin.contiguous(), places.contiguous()
        rows, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
        self._c.rope_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            pages.data_ptr(),
            places.data_ptr(),
            0 if head_norm is None else head_norm.data_ptr(),
            eps,
            rows,
            heads,
            kv_heads,
            dim,
            cos.shape[-1],
            torch.get_num_threads(),
        )
        return qkv.view(rows, heads + 2 * kv_heads, dim)[:, :heads]

    def plan(self, spans: list[Span], *, heads: int, layer: LayerKV, window: int | None) -> Cut | None:
        """One plan serves all layers of one shape. None where the heads are of a kind that is not compiled."""
        fold = heads // layer.heads
        if layer.dim % 2 or max(layer.dim, layer.value_dim) > self._attend_dim or fold > self._attend_fold:
            return None
        tables: list[int] = []
        rows, units = [], []
        for i, span in enumerate(spans):
            rows.append((span.first, span.count, span.length, len(tables)))
            tables += span.table
            step = self._attend_fold // fold
            units += [(i, token, min(step, span.count - token)) for token in range(0, span.count, step)]
        # Backwards: what lies further back in a prompt takes longer, and should not be begun last.
        return Cut(torch.tensor(rows), torch.tensor(tables), torch.tensor(units[::-1]), window)

    def attend(
        self,
        queries: torch.Tensor,
        pages: torch.Tensor,
        cut: Cut,
        *,
        scale: float,
        value_dim: int,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        total, heads, dim = queries.shape
        if queries.stride()[1:] != (dim, 1):
            queries = queries.contiguous()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        out = torch.empty(total, heads, value_dim, dtype=torch.bfloat16)
        self._c.attend(
            queries.data_ptr(),
            queries.stride(0),
            pages.data_ptr(),
            out.data_ptr(),
            cut.spans.data_ptr(),
            cut.table.data_ptr(),
            cut.units.data_ptr(),
            cut.units.shape[0],
            0 if sinks is None else sinks.data_ptr(),
            heads,
            pages.shape[2],
            dim,
            pages.shape[-1],
            value_dim,
            cut.window or 0,
            scale,
            softcap or 0.0,
            torch.get_num_threads(),
        )
        return out
