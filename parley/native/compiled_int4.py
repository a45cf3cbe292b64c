"""Calls ``int4.cpp``: linear layers on 4-bit weights and bfloat16 rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import memory
from parley.native.torch_int4 import GroupedWeight

P, N = ctypes.c_void_p, ctypes.c_int64
INT4_SIGNATURES = {
    "int4_size": [N, N, N],
    "int4_pack": [P, P, P, P, N, N, N, N],
    "int4_linear": [P, P, P, P, N, N, N, N, N, N],
}
INT4_RETURN_INT64 = ("int4_size",)  # functions that return an int64
INT4_UNIT = 8  # 4-bit numbers in a word: groups and rows are padded to multiples of it


@dataclass(frozen=True)
class Int4Packed:
    """A linear layer's weight in the layout that ``int4.cpp`` describes, for rows of ``into`` numbers.

    ``order`` int64 [into]: the permutation of a row's numbers that the packed weight needs, or None for no permutation.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None
    group: int
    out: int
    into: int


def pack_int4_weight(library: ctypes.CDLL, weight: GroupedWeight, bias: torch.Tensor | None) -> Int4Packed:
    """Pack a weight for ``multiply_int4``. Scales keep 20 of 24 bits, more than bfloat16 and float16 have.

    Raises ValueError if the group size is neither a multiple of 8 nor the whole row.
    """
    out, into = weight.values.shape
    group = weight.group if weight.group < into else into + -into % INT4_UNIT
    if group % INT4_UNIT:
        raise ValueError(f"groups of {group} numbers; only multiples of {INT4_UNIT} can be packed")
    values, zeros, scales = weight.values.contiguous(), weight.zeros.contiguous(), weight.scales.float().contiguous()
    packed = memory.map_tensor(library.int4_size(out, into, group), torch.int32)
    library.int4_pack(
        values.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        packed.data_ptr(),
        out,
        into,
        group,
        torch.get_num_threads(),
    )
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    return Int4Packed(packed, bias, weight.order, group, out, into)


def multiply_int4(library: ctypes.CDLL, x: torch.Tensor, packed: Int4Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return bfloat16 rows x [..., into] times the packed weight, plus bias: [..., out] in bfloat16 or float32."""
    into, out = packed.into, packed.out
    if x.shape[-1] != into:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a layer of {into}")
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    rows = F.pad(x, (0, -into % INT4_UNIT)) if into % INT4_UNIT else x.contiguous()
    y = torch.empty(*x.shape[:-1], out, dtype=dtype)
    library.int4_linear(
        rows.data_ptr(),
        packed.weight.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        y.data_ptr(),
        y.numel() // max(out, 1),
        out,
        into + -into % INT4_UNIT,
        packed.group,
        dtype == torch.float32,
        torch.get_num_threads(),
    )
    return y
