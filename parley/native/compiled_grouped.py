"""Calls ``grouped.cpp``: linear layers on weights of 4 or 8 bits in groups, and bfloat16 rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.native import memory
from parley.native.torch_forms.torch_grouped import GroupedWeight

P, N = ctypes.c_void_p, ctypes.c_int64
GROUPED_SIGNATURES = {
    "grouped_size": [N, N, N, N],
    "grouped_pack": [N, P, P, P, P, N, N, N, N],
    "grouped_linear": [N, P, P, P, P, P, N, N, N, N, N, N],
}
GROUPED_RETURN_INT64 = ("grouped_size",)  # functions that return an int64
GROUPED_CODES = ("int4", "int8", "e4m3", "e2m1")  # numbered as in grouped.cpp
GROUPED_UNIT = 8  # groups and rows are padded to multiples of it


@dataclass(frozen=True)
class GroupedPacked:
    """A linear layer's weight in the layout that ``grouped.cpp`` describes, for rows of ``into`` numbers.

    ``scales`` float32 [out]: what outputs are multiplied by, besides the scales of groups; or None.
    ``order`` int64 [into]: the permutation of a row's numbers that the packed weight needs, or None for no permutation.
    """

    code: str
    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None
    group: int
    out: int
    into: int


def pack_grouped_weight(library: ctypes.CDLL, weight: GroupedWeight, bias: torch.Tensor | None) -> GroupedPacked:
    """Pack a weight for ``multiply_grouped``.

    Scales of 4-bit integers keep 20 of 24 bits, those of 8-bit integers 16: more than bfloat16 and float16 have.
    Raises ValueError if the group size is neither a multiple of 8 nor the whole row, or if scales of e2m1 are not
    numbers of bfloat16.
    """
    out, into = weight.values.shape
    group = weight.group if weight.group < into else into + -into % GROUPED_UNIT
    if group % GROUPED_UNIT:
        raise ValueError(f"groups of {group} numbers; only multiples of {GROUPED_UNIT} can be packed")
    if weight.code == "e2m1" and not torch.equal(weight.scales.float(), weight.scales.bfloat16().float()):
        raise ValueError("scales of e2m1 that bfloat16 does not have")
    code = GROUPED_CODES.index(weight.code)
    values, scales = weight.values.contiguous(), weight.scales.float().contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    packed = memory.map_tensor(library.grouped_size(code, out, into, group), torch.int32)
    library.grouped_pack(
        code,
        values.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        packed.data_ptr(),
        out,
        into,
        group,
        torch.get_num_threads(),
    )
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    out_scales = None if weight.out_scales is None else weight.out_scales.float().contiguous()
    return GroupedPacked(weight.code, packed, out_scales, bias, weight.order, group, out, into)


def multiply_grouped(library: ctypes.CDLL, x: torch.Tensor, packed: GroupedPacked, dtype: torch.dtype) -> torch.Tensor:
    """Return bfloat16 rows x [..., into] times the packed weight, plus bias: [..., out] in bfloat16 or float32."""
    into, out = packed.into, packed.out
    if x.shape[-1] != into:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a layer of {into}")
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    rows = F.pad(x, (0, -into % GROUPED_UNIT)) if into % GROUPED_UNIT else x.contiguous()
    y = torch.empty(*x.shape[:-1], out, dtype=dtype)
    library.grouped_linear(
        GROUPED_CODES.index(packed.code),
        rows.data_ptr(),
        packed.weight.data_ptr(),
        0 if packed.scales is None else packed.scales.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        y.data_ptr(),
        y.numel() // max(out, 1),
        out,
        into + -into % GROUPED_UNIT,
        packed.group,
        dtype == torch.float32,
        torch.get_num_threads(),
    )
    return y
