"""Reads and packs the weights of layers with cross-attention (``CrossAttentionWeights``) from the mapped files."""

from __future__ import annotations

from math import tanh
from typing import Any

import torch

from parley import native
from parley.model.checkpoint.files import refuse_unpackable
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.linear_reader import LinearReader
from parley.native.layer import CrossAttentionWeights

# Norms by name in the checkpoint, and gates by field of the weights. Names are those of Llama 3.2 Vision.
NORMS = {
    "norm": "input_layernorm",
    "query_norm": "cross_attn.q_norm",
    "key_norm": "cross_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
GATES = {"attention_gate": "cross_attn_attn_gate", "mlp_gate": "cross_attn_mlp_gate"}


class LayerCrossWeights:
    """The layers with cross-attention of one checkpoint; nothing for other models."""

    def __init__(self, weights: LinearReader):
        self._weights, self._checkpoint = weights, weights.checkpoint

    def layer_linears(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer, each as the parts to be merged, by field of the weights."""
        config = self._weights.config
        if not config.layers[layer].has_cross_attention:
            return {}
        hidden, width, sizes = config.hidden_size, config.intermediate_size, config.head_sizes(layer)
        queries, keys = config.query_heads(layer) * sizes.dim, sizes.kv_heads * sizes.dim
        parts = {
            "query": {"cross_attn.q_proj": (queries, hidden)},
            "keys_values": {"cross_attn.k_proj": (keys, hidden), "cross_attn.v_proj": (keys, hidden)},
            "output": {"cross_attn.o_proj": (hidden, queries)},
            "gate_up": {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden)},
            "down": {"mlp.down_proj": (hidden, width)},
        }
        return {
            field: [LinearSpec(self._weights.layer_name(layer, name), *size) for name, size in linears.items()]
            for field, linears in parts.items()
        }

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors that are read here."""
        linears = [linear for parts in self.layer_linears(layer).values() for linear in parts]
        names = [name for linear in linears for name in self._weights.linear_tensors(linear)]
        return names + list(self._small_tensors(layer))

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in these tensors."""
        linears = [linear for parts in self.layer_linears(layer).values() for linear in parts]
        total = sum(linear.out_features * linear.in_features for linear in linears)
        return total + sum(self._small_tensors(layer).values())

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for parts in self.layer_linears(layer).values():
            for linear in parts:
                self._weights.quantization.check_stored_weight(self._checkpoint, linear)
        for name, size in self._small_tensors(layer).items():
            self._checkpoint.check_tensor(name, size)

    def pack_layer(self, layer: int) -> CrossAttentionWeights | None:
        """Return the weights of a layer; None if it has no cross-attention. Raises LoadError."""
        linears = self.layer_linears(layer)
        if not linears:
            return None
        with refuse_unpackable(f"Layer {layer}"):
            packed = {
                field: self._weights.pack_weights([self._weights.read_linear(linear) for linear in parts], None)
                for field, parts in linears.items()
            }
        members: dict[str, Any] = {**packed, **self._read_gates(layer)}
        members |= {field: self._read_norm(layer, name) for field, name in NORMS.items()}
        return CrossAttentionWeights(**members)

    def _small_tensors(self, layer: int) -> dict[str, int]:
        """Return the sizes of the norms and gates of a layer by name."""
        config = self._weights.config
        if not config.layers[layer].has_cross_attention:
            return {}
        dim = config.head_sizes(layer).dim
        widths = {"norm": config.hidden_size, "mlp_norm": config.hidden_size, "query_norm": dim, "key_norm": dim}
        norms = {self._weights.layer_name(layer, f"{NORMS[field]}.weight"): width for field, width in widths.items()}
        return norms | {self._weights.layer_name(layer, name): 1 for name in GATES.values()}

    def _read_norm(self, layer: int, name: str) -> native.Norm:
        tensor = self._weights.layer_name(layer, f"{name}.weight")
        stored = self._checkpoint.view_tensor(tensor, self._small_tensors(layer)[tensor])
        weight = stored.to(self._weights.device, torch.float32, copy=True)
        return native.Norm(weight, self._weights.config.eps)

    def _read_gates(self, layer: int) -> dict[str, float]:
        """Return the factors of outputs: the tanh of what the checkpoint stores. Raises LoadError."""
        names = {field: self._weights.layer_name(layer, name) for field, name in GATES.items()}
        return {field: tanh(float(self._checkpoint.view_tensor(name, 1)[0])) for field, name in names.items()}
