"""Calls ``lora.cpp``: low-rank adapters, added to the outputs of linear layers on bfloat16 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from parley.native import memory
from parley.native.lowrank import LowRank

P, N = ctypes.c_void_p, ctypes.c_int64
LORA_SIGNATURES = {"lora_lanes": [], "lora_block": [], "lora_pack": [P, P, N, N, N], "lora": [P, P, N, N, P, N, P, N]}
LORA_RETURN_INT64 = ("lora_lanes", "lora_block")  # functions that return an int64
MAX_PARTS = 3  # the most parts of one layer, as in lora.h


class _PartStruct(ctypes.Structure):
    _fields_ = [*((name, N) for name in ("first", "out_features", "column", "pairs")), ("up", P)]


class _LoraStruct(ctypes.Structure):
    _fields_ = [("columns", N), ("down", P), ("scales", P), ("parts", N), ("part", _PartStruct * MAX_PARTS)]


class _LoraRowsStruct(ctypes.Structure):
    _fields_ = [("count", N), ("adapters", P), ("ends", P), ("rows", P), ("columns", N)]


class CompiledLora:
    """An adapter's weights for each linear layer of a model, laid out as in ``lora.h``. ``nbytes`` is their size."""

    def __init__(self, library: ctypes.CDLL, sites: Sequence[Sequence[LowRank]]):
        lanes, block = library.lora_lanes(), library.lora_block()
        self.columns = 0
        self.table = (_LoraStruct * len(sites))()
        self._kept: list[torch.Tensor] = []  # keeps the memory alive that the pointers refer to
        size = sum(
            _padded_columns(parts, lanes) * _round_up_even(p.down.shape[1]) for parts in sites for p in parts[:1]
        )
        size += sum(_round_up_even(len(p.down)) * (len(p.up) + -len(p.up) % lanes) for parts in sites for p in parts)
        packed = memory.map_tensor(size, torch.bfloat16)
        self.nbytes = packed.nbytes
        at = 0

        def pack_block(weight: torch.Tensor, block: int) -> int:
            nonlocal at
            out_features, in_features = weight.shape
            destination = packed.data_ptr() + 2 * at
            weight = weight.to(torch.bfloat16).contiguous()
            library.lora_pack(weight.data_ptr(), destination, out_features, in_features, block)
            at += (out_features + -out_features % lanes) * _round_up_even(in_features)
            return destination

        for lora, parts in zip(self.table, sites, strict=True):
            if not parts:
                continue
            lora.columns, lora.parts = _padded_columns(parts, lanes), len(parts)
            self.columns = max(self.columns, lora.columns)
            scales = torch.zeros(lora.columns)
            down = torch.zeros(lora.columns, parts[0].down.shape[1], dtype=torch.bfloat16)
            column = 0
            for part_struct, part in zip(lora.part, parts, strict=False):
                rank = len(part.down)
                down[column : column + rank], scales[column : column + rank] = part.down, part.scale
                part_struct.first = part.first
                part_struct.out_features = len(part.up)
                part_struct.column = column
                part_struct.pairs = _round_up_even(rank) // 2
                column += _round_up_even(rank)
            lora.down = pack_block(down, lanes)
            for part_struct, part in zip(lora.part, parts, strict=False):
                part_struct.up = pack_block(part.up, block)
            lora.scales = scales.data_ptr()
            self._kept.append(scales)
        self._kept.append(packed)


class CompiledLoraRows:
    """The rows of a batch that have adapters: for each adapter, its row numbers."""

    def __init__(self, library: ctypes.CDLL, groups: Sequence[tuple[CompiledLora, Sequence[int]]]):
        self._library = library
        self._adapters = [adapter for adapter, _ in groups]
        self._tables = (P * len(groups))(*(ctypes.addressof(adapter.table) for adapter in self._adapters))
        lengths = [len(rows) for _, rows in groups]
        self._numbers = np.array([*np.cumsum(lengths), *(row for _, rows in groups for row in rows)], np.int64)
        self.columns = max((adapter.columns for adapter in self._adapters), default=0)
        ends_address = self._numbers.ctypes.data
        self._struct = _LoraRowsStruct(
            len(groups), ctypes.addressof(self._tables), ends_address, ends_address + 8 * len(groups), self.columns
        )
        self.address = ctypes.addressof(self._struct)
        self._inner = sum(lengths) * self.columns

    def add_lora(self, x: torch.Tensor, y: torch.Tensor, site: int) -> None:
        """Add the adapters' products with x [T, in_features] to y [T, out], in linear layer number ``site``."""
        assert y.is_contiguous()
        in_features, out_features = x.shape[-1], y.shape[-1]
        rows = F.pad(x, (0, 1)) if in_features % 2 else x.contiguous()
        inner = torch.empty(self._inner, dtype=torch.bfloat16)
        threads = torch.get_num_threads()
        self._library.lora(
            rows.data_ptr(),
            y.data_ptr(),
            _round_up_even(in_features),
            out_features,
            self.address,
            site,
            inner.data_ptr(),
            threads,
        )


def _round_up_even(number: int) -> int:
    return number + number % 2


def _padded_columns(parts: Sequence[LowRank], lanes: int) -> int:
    """Return the inner columns of all parts. Each part starts at an even column; the last vector register is padded."""
    count = sum(_round_up_even(len(part.down)) for part in parts)
    return count + -count % lanes
