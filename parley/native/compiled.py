"""The compiled kernels behind the names of the table: bfloat16 on the CPU.

Each function has the meaning of its namesake in ``torch_kernels``, and the same promise without the limits: a row's
bits do not depend on other rows, nor on the number of threads. It knows no file; it is given a loaded library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import memory, torch_int8, torch_kernels
from parley.native.layout import LayerKV, Span
from parley.native.torch_int8 import Rows

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "packed_size": [N, N],
    "pack": [P, P, N, N, N],
    "linear": [P, P, P, P, N, N, N, N, N],
    "packed_size_int8": [N, N],
    "pack_int8": [P, P, N, N, N],
    "linear_int8": [P, P, P, P, P, P, P, N, N, N, N, N],
    "quantise": [P, P, P, P, N, N, N],
    "add_rms_norm": [P, P, P, P, P, P, P, P, N, N, R, N],
    "silu_mul": [P, P, P, P, P, N, N, N],
    "max_dim": [],
    "rope_write": [P, P, P, P, P, P, R, N, N, N, N, N, N],
    "attend_dim": [],
    "attend_fold": [],
    "attend": [P, N, P, P, P, P, P, N, P, N, N, N, N, N, N, R, R, N],
}
NUMBERS = ("packed_size", "packed_size_int8", "max_dim", "attend_dim", "attend_fold")  # what gives one


@dataclass(frozen=True)
class Packed:
    """A linear layer's weight in the order that ``linear.cpp`` describes, for rows of ``into`` numbers."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: int
    into: int


@dataclass(frozen=True)
class Int8Packed:
    """The same on int8, in the order that ``int8.cpp`` describes, and the scales of its outputs."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    out: int
    into: int


def _rows(count: int, width: int) -> tuple[Rows, tuple[int, int, int]]:
    """Room for quantised rows, and where it is."""
    values = torch.empty(count, width + -width % 4, dtype=torch.int8)
    scales, excess = torch.empty(count), torch.empty(count, dtype=torch.int32)
    return Rows(values, scales, excess), (values.data_ptr(), scales.data_ptr(), excess.data_ptr())


def _out(shape: Sequence[int], count: int, width: int, int8: bool) -> tuple[torch.Tensor | Rows, tuple[int, ...]]:
    """Room for the result of a kernel that can quantise it, and the four pointers that say where it is."""
    if int8:
        rows, pointers = _rows(count, width)
        return rows, (0, *pointers)
    plain = torch.empty(shape, dtype=torch.bfloat16)
    return plain, (plain.data_ptr(), 0, 0, 0)


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

    def pack_int8(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Int8Packed:
        out, into = torch_int8.check(values)
        values = values.contiguous()
        packed = memory.mapped(self._c.packed_size_int8(out, into), torch.uint8)
        self._c.pack_int8(values.data_ptr(), packed.data_ptr(), out, into, torch.get_num_threads())
        bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        return Int8Packed(packed, scales.float().contiguous(), bias, out, into)

    def quantise(self, x: torch.Tensor) -> Rows:
        x = x.contiguous()
        count, width = x.shape
        rows, pointers = _rows(count, width)
        self._c.quantise(x.data_ptr(), *pointers, count, width, torch.get_num_threads())
        return rows

    def linear(self, x: torch.Tensor | Rows, packed: Packed | Int8Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.bfloat16)

    def logits(self, x: torch.Tensor | Rows, packed: Packed | Int8Packed) -> torch.Tensor:
        return self._multiply(x, packed, torch.float32)

    def _multiply(self, x: torch.Tensor | Rows, packed: Packed | Int8Packed, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(packed, Int8Packed):
            return self._multiply_int8(x if isinstance(x, Rows) else self.quantise(x), packed, dtype)
        assert isinstance(x, torch.Tensor)
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

    def _multiply_int8(self, rows: Rows, packed: Int8Packed, dtype: torch.dtype) -> torch.Tensor:
        count, width = rows.values.shape
        if width != packed.into + -packed.into % 4 or rows.excess is None:
            raise ValueError(f"rows of {width} numbers for a layer of {packed.into}")
        y = torch.empty(count, packed.out, dtype=dtype)
        self._c.linear_int8(
            rows.values.data_ptr(),
            rows.scales.data_ptr(),
            rows.excess.data_ptr(),
            packed.weight.data_ptr(),
            packed.scales.data_ptr(),
            0 if packed.bias is None else packed.bias.data_ptr(),
            y.data_ptr(),
            count,
            packed.out,
            width,
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
        out, pointers = _out(residual.shape, count, width, int8)
        threads = torch.get_num_threads()
        self._c.add_rms_norm(x, residual.data_ptr(), total, weight.data_ptr(), *pointers, count, width, eps, threads)
        return out

    def silu_mul(self, gate_up: torch.Tensor, *, int8: bool = False) -> torch.Tensor | Rows:
        gate_up = gate_up.contiguous()
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, pointers = _out((count, width), count, width, int8)
        self._c.silu_mul(gate_up.data_ptr(), *pointers, count, width, torch.get_num_threads())
        return out

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
