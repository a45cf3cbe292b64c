"""Reads and packs the weights of indexers (``IndexerShape``) from the mapped files."""

from __future__ import annotations

import torch

from parley import native
from parley.model.checkpoint.files import refuse_unpackable
from parley.model.checkpoint.weights import LinearSpec
from parley.model.load.linear_reader import LinearReader
from parley.model.networks.indexers import BLOCK_INDEXER_NAMES, TOKEN_INDEXER_NAMES
from parley.native.layer import IndexerWeights
from parley.native.layer_shape import BlockIndexerShape, IndexerShape


class LayerIndexerWeights:
    """The indexers of one checkpoint; nothing for other models."""

    def __init__(self, weights: LinearReader):
        self._weights = weights
        self._has_blocks = isinstance(weights.config.indexer, BlockIndexerShape)
        self._names = BLOCK_INDEXER_NAMES if self._has_blocks else TOKEN_INDEXER_NAMES
        self._checkpoint, self._quantization = weights.checkpoint, weights.quantization

    def layer_linears(self, layer: int) -> list[LinearSpec]:
        """Return the linear layers of a layer's indexer: of queries, keys and, if it has any, weights of heads."""
        config = self._weights.config
        if config.indexer is None or not config.layers[layer].has_indexer:
            return []
        heads, dim = config.indexer.heads, config.indexer.dim
        query_width = config.hidden_size if config.latent is None else config.latent.query_rank
        sizes = {self._names.queries: (heads * dim, query_width), self._names.key: (dim, config.hidden_size)}
        if self._names.head_weights is not None:
            sizes[self._names.head_weights] = (heads, config.hidden_size)
        return [LinearSpec(self._weights.layer_name(layer, name), *size) for name, size in sizes.items()]

    def norm_tensors(self, layer: int) -> list[str]:
        """Return the names of the weight and the bias of the norm of a layer's index keys, or of the weights of the
        norms of keys and queries of indexers of blocks; none without an indexer."""
        if not self._weights.config.layers[layer].has_indexer:
            return []
        name = self._weights.layer_name(layer, self._names.key_norm)
        if self._names.query_norm is not None:
            return [name + ".weight", self._weights.layer_name(layer, self._names.query_norm) + ".weight"]
        return [name + ".weight", name + ".bias"]

    def layer_tensors(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors that are read here."""
        linears = (self._weights.linear_tensors(linear) for linear in self.layer_linears(layer))
        return [name for names in linears for name in names] + self.norm_tensors(layer)

    def layer_parameters(self, layer: int) -> int:
        """Return the number of elements in these tensors."""
        shape = self._weights.config.indexer
        linears = sum(linear.out_features * linear.in_features for linear in self.layer_linears(layer))
        return linears + (0 if shape is None else shape.dim * len(self.norm_tensors(layer)))

    def check_shapes(self, layer: int) -> None:
        """Check shapes and types of a layer's tensors, without reading any. Raises LoadError."""
        for linear in self.layer_linears(layer):
            self._quantization.check_stored_weight(self._checkpoint, linear)
        self._read_norm_tensors(layer)

    def pack_layer(self, layer: int) -> IndexerWeights | None:
        """Return the indexer of a layer; None if it has none. Raises LoadError.

        The weights of heads are never quantized here, as those of routers are not.
        """
        linears = self.layer_linears(layer)
        if not linears:
            return None
        device, config = self._weights.device, self._weights.config
        with refuse_unpackable(f"The indexer of layer {layer}"):
            queries, key = (
                self._weights.pack_weights([self._weights.read_linear(linear)], None) for linear in linears[:2]
            )
        norms = [tensor.to(device, torch.float32, copy=True) for tensor in self._read_norm_tensors(layer)]
        if self._has_blocks:
            key_norm, query_norm = (native.Norm(weight.add_(config.norms.offset), config.eps) for weight in norms)
            return IndexerWeights(queries, key, key_norm, query_norm=query_norm)
        (weight, bias), shape = norms, config.indexer
        assert isinstance(shape, IndexerShape)
        norm = native.Norm(weight, shape.key_eps, bias, is_centered=True)
        stored = self._quantization.read_stored_weight(self._checkpoint, linears[2]).to_float()
        packed = native.pack_weight(stored.to(device, self._weights.dtype, copy=True))
        return IndexerWeights(queries, key, norm, packed)

    def _read_norm_tensors(self, layer: int) -> list[torch.Tensor]:
        """Return the weight and the bias of the norm of index keys, as views of the file. Raises LoadError."""
        shape = self._weights.config.indexer
        return (
            []
            if shape is None
            else [self._checkpoint.view_tensor(name, shape.dim) for name in self.norm_tensors(layer)]
        )
