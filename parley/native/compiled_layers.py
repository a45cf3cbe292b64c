"""Calls ``layers.cpp``: all layers of a decoder in one call. Python between kernels costs more than some kernels do.

``model/networks/decoder.py`` defines the computation kernel by kernel; this gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from parley.native.compiled import Packed, plan
from parley.native.compiled_int4 import Int4Packed
from parley.native.compiled_int8 import Int8Packed
from parley.native.compiled_lora import Adapted
from parley.native.layer import Layer
from parley.native.layout import Span
from parley.native.pool import Pool

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
FORMS = (Packed, Int8Packed, Int4Packed)  # numbered as in layers.cpp
UNIT = 8  # rows whose length is a multiple of it need no padding in any kernel


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, N) for name in ("form", "out", "into", "group")),
        *((name, P) for name in ("weight", "scales", "bias", "order")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("input_norm", "post_norm", "head_norm")),
        ("window", N),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
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
        layers: Sequence[Layer],
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
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._stack = _Stack(
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
        self._at = ctypes.addressof(self._stack)
        self._plain = Adapted(library, [])
        self._room, self._run = library.layers_room, library.layers
        self._room.argtypes, self._room.restype = [P, N, N], N
        self._run.argtypes, self._run.restype = [P, P, P, P, P, N, P, N, P, P, N, P, P, N], N

    @staticmethod
    def takes(layers: Sequence[Layer]) -> bool:
        """Whether ``layers.cpp`` can compute these layers."""
        linears = [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return bool(linears) and all(isinstance(each, FORMS) and each.into % UNIT == 0 for each in linears)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[Span],
        pools: Sequence[Pool],
        adapted: object | None = None,
    ) -> torch.Tensor:
        """Return the normed result [T, hidden] for tokens int64 [T]. Keys and values are written to the pages.

        ``adapted``: the rows that have LoRA adapters, if any.

        Raises IndexError for a token beyond the vocabulary or a position beyond the longest context.
        """
        cut = plan(spans, None)  # each layer has its own window
        tokens, positions, slots = tokens.contiguous(), positions.contiguous(), slots.contiguous()
        count = len(tokens)
        out = torch.empty(count, self._hidden, dtype=torch.bfloat16)
        adapted = adapted or self._plain
        assert isinstance(adapted, Adapted)
        memory = torch.empty(self._room(self._at, count, adapted.columns), dtype=torch.uint8)
        done = self._run(
            self._at,
            tokens.data_ptr(),
            out.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            count,
            cut.spans.data_ptr(),
            len(cut.spans),
            cut.table.data_ptr(),
            (P * len(pools))(*[pool.data.data_ptr() for pool in pools]),
            pools[0].format.dtype == torch.int8,
            adapted.address,
            memory.data_ptr(),
            torch.get_num_threads(),
        )
        if not done:
            raise IndexError("a token is beyond the vocabulary, or a position beyond the longest context")
        return out


def _layer(layer: Layer) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        _at(layer.head_norm),
        layer.window or 0,
        *(_linear(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
    )


def _linear(packed: object) -> _Linear:
    assert isinstance(packed, FORMS)
    return _Linear(
        FORMS.index(type(packed)),
        packed.out,
        packed.into,
        packed.group if isinstance(packed, Int4Packed) else 0,
        packed.weight.data_ptr(),
        packed.scales.data_ptr() if isinstance(packed, Int8Packed) else None,
        _at(packed.bias),
        _at(packed.order if isinstance(packed, Int4Packed) else None),
    )


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
