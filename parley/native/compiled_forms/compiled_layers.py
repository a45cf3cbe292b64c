"""Calls ``layers.cpp``: all layers of a decoder in one call, because Python between two kernels takes longer than some
kernels.

``model/networks/decoder.py`` defines the computation kernel by kernel; this gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from parley.native.compiled_forms.compiled_attention import plan_spans
from parley.native.compiled_forms.compiled_experts import MixtureStruct, mixture_struct
from parley.native.compiled_forms.compiled_lora import CompiledLoraRows
from parley.native.compiled_forms.norm_struct import NormStruct
from parley.native.compiled_forms.weight_struct import ROW_UNIT, WEIGHT_TYPES, LinearStruct, address_of, linear_struct
from parley.native.layer import DecoderLayer
from parley.native.layer_shape import ACTIVATIONS, LayerShape, Norm
from parley.native.layout import RowSpan
from parley.native.packed import PackedWeight
from parley.native.pool import LayerPages

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

LAYER_SIGNATURES: dict[str, list[Any]] = {  # both return an int64
    "layers_workspace": [P, N, N],
    "layers": [P, P, P, P, P, N, P, P, N, P, N, P, P, N, P, P, N],
}


LAYER_NORMS = (
    "attention_norm", "attention_after_norm", "mlp_norm", "mlp_after_norm", "head_norm", "query_latent_norm",
    "latent_norm",
)  # fmt: skip
LATENT_LINEARS = ("query_up", "key_up", "value_up")


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(NormStruct)) for name in LAYER_NORMS),
        *((name, P) for name in ("sinks", "slopes")),
        *((name, N) for name in ("window", "chunk", "rope", "activation", "is_gated", "is_parallel")),
        *((name, N) for name in ("has_whole_qk_norm", "is_qk_norm_late", "has_scaled_queries")),
        *((name, R) for name in ("score_scale", "softcap", "residual_scale")),
        ("activation_factors", R * 3),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down", *LATENT_LINEARS)),
        ("mixture", ctypes.POINTER(MixtureStruct)),
    ]


class _StackStruct(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_LayerStruct)),
        ("count", N),
        ("embedding", P),
        ("norm", ctypes.POINTER(NormStruct)),
        ("angles", P),
        *((name, N) for name in ("vocab_size", "ropes", "positions", "heads", "kv_heads", "dim", "rotary")),
        *((name, N) for name in ("is_interleaved", "plain")),
        ("embedding_scale", R),
    ]


class Stack:
    """The layers of one decoder, described once as C structs. The tensors are not copied."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[DecoderLayer],
        shapes: Sequence[LayerShape],
        embedding: torch.Tensor,
        norm: Norm,
        angles: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        is_interleaved: bool,
        plain_dim: int,
        embedding_scale: float,
    ):
        ropes, positions, _, half = angles.shape
        self._kept = layers, embedding, norm, angles  # keeps the memory alive that the pointers refer to
        self._layers = (_LayerStruct * len(layers))(*map(_layer_struct, layers, shapes))
        self._stack = _StackStruct(
            self._layers,
            len(layers),
            embedding.data_ptr(),
            ctypes.pointer(NormStruct.from_norm(norm)),
            angles.data_ptr(),
            len(embedding),
            ropes,
            positions,
            heads,
            kv_heads,
            dim,
            2 * half,
            is_interleaved,
            plain_dim,
            embedding_scale,
        )
        self._hidden_size = embedding.shape[1]
        self._address = ctypes.addressof(self._stack)
        self._no_adapters = CompiledLoraRows(library, [])
        self._workspace_size, self._run_kernel = library.layers_workspace, library.layers
        for name, function in (("layers_workspace", self._workspace_size), ("layers", self._run_kernel)):
            function.argtypes, function.restype = LAYER_SIGNATURES[name], N

    @staticmethod
    def supports_layers(layers: Sequence[DecoderLayer]) -> bool:
        """Whether ``layers.cpp`` can compute these layers."""
        linears = [linear for layer in layers for linear in _layer_linears(layer)]
        return bool(linears) and all(
            isinstance(linear, WEIGHT_TYPES) and linear.in_features % ROW_UNIT == 0 for linear in linears
        )

    def run_layers(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        spans: list[RowSpan],
        pools: Sequence[LayerPages],
        lora_rows: object | None = None,
        *,
        embeddings: torch.Tensor | None = None,
        angles: torch.Tensor | None = None,
        query_scales: torch.Tensor | None = None,
        result_counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the normed result [T, hidden] for tokens int64 [T]. Keys and values are written to the pages.

        ``lora_rows``: the rows that have LoRA adapters; None: none has. ``embeddings`` [T, hidden] replaces the table's
        rows for ``tokens``, times their scale. ``angles`` float32 [T, 2, rotary / 2], cosines and sines, replaces those
        for ``positions`` in a model with one rotary embedding. ``query_scales`` float32 [T]: the factors of queries in
        layers that scale them. ``result_counts``: as in ``PackedBatch``.

        Raises IndexError for a token beyond the vocabulary or a position beyond the longest context.
        """
        attention_plan = plan_spans(spans, None)  # each layer has its own window
        tokens, positions, slot_mapping = tokens.contiguous(), positions.contiguous(), slot_mapping.contiguous()
        count = len(tokens)
        out = torch.empty(count, self._hidden_size, dtype=torch.bfloat16)
        lora_rows = lora_rows or self._no_adapters
        assert isinstance(lora_rows, CompiledLoraRows)
        workspace = torch.empty(self._workspace_size(self._address, count, lora_rows.columns), dtype=torch.uint8)
        result_spans = None
        if result_counts is not None and lora_rows is self._no_adapters and sum(result_counts) < count:
            result_spans = _last_rows(attention_plan.spans, result_counts)
        stack = self._stack_with_tables(count, embeddings, angles)
        if embeddings is not None:
            tokens = torch.arange(count)
        if angles is not None:
            positions = torch.arange(count)
        is_in_range = self._run_kernel(
            self._address if stack is self._stack else ctypes.addressof(stack),
            tokens.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            count,
            address_of(query_scales),
            attention_plan.spans.data_ptr(),
            len(attention_plan.spans),
            address_of(result_spans),
            0 if result_spans is None else len(result_spans),
            attention_plan.table.data_ptr(),
            (P * len(pools))(*[pool.data.data_ptr() for pool in pools]),
            pools[0].page_format.dtype == torch.int8,
            lora_rows.address,
            workspace.data_ptr(),
            torch.get_num_threads(),
        )
        if not is_in_range:
            raise IndexError("a token is beyond the vocabulary, or a position beyond the longest context")
        return out

    def _stack_with_tables(
        self, count: int, embeddings: torch.Tensor | None, angles: torch.Tensor | None
    ) -> _StackStruct:
        """Return the stack, with tables of ``count`` rows in place of its embeddings and angles as far as given."""
        stack = self._stack
        if embeddings is not None:
            stack = _replace_fields(stack, embedding=embeddings.data_ptr(), vocab_size=count, embedding_scale=1.0)
        if angles is not None:
            stack = _replace_fields(stack, angles=angles.data_ptr(), positions=count)
        return stack


def _last_rows(spans: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the last rows of each span that has any, as spans: int64 [n, 4]. If none has, the last row of all."""
    last_counts = torch.tensor(counts)
    if not last_counts.any():
        last_counts[-1] = 1
    first, count, *unchanged_columns = spans.unbind(1)
    return torch.stack((first + count - last_counts, last_counts, *unchanged_columns), 1)[last_counts > 0].contiguous()


def _replace_fields(stack: _StackStruct, **values: float) -> _StackStruct:
    """Return a copy with other fields. It must not outlive the original, which owns the layers."""
    copy = _StackStruct.from_buffer_copy(stack)
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


def _layer_struct(layer: DecoderLayer, shape: LayerShape) -> _LayerStruct:
    norms = (getattr(layer, name) for name in LAYER_NORMS)
    return _LayerStruct(
        *(None if norm is None else ctypes.pointer(NormStruct.from_norm(norm)) for norm in norms),
        address_of(layer.sinks),
        address_of(layer.slopes),
        shape.window or 0,
        shape.chunk or 0,
        -1 if shape.rope is None else shape.rope,
        ACTIVATIONS.index(shape.activation),
        shape.is_gated,
        shape.is_parallel,
        shape.has_whole_qk_norm,
        shape.is_qk_norm_late,
        shape.has_scaled_queries,
        shape.score_scale,
        shape.softcap or 0.0,
        shape.residual_scale,
        (R * 3)(*layer.activation_factors),
        *(linear_struct(linear) for linear in (layer.qkv, layer.output)),
        *(LinearStruct() if linear is None else linear_struct(linear) for linear in (layer.gate_up, layer.down)),
        *(LinearStruct() if linear is None else linear_struct(linear) for linear in _latent_linears(layer)),
        _mixture_pointer(layer, shape),
    )


def _mixture_pointer(layer: DecoderLayer, shape: LayerShape) -> Any:
    if layer.mixture is None:
        return None
    assert shape.routing is not None
    return ctypes.pointer(mixture_struct(layer.mixture, shape.routing, shape.activation, shape.expert_limits))


def _latent_linears(layer: DecoderLayer) -> list[PackedWeight | None]:
    return [getattr(layer, name) for name in LATENT_LINEARS]


def _layer_linears(layer: DecoderLayer) -> list[PackedWeight]:
    """Return all linear layers of a layer."""
    linears = [layer.qkv, layer.output, layer.gate_up, layer.down, *_latent_linears(layer)]
    if layer.mixture is not None:
        linears += [layer.mixture.router, layer.mixture.experts.gate_up, layer.mixture.experts.down]
    return [linear for linear in linears if linear is not None]
