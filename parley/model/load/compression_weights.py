"""Reads and packs the weights of attention to compressed entries (``CompressionShape``) from the mapped files."""

from __future__ import annotations

import math
from typing import Any

import torch

from parley import native
from parley.model.checkpoint.files import refuse_unpackable
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.linear_reader import LinearReader
from parley.native.layer import CompressorWeights, EntryIndexerWeights

OUTPUT_GROUPS = "self_attn.o_a_proj"
COMPRESSOR = "self_attn.compressor"
INDEXER = f"{COMPRESSOR}.indexer"
INDEX_QUERIES, HEAD_WEIGHTS = f"{INDEXER}.q_b_proj", f"{INDEXER}.scorer.weights_proj"


class LayerCompressionWeights:
    """The compressors and the indexers of entries of one checkpoint, and the linear layers of its groups of heads;
    nothing for other models."""

    def __init__(self, weights: LinearReader):
        self._weights, self._sizes = weights, weights.config.compression
        self._checkpoint, self._quantization = weights.checkpoint, weights.quantization

    def compressors(self, layer: int) -> dict[str, int]:
        """Return the width of entries by the module that makes them: of attention and of the indexer."""
        shape = self._weights.config.layers[layer].entries
        if self._sizes is None or shape is None:
            return {}
        own = {COMPRESSOR: self._weights.config.head_dim}
        return own | {INDEXER: self._sizes.index_dim} if shape.is_chosen else own

    def compressor_linears(self, layer: int, module: str) -> list[LinearSpec]:
        """Return the linear layers of a compressor: of rows and of gates."""
        width = self._row_width(layer, module)
        names = (f"{module}.kv_proj", f"{module}.gate_proj")
        hidden = self._weights.config.hidden_size
        return [LinearSpec(self._weights.layer_name(layer, name), width, hidden) for name in names]

    def indexer_linears(self, layer: int) -> list[LinearSpec]:
        """Return the linear layers of an indexer's queries and of the weights of its heads; none without one."""
        if INDEXER not in self.compressors(layer):
            return []
        assert self._sizes is not None
        heads, dim = self._sizes.index_heads, self._sizes.index_dim
        sizes = {INDEX_QUERIES: (heads * dim, self._sizes.query_rank)}
        sizes[HEAD_WEIGHTS] = heads, self._weights.config.hidden_size
        return [LinearSpec(self._weights.layer_name(layer, name), *size) for name, size in sizes.items()]

    def group_linear(self, layer: int) -> LinearSpec | None:
        """Return the linear layers of all groups of heads as one, whose outputs are those of one group after another,
        each of the numbers of its own heads; None for other models."""
        if self._sizes is None:
            return None
        groups, config = self._sizes.output_groups, self._weights.config
        return LinearSpec(
            self._weights.layer_name(layer, OUTPUT_GROUPS),
            groups * self._sizes.output_rank,
            config.heads * config.head_dim // groups,
        )

    def layer_linears(self, layer: int) -> list[LinearSpec]:
        """Return all linear layers that are read here."""
        group = self.group_linear(layer)
        linears = [] if group is None else [group]
        for module in self.compressors(layer):
            linears += self.compressor_linears(layer, module)
        return linears + self.indexer_linears(layer)

    def plain_tensors(self, layer: int, module: str) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of a compressor's other tensors: the bias of gates, and the norm's weight."""
        shape, name = self._weights.config.layers[layer].entries, self._weights.layer_name(layer, module)
        assert shape is not None
        bias = shape.tokens, self._row_width(layer, module)
        return {f"{name}.position_bias": bias, f"{name}.kv_norm.weight": (self.compressors(layer)[module],)}

    def _all_plain_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        compressors = (self.plain_tensors(layer, module) for module in self.compressors(layer))
        return {name: shape for tensors in compressors for name, shape in tensors.items()}

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors that are read here."""
        linears = (self._weights.linear_tensors(linear) for linear in self.layer_linears(layer))
        return [name for names in linears for name in names] + list(self._all_plain_tensors(layer))

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in these tensors."""
        linears = sum(linear.out_features * linear.in_features for linear in self.layer_linears(layer))
        return linears + sum(map(math.prod, self._all_plain_tensors(layer).values()))

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for linear in self.layer_linears(layer):
            self._quantization.check_stored_weight(self._checkpoint, linear)
        for name, shape in self._all_plain_tensors(layer).items():
            self._checkpoint.check_tensor(name, *shape)

    def read_plain(self, layer: int, module: str) -> list[torch.Tensor]:
        """Return the bias of gates [tokens, width] and the weight of the norm of a compressor, float32. Raises
        LoadError."""
        shapes = self.plain_tensors(layer, module)
        return [self._checkpoint.view_tensor(name, *shape).float() for name, shape in shapes.items()]

    def pack_layer(self, layer: int) -> dict[str, Any]:
        """Return the weights of a layer by field of ``DecoderLayer``. Raises LoadError.

        Those of groups of heads and of the heads of indexers are in the network's dtype, however they are stored.
        """
        group = self.group_linear(layer)
        if group is None or self._sizes is None:
            return {}
        weight = self._read_float(group).view(self._sizes.output_groups, -1, group.in_features)
        packed: dict[str, Any] = {"value_up": native.pack_heads(weight)}
        compressors = {module: self._pack_compressor(layer, module) for module in self.compressors(layer)}
        if compressors:
            packed["compressor"] = compressors[COMPRESSOR]
        if linears := self.indexer_linears(layer):
            with refuse_unpackable(f"The indexer of layer {layer}"):
                queries = self._weights.pack_weights([self._weights.read_linear(linears[0])], None)
            heads = native.pack_weight(self._read_float(linears[1]))
            packed["entry_indexer"] = EntryIndexerWeights(queries, heads, compressors[INDEXER])
        return packed

    def _pack_compressor(self, layer: int, module: str) -> CompressorWeights:
        """Return the weights that make the entries of a module. Raises LoadError."""
        with refuse_unpackable(f"The compressor of layer {layer}"):
            parts = [self._weights.read_linear(linear) for linear in self.compressor_linears(layer, module)]
            rows = self._weights.pack_weights(parts, None)
        bias, norm = (tensor.to(self._weights.device, copy=True) for tensor in self.read_plain(layer, module))
        return CompressorWeights(rows, bias, native.Norm(norm, self._weights.config.eps))

    def _read_float(self, linear: LinearSpec) -> torch.Tensor:
        stored = self._quantization.read_stored_weight(self._checkpoint, linear).to_float()
        return stored.to(self._weights.device, self._weights.dtype, copy=True)

    def _row_width(self, layer: int, module: str) -> int:
        """Return the numbers of a token's row, which are as many as its gates."""
        shape = self._weights.config.layers[layer].entries
        assert shape is not None
        return self.compressors(layer)[module] * (1 + shape.is_chosen)
