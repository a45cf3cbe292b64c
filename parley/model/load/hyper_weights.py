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
        return sum(self._count_parameters(is_last=False) for _ in self.layer_prefixes(layer))

    def last_parameters(self) -> int:
        """Return the number of elements in the tensors after the last layer."""
        return 0 if self._shape is None else self._count_parameters(is_last=True)

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for prefix in self.layer_prefixes(layer).values():
            for name, size in self._tensor_sizes(is_last=False).items():
                self._weights.checkpoint.check_tensor(prefix + name, *size)

    def read_tensors(self, prefix: str, *, is_last: bool) -> list[torch.Tensor]:
        """Return weight, scale and base, with a scale for each output: float32. ``is_last``: of the connection after
        the last layer, which only reads streams. Raises LoadError."""
        sizes = self._tensor_sizes(is_last=is_last)
        weight, scale, base = (
            self._weights.checkpoint.view_tensor(prefix + name, *size).float() for name, size in sizes.items()
        )
        return [weight, scale.repeat_interleave(torch.tensor(self._side_sizes(is_last=is_last))), base]

    def pack_layer(self, layer: int) -> dict[str, HyperWeights]:
        """Return the hyper-connections of a layer by field of ``DecoderLayer``. Raises LoadError."""
        return {field: self._pack(prefix, is_last=False) for field, prefix in self.layer_prefixes(layer).items()}

    def pack_last(self) -> HyperWeights | None:
        """Return what reads the streams after the last layer; None for models with one. Raises LoadError."""
        return None if self._shape is None else self._pack(LAST, is_last=True)

    def _pack(self, prefix: str, *, is_last: bool) -> HyperWeights:
        device = self._weights.device
        weight, scale, base = self.read_tensors(prefix, is_last=is_last)
        packed = native.pack_weight(weight.to(device, self._weights.dtype, copy=True))
        return HyperWeights(packed, scale.to(device), base.to(device, copy=True))

    def _side_sizes(self, *, is_last: bool) -> tuple[int, ...]:
        assert self._shape is not None
        return self._shape.side_sizes[:1] if is_last else self._shape.side_sizes

    def _tensor_sizes(self, *, is_last: bool) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the tensors of one hyper-connection by their names."""
        assert self._shape is not None
        sides = self._side_sizes(is_last=is_last)
        inputs = self._shape.streams * self._weights.config.hidden_size
        return {"fn": (sum(sides), inputs), "scale": (len(sides),), "base": (sum(sides),)}

    def _count_parameters(self, *, is_last: bool) -> int:
        return sum(math.prod(size) for size in self._tensor_sizes(is_last=is_last).values())
