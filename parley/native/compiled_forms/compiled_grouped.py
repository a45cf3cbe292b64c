"""Calls ``grouped_weights.cpp``: linear layers on weights of 1 to 8 bits in groups, and bfloat16 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F

from parley.native import memory
from parley.native.torch_forms.torch_grouped import FLOAT_ZERO_DTYPES, GroupedPieces, GroupedWeight, PackedBlockWeight

P, N = ctypes.c_void_p, ctypes.c_int64
GROUPED_SIGNATURES = {
    "grouped_panel": [],
    "grouped_size": [N, N, N, N],
    "grouped_pack": [N, P, P, P, P, N, N, N, N],
    "grouped_linear": [N, P, P, P, P, P, N, N, N, N, N, N],
}
GROUPED_RETURN_INT64 = ("grouped_panel", "grouped_size")  # functions that return an int64
# Numbers that share a scale, of blocks
BLOCK_GROUPS = {
    "q2_k": 16, "q3_k": 16, "q4_k": 32, "q5_k": 32, "q6_k": 16, "q4_1": 32, "q5_0": 32, "q5_1": 32, "iq4_xs": 32,
    "iq2": 16, "iq3_xxs": 32, "iq3_s": 32,
}  # fmt: skip
# The dtype that must hold the scales of a code exactly, if it is not float32
SCALE_DTYPES = {"e2m1": torch.bfloat16, **dict.fromkeys(("q4_0", "q8_0", "iq4_nl"), torch.float16)}
SEVERAL = "several"  # the code of a weight whose parts have codes of their own
# Numbered as in grouped_weights.cpp
GROUPED_CODES = (
    "int4", "int8", "e4m3", "e2m1", *BLOCK_GROUPS, "q4_0", "q8_0", "iq4_nl", "nf4", "fp4", *FLOAT_ZERO_DTYPES,
    "int2", "int3", SEVERAL,
)  # fmt: skip
# Codes of less than 4 bits: those of 4 bits with the same numbers, and the numbers whose bits fill words
WIDER_CODES = {
    "zero1_f16": ("zero4_f16", 32), "zero1_bf16": ("zero4_bf16", 32), "zero2_f16": ("zero4_f16", 16),
    "zero2_bf16": ("zero4_bf16", 16), "zero3_f16": ("zero4_f16", 16), "zero3_bf16": ("zero4_bf16", 16),
    "int2": ("int4", 16), "int3": ("int4", 16),
}  # fmt: skip
SEVERAL_HEADER = 16  # words before the parts
GROUPED_UNIT = 8  # groups and rows are padded to multiples of it


@dataclass(frozen=True)
class GroupedPacked:
    """A linear layer's weight in the layout that ``grouped_weights.cpp`` describes, for rows of ``in_features``
    numbers.

    ``scales`` float32 [out]: factors of the outputs, besides the scales of groups; or None.
    ``order`` int64 [into]: the permutation of a row's numbers that the packed weight needs, or None for no permutation.
    ``parts``: code, group and outputs of each part, if they are SEVERAL.
    """

    code: str
    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None
    group: int
    out_features: int
    in_features: int
    parts: str = ""


def pack_grouped_weight(library: ctypes.CDLL, weight: GroupedWeight, bias: torch.Tensor | None) -> GroupedPacked:
    """Pack a weight for ``multiply_grouped``.

    Scales of integers of 4 bits or less are rounded to 20 bits of mantissa, those of 8 bits to 16: more than bfloat16
    and float16 have. Integers of less than 4 bits are packed as 4 bits if groups do not fill whole words.

    Raises ValueError if the group size is neither a multiple of 8 nor the whole row, or if a scale or zero point is not
    exact in the dtype that the code stores (SCALE_DTYPES, FLOAT_ZERO_DTYPES).
    """
    out_features, in_features = weight.values.shape
    part = _GroupedPart(weight)
    packed = memory.map_tensor(_packed_words(library, part), torch.int32, part.device)
    part.pack_into(library, packed)
    out_scales = None if weight.out_scales is None else weight.out_scales.float().contiguous()
    return GroupedPacked(
        part.code, packed, out_scales, _packed_bias(bias), weight.order, part.group, out_features, in_features
    )


def pack_grouped_parts(
    library: ctypes.CDLL,
    weights: Sequence[GroupedWeight | PackedBlockWeight | GroupedPieces],
    bias: torch.Tensor | None,
) -> GroupedPacked:
    """Pack weights of the same inputs as one with the outputs of all, in order. Each keeps its own code.

    Raises ValueError as ``pack_grouped_weight`` does, and if one has a permutation or scales of outputs.
    """
    grouped = [part for part in weights if isinstance(part, GroupedWeight)]
    if any(part.order is not None or part.out_scales is not None for part in grouped):
        raise ValueError("a part with a permutation or scales of outputs")
    parts = [
        _PiecewisePart(weight) if isinstance(weight, GroupedPieces) else _GroupedPart(weight) for weight in weights
    ]
    sizes = [_packed_words(library, part) for part in parts]
    header = SEVERAL_HEADER if len(parts) > 1 else 0
    packed = memory.map_tensor(header + sum(sizes), torch.int32, parts[0].device)
    for part, part_words in zip(parts, packed[header:].split(sizes), strict=True):
        part.pack_into(library, part_words)
    code, group = parts[0].code, parts[0].group
    if header:
        code, group = SEVERAL, GROUPED_UNIT
        table = [len(parts)]
        for part in parts:
            table += [GROUPED_CODES.index(part.code), part.group, part.out_features]
        packed[:header] = torch.tensor(table + [0] * (header - len(table)), dtype=torch.int32)
    described = ", ".join(f"{part.code} {part.group} {part.out_features}" for part in parts) if header else ""
    out = sum(part.out_features for part in parts)
    return GroupedPacked(code, packed, None, _packed_bias(bias), None, group, out, parts[0].in_features, described)


def _packed_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.to(torch.bfloat16).contiguous()


def _packed_words(library: ctypes.CDLL, part: _GroupedPart | _PiecewisePart) -> int:
    """Return the words of 32 bits that a packed weight takes."""
    words: int = library.grouped_size(GROUPED_CODES.index(part.code), part.out_features, part.in_features, part.group)
    return words


class _GroupedPart:
    """A weight with the arguments of its packing. Raises ValueError as ``pack_grouped_weight`` does."""

    def __init__(self, weight: GroupedWeight | PackedBlockWeight):
        self.values, self.code = weight.values.contiguous(), weight.code
        self.out_features, self.in_features = self.values.shape
        self.device = self.values.device
        self.zeros: torch.Tensor | None = None
        if isinstance(weight, PackedBlockWeight):
            self.group, self.scales = BLOCK_GROUPS[weight.code], weight.heads.contiguous()
            return
        self.group = (
            weight.group if weight.group < self.in_features else self.in_features + -self.in_features % GROUPED_UNIT
        )
        if self.group % GROUPED_UNIT:
            raise ValueError(f"groups of {self.group} numbers; only multiples of {GROUPED_UNIT} can be packed")
        if self.code in WIDER_CODES:
            wider, filled = WIDER_CODES[self.code]
            if self.group % filled or self.in_features % filled:
                self.code = wider
        if weight.zeros is not None and (dtype := FLOAT_ZERO_DTYPES.get(weight.code)) is not None:
            scales, zeros = (
                _convert_exactly(weight, part, dtype).view(torch.int16).int() for part in (weight.scales, weight.zeros)
            )
            self.scales = (scales & 0xFFFF | zeros << 16).contiguous()
            return
        if (dtype := SCALE_DTYPES.get(weight.code)) is not None:
            _convert_exactly(weight, weight.scales, dtype)
        self.scales = weight.scales.float().contiguous()
        self.zeros = None if weight.zeros is None else weight.zeros.contiguous()

    def pack_into(self, library: ctypes.CDLL, packed: torch.Tensor) -> None:
        """Pack into int32 [words]."""
        if packed.is_meta:
            return
        library.grouped_pack(
            GROUPED_CODES.index(self.code),
            self.values.data_ptr(),
            self.scales.data_ptr(),
            0 if self.zeros is None else self.zeros.data_ptr(),
            packed.data_ptr(),
            self.out_features,
            self.in_features,
            self.group,
            torch.get_num_threads(),
        )


class _PiecewisePart:
    """A weight whose pieces are made and packed one after the other."""

    def __init__(self, weight: GroupedPieces):
        self.out_features = weight.out_features
        self._pieces: Iterator[GroupedWeight | PackedBlockWeight] = iter(weight.pieces)
        self._first_piece = _GroupedPart(next(self._pieces))
        self.code = self._first_piece.code
        self.group = self._first_piece.group
        self.in_features = self._first_piece.in_features
        self.device = self._first_piece.device

    def pack_into(self, library: ctypes.CDLL, packed: torch.Tensor) -> None:
        """Pack into int32 [words]."""
        if packed.is_meta:
            return
        packed_outputs = packed_words = 0
        for piece in chain([self._first_piece], map(_GroupedPart, self._pieces)):
            assert packed_outputs % library.grouped_panel() == 0, "a piece begins within a panel"
            piece.pack_into(library, packed[packed_words:])
            packed_outputs += piece.out_features
            packed_words += _packed_words(library, piece)


def _convert_exactly(weight: GroupedWeight, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales or zeros of a weight in another dtype. Raises ValueError if one of them is not exact in it."""
    result = numbers.to(dtype)
    if not torch.equal(result.float(), numbers.float()):
        raise ValueError(f"scales of {weight.code} that {str(dtype).removeprefix('torch.')} does not have")
    return result


def multiply_grouped(library: ctypes.CDLL, x: torch.Tensor, packed: GroupedPacked, dtype: torch.dtype) -> torch.Tensor:
    """Return bfloat16 rows x [..., in_features] times the packed weight, plus bias: [..., out_features] in bfloat16 or
    float32."""
    in_features, out_features = packed.in_features, packed.out_features
    if x.shape[-1] != in_features:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a layer of {in_features}")
    if packed.order is not None:
        x = x.index_select(-1, packed.order)
    rows = F.pad(x, (0, -in_features % GROUPED_UNIT)) if in_features % GROUPED_UNIT else x.contiguous()
    y = torch.empty(*x.shape[:-1], out_features, dtype=dtype)
    library.grouped_linear(
        GROUPED_CODES.index(packed.code),
        rows.data_ptr(),
        packed.weight.data_ptr(),
        0 if packed.scales is None else packed.scales.data_ptr(),
        0 if packed.bias is None else packed.bias.data_ptr(),
        y.data_ptr(),
        y.numel() // max(out_features, 1),
        out_features,
        in_features + -in_features % GROUPED_UNIT,
        packed.group,
        dtype == torch.float32,
        torch.get_num_threads(),
    )
    return y
