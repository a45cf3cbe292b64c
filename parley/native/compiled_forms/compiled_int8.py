"""Calls ``int8.cpp``: linear layers on int8 weights and int8 rows, both with scales."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parley.native import memory
from parley.native.torch_forms import torch_int8

P, N = ctypes.c_void_p, ctypes.c_int64
INT8_SIGNATURES = {
    "int8_size": [N, N],
    "int8_pack": [P, P, N, N, N],
    "int8_linear": [P, P, P, P, P, P, P, N, N, N, N, N],
    "quantize_rows": [P, P, P, P, N, N, N],
}
INT8_RETURN_INT64 = ("int8_size",)  # functions that return an int64
INT8_UNIT = 4  # numbers multiplied in one step: rows are padded to a multiple of it


class CompiledRows:
    """Same as ``TorchRows``, but in one allocation: a layer creates four of them, and each tensor costs time.

    Memory holds the scales, then ``excess`` (a per-row correction that ``int8.cpp`` needs), then the values, with rows
    zero-padded.
    """

    __slots__ = ("_memory", "count", "pointers", "width")

    def __init__(self, count: int, width: int):
        self.count, self.width = count, width + -width % INT8_UNIT
        self._memory = torch.empty(count * (self.width + 8), dtype=torch.int8)
        start = self._memory.data_ptr()
        self.pointers = start + 8 * count, start, start + 4 * count  # of values, scales, excess

    @property
    def values(self) -> torch.Tensor:
        """The rows' numbers, int8 [T, width padded to a multiple of INT8_UNIT]; a view of the allocation."""
        return self._memory[8 * self.count :].view(self.count, self.width)

    @property
    def scales(self) -> torch.Tensor:
        """The scale of each row, float32 [T]; a view of the allocation."""
        return self._memory[: 4 * self.count].view(torch.float32)

    @property
    def excess(self) -> torch.Tensor:
        """The correction of each row, int32 [T]; a view of the allocation."""
        return self._memory[4 * self.count : 8 * self.count].view(torch.int32)


@dataclass(frozen=True)
class Int8Packed:
    """A linear layer's weight in the layout that ``int8.cpp`` describes, and the scales of its outputs."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int


def pack_int8_pieces(
    library: ctypes.CDLL,
    pieces: Sequence[tuple[int, torch.Tensor]],
    scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> Int8Packed:
    """Pack a weight int8 [out, in] with scales [out] for ``multiply_int8``. ``pieces``: as ``join_to_panels`` returns.

    Raises ValueError if ``in`` is above 2^17.
    """
    out_features, in_features = len(scales), torch_int8.check_int8_shape(pieces[0][1])[1]
    packed = memory.map_tensor(library.int8_size(out_features, in_features), torch.uint8, pieces[0][1].device)
    for first, values in [] if packed.is_meta else pieces:
        destination = packed[library.int8_size(first, in_features) :]
        library.int8_pack(values.data_ptr(), destination.data_ptr(), len(values), in_features, torch.get_num_threads())
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    return Int8Packed(packed, scales.float().contiguous(), bias, out_features, in_features)


def quantize_bf16(library: ctypes.CDLL, x: torch.Tensor) -> CompiledRows:
    """Quantize bfloat16 rows [T, width] to int8."""
    x = x.contiguous()
    count, width = x.shape
    rows = CompiledRows(count, width)
    library.quantize_rows(x.data_ptr(), *rows.pointers, count, width, torch.get_num_threads())
    return rows


def multiply_int8(
    library: ctypes.CDLL, x: torch.Tensor | CompiledRows, packed: Int8Packed, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows x [T, in_features], quantized or not, times the packed weight, plus bias: [T, out_features],
    bfloat16 or float32."""
    rows = x if isinstance(x, CompiledRows) else quantize_bf16(library, x)
    if rows.width != packed.in_features + -packed.in_features % INT8_UNIT:
        raise ValueError(f"rows of {rows.width} numbers for a layer of {packed.in_features}")
    y = torch.empty(rows.count, packed.out_features, dtype=dtype)
    library.int8_linear(
        *rows.pointers,
        packed.weight.data_ptr(),
        packed.scales.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        y.data_ptr(),
        rows.count,
        packed.out_features,
        rows.width,
        dtype == torch.float32,
        torch.get_num_threads(),
    )
    return y


def allocate_output(
    shape: Sequence[int], count: int, width: int, int8: bool
) -> tuple[torch.Tensor | CompiledRows, tuple[int, ...]]:
    """Allocate the output of a kernel that can quantize its result. Return it with the kernel's four pointers."""
    if int8:
        rows = CompiledRows(count, width)
        return rows, (0, *rows.pointers)
    output = torch.empty(shape, dtype=torch.bfloat16)
    return output, (output.data_ptr(), 0, 0, 0)
