"""Reads the weights of hyper-connections (``HyperShape``) from the mapped files."""

from __future__ import annotations

import math

import torch

from parley import native
from parley.model.load.linear_reader import LinearReader
from parley.native.layer import HyperWeights

LAYER_PARTS = {"attention_hyper": "attn_hc.", "mlp_hyper": "ffn_hc."}  # by field of ``DecoderLayer``
LAST = "model.hc_head.hc_"
TENSORS = ("fn", "scale", "base")


class LayerHyperWeights:
    """The hyper-connections of one checkpoint; nothing for other models."""

    def __init__(self, weights: LinearReader):
        self._weights, self._shape = weights, weights.config.hyper

    def layer_prefixes(self, layer: int) -> dict[str, str]:
        """Return what the names of the tensors of a layer's hyper-connections begin with, by field of
        ``DecoderLayer``."""
        if self._shape is None:
            return {}
        return {field: self._weights.layer_name(layer, prefix) for field, prefix in LAYER_PARTS.items()}

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors that are read here."""
        return [prefix + name for prefix in self.layer_prefixes(layer).values() for name in TENSORS]

    def last_tensors(self) -> list[str]:
        """Return the names of the tensors after the last layer; none for models with one stream."""
        return [] if self._shape is None else [LAST + name for name in TENSORS]

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in a layer's tensors."""
        return sum(self._count_parameters(sides=2) for _ in self.layer_prefixes(layer))

    def last_parameters(self) -> int:
        """Return the number of elements in the tensors after the last layer."""
        return 0 if self._shape is None else self._count_parameters(sides=1)

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for prefix in self.layer_prefixes(layer).values():
            for name, size in self._tensor_sizes(sides=2).items():
                self._weights.checkpoint.check_tensor(prefix + name, *size)

    def read_tensors(self, prefix: str, *, sides: int) -> list[torch.Tensor]:
        """Return weight, scale and base, with a scale for each output: float32. ``sides``: 2 in layers, which read and
        write streams, 1 after the last one. Raises LoadError."""
        assert self._shape is not None
        sizes = self._tensor_sizes(sides=sides)
        weight, scale, base = (
            self._weights.checkpoint.view_tensor(prefix + name, *size).float() for name, size in sizes.items()
        )
        return [weight, scale.repeat_interleave(self._shape.streams), base]

    def pack_layer(self, layer: int) -> dict[str, HyperWeights]:
        """Return the hyper-connections of a layer by field of ``DecoderLayer``. Raises LoadError."""
        return {field: self._pack(prefix, sides=2) for field, prefix in self.layer_prefixes(layer).items()}

    def pack_last(self) -> HyperWeights | None:
        """Return what reads the streams after the last layer; None for models with one. Raises LoadError."""
        return None if self._shape is None else self._pack(LAST, sides=1)

    def _pack(self, prefix: str, *, sides: int) -> HyperWeights:
        device = self._weights.device
        weight, scale, base = self.read_tensors(prefix, sides=sides)
        packed = native.pack_weight(weight.to(device, self._weights.dtype, copy=True))
        return HyperWeights(packed, scale.to(device), base.to(device, copy=True))

    def _tensor_sizes(self, *, sides: int) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors of one hyper-connection by their names."""
        assert self._shape is not None
        outputs = sides * self._shape.streams
        inputs = self._shape.streams * self._weights.config.hidden_size
        return {"fn": (outputs, inputs), "scale": (sides,), "base": (outputs,)}

    def _count_parameters(self, *, sides: int) -> int:
        return sum(math.prod(size) for size in self._tensor_sizes(sides=sides).values())
