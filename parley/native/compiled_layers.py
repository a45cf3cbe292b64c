"""Calls ``layers.cpp``: all layers of a decoder in one call. Python between kernels costs more than some kernels do.

``model/networks/decoder.py`` defines the computation kernel by kernel; this gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from parley.native.compiled import plan_spans
from parley.native.compiled_lora import CompiledLoraRows
from parley.native.layer import DecoderLayer
from parley.native.layout import Span
from parley.native.pool import PagePool
from parley.native.weight_struct import ROW_UNIT, WEIGHT_TYPES, LinearStruct, address_of, linear_struct

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

LAYER_SIGNATURES: dict[str, list[Any]] = {  # both return an int64
    "layers_room": [P, N, N],
    "layers": [P, P, P, P, P, N, P, N, P, P, N, P, P, N],
}


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("input_norm", "post_norm", "head_norm")),
        ("window", N),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
    ]


class _StackStruct(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("count", N),
        *((name, P) for name in ("embedding", "norm", "angles")),
        *((name, N) for name in ("vocab", "positions", "heads", "kv_heads", "dim", "rotary")),
        *((name, R) for name in ("eps", "scale")),
    ]


class Stack:
    """The layers of one decoder, described once as C structs. The tensors are not copied."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[DecoderLayer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        angles: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        eps: float,
        scale: float,
    ):
        positions, _, half = angles.shape
        self._kept = layers, embedding, norm, angles  # keeps the memory alive that the pointers refer to
        self._layers = (_LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._stack = _StackStruct(
            self._layers,
            len(layers),
            embedding.data_ptr(),
            norm.data_ptr(),
            angles.data_ptr(),
            len(embedding),
            positions,
            heads,
            kv_heads,
            dim,
            2 * half,
            eps,
            scale,
        )
        self._hidden = len(norm)
        self._address = ctypes.addressof(self._stack)
        self._no_adapters = CompiledLoraRows(library, [])
        self._workspace_size, self._run_kernel = library.layers_room, library.layers
        for name, function in (("layers_room", self._workspace_size), ("layers", self._run_kernel)):
            function.argtypes, function.restype = LAYER_SIGNATURES[name], N

    @staticmethod
    def supports_layers(layers: Sequence[DecoderLayer]) -> bool:
        """Whether ``layers.cpp`` can compute these layers."""
        linears = [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return bool(linears) and all(isinstance(each, WEIGHT_TYPES) and each.into % ROW_UNIT == 0 for each in linears)

    def run_layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[Span],
        pools: Sequence[PagePool],
        adapted: object | None = None,
        *,
        embeddings: torch.Tensor | None = None,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the normed result [T, hidden] for tokens int64 [T]. Keys and values are written to the pages.

        ``adapted``: the rows that have LoRA adapters, if any. ``embeddings`` [T, hidden] replaces the table's rows for
        ``tokens``; ``angles`` float32 [T, 2, rotary / 2], cosines and sines, those for ``positions``.

        Raises IndexError for a token beyond the vocabulary or a position beyond the longest context.
        """
        attention_plan = plan_spans(spans, None)  # each layer has its own window
        tokens, positions, slots = tokens.contiguous(), positions.contiguous(), slots.contiguous()
        count = len(tokens)
        out = torch.empty(count, self._hidden, dtype=torch.bfloat16)
        adapted = adapted or self._no_adapters
        assert isinstance(adapted, CompiledLoraRows)
        workspace = torch.empty(self._workspace_size(self._address, count, adapted.columns), dtype=torch.uint8)
        stack = self._stack
        if embeddings is not None:
            stack, tokens = _replace_fields(stack, embedding=embeddings.data_ptr(), vocab=count), torch.arange(count)
        if angles is not None:
            stack, positions = _replace_fields(stack, angles=angles.data_ptr(), positions=count), torch.arange(count)
        done = self._run_kernel(
            self._address if stack is self._stack else ctypes.addressof(stack),
            tokens.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            count,
            attention_plan.spans.data_ptr(),
            len(attention_plan.spans),
            attention_plan.table.data_ptr(),
            (P * len(pools))(*[pool.data.data_ptr() for pool in pools]),
            pools[0].page_format.dtype == torch.int8,
            adapted.address,
            workspace.data_ptr(),
            torch.get_num_threads(),
        )
        if not done:
            raise IndexError("a token is beyond the vocabulary, or a position beyond the longest context")
        return out


def _replace_fields(stack: _StackStruct, **values: int) -> _StackStruct:
    """Return a copy with other fields. It must not outlive the original, which owns the layers."""
    copy = _StackStruct.from_buffer_copy(stack)
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


def _layer_struct(layer: DecoderLayer) -> _LayerStruct:
    return _LayerStruct(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        address_of(layer.head_norm),
        layer.window or 0,
        *(linear_struct(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
    )
