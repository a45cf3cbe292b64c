"""The attention of a decoder's layers, kernel by kernel: with keys and values, or with latents of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from parley import native
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.indexed_attention import IndexedStep
from parley.model.networks.layer_linears import LayerLinears
from parley.model.networks.network import KVPages, PackedBatch
from parley.native.layer import DecoderLayer


class LayerAttention:
    """The attention of each layer of one decoder."""

    def __init__(self, config: DecoderConfig, layer_weights: Sequence[DecoderLayer], linears: LayerLinears):
        self._config, self._layer_weights, self._linears = config, layer_weights, linears
        # By layer: the index in ``config.kv_layers`` of its keys and values, and of the keys of its indexer.
        self._kv_indices = [
            sum(other.stores_kv for other in config.layers[: i if shape.kv_layer is None else shape.kv_layer])
            for i, shape in enumerate(config.layers)
        ]
        self._indexer_kv_indices = [
            sum(other.stores_kv for other in config.layers) + sum(other.has_indexer for other in config.layers[:i])
            for i in range(len(config.layers))
        ]

    def attend_layer(
        self,
        layer: int,
        x: torch.Tensor | native.QuantizedRows,
        batch: PackedBatch,
        pages: KVPages,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_scales: torch.Tensor | None,
        indexed: IndexedStep | None = None,
    ) -> torch.Tensor:
        """Return the attention of one layer before its output layer, [T, heads * value_dim]; write keys and values.

        ``x`` [T, hidden]: the layer's input after its norm. ``cos`` and ``sin``: float32 [T, 1, rotary].
        ``query_scales``: float32 [T], for layers that scale queries.
        """
        config, shape, weights = self._config, self._config.layers[layer], self._layer_weights[layer]
        kv_index = self._kv_indices[layer]
        rows, gates = self._project_qkv(layer, x, batch)
        query_scales = query_scales if shape.has_scaled_queries else None
        if config.latent is not None:
            queries, latents, own_gates = self._write_latents(layer, rows, config.latent, batch, pages, cos, sin)
            gates = gates if own_gates is None else own_gates
            if indexed is not None and weights.indexer is not None:
                indexed.run_indexer(x, latents, weights.indexer, pages, self._indexer_kv_indices[layer])
            if query_scales is not None:
                queries *= query_scales[:, None, None]
        else:
            queries = self._write_keys_and_values(layer, rows, batch, pages, cos, sin, query_scales)
            if indexed is not None and weights.indexer is not None:
                indexed.run_indexer(x, None, weights.indexer, pages, self._indexer_kv_indices[layer])
        attended = pages.attend_pages(
            kv_index,
            queries,
            batch,
            scale=shape.score_scale,
            window=shape.window,
            chunk=shape.chunk,
            softcap=shape.softcap,
            sinks=weights.sinks,
            slopes=weights.slopes,
            sees_later=shape.sees_later_media,
            max_seen=config.indexer.max_unchosen if config.indexer is not None and shape.reads_chosen else None,
        )
        if indexed is not None and indexed.has_choice and shape.reads_chosen:
            pool = pages.layer_pool(kv_index)
            indexed.attend(queries, attended, pool, scale=shape.score_scale, sinks=weights.sinks)
        if weights.value_up is not None:
            attended = native.linear_heads(attended, weights.value_up)
        if shape.value_dim is not None:
            attended = attended[..., : shape.value_dim] * shape.value_scale
        if gates is None:
            return attended.flatten(1)
        return native.gate_rows(attended.flatten(1), gates, has_softplus=shape.has_softplus_gates)

    def _write_keys_and_values(
        self,
        layer: int,
        rows: torch.Tensor,
        batch: PackedBatch,
        pages: KVPages,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the keys and values of ``rows``, queries, keys and values [T, qkv], to the pages. Return the queries
        [T, heads, dim], normed and rotated."""
        shape, kv_index = self._config.layers[layer], self._kv_indices[layer]
        return native.rope_write(
            rows,
            cos,
            sin,
            pages.layer_pool(kv_index),
            pages.write_indices(kv_index, batch),
            head_norm=self._layer_weights[layer].head_norm,
            has_whole_norm=shape.has_whole_qk_norm,
            is_norm_late=shape.is_qk_norm_late,
            is_interleaved=self._config.rope.is_interleaved,
            query_scales=query_scales,
            has_normed_values=shape.has_normed_values,
            is_query_only=not shape.stores_kv,
        )

    def _project_qkv(
        self, layer: int, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries, keys and values as the kernels read them, and the gates of attention [T, heads * value_dim],
        or None without any."""
        config, shape = self._config, self._config.layers[layer]
        rows, gates = self._linears.apply_linear(x, batch, layer, "qkv"), None
        if shape.qkv_limit is not None:
            rows.clamp_(-shape.qkv_limit, shape.qkv_limit)
        if shape.has_output_gate:
            rows, gates = self._split_output_gates(rows, layer)
        if shape.has_keys_as_values:
            rows = torch.cat((rows, rows[:, config.heads * config.head_sizes(layer).dim :]), 1)
        if shape.value_dim is not None:
            rows = self._widen_values(rows, layer, shape.value_dim)
        return rows, gates

    def _widen_values(self, rows: torch.Tensor, layer: int, value_dim: int) -> torch.Tensor:
        """Return the outputs of qkv with each value padded with zeros to the length of a key."""
        sizes = self._config.head_sizes(layer)
        queries_and_keys, values = rows.split(
            [rows.shape[1] - sizes.kv_heads * value_dim, sizes.kv_heads * value_dim], 1
        )
        padded_values = F.pad(values.unflatten(1, (-1, value_dim)), (0, sizes.dim - value_dim))
        return torch.cat((queries_and_keys, padded_values.flatten(1)), 1)

    def _split_output_gates(self, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of qkv without the gates of attention, and the gates [T, heads * value_dim]."""
        config, latent, shape = self._config, self._config.latent, self._config.layers[layer]
        heads, value_dim = config.query_heads(layer), config.value_dim(layer)
        width = heads * config.head_dim
        if latent is not None and latent.query_rank:
            width = latent.query_rank
        gate_width = heads if shape.has_head_gates else heads * value_dim
        queries, gates, keys_and_values = rows.split([width, gate_width, rows.shape[1] - width - gate_width], 1)
        gates = gates.repeat_interleave(value_dim, 1) if shape.has_head_gates else gates
        return torch.cat((queries, keys_and_values), 1), gates

    def _write_latents(
        self,
        layer: int,
        rows: torch.Tensor,
        sizes: native.LatentShape,
        batch: PackedBatch,
        pages: KVPages,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | native.QuantizedRows, torch.Tensor | None]:
        """Write the latents of one layer to the pages. Return the queries that latents are multiplied by, [T, heads,
        stored_dim], the normed latents of queries, and gates that are made of these [T, heads * value_dim] or None.
        ``rows``: the outputs of qkv."""
        weights, is_interleaved = self._layer_weights[layer], self._config.rope.is_interleaved
        assert weights.latent_norm is not None and weights.key_up is not None
        queries, latents = rows.split([rows.shape[1] - sizes.stored_dim, sizes.stored_dim], -1)
        kv_index = self._kv_indices[layer]
        native.write_latents(
            latents,
            weights.latent_norm,
            cos,
            sin,
            pages.layer_pool(kv_index),
            pages.write_indices(kv_index, batch),
            is_interleaved=is_interleaved,
        )
        normed, gates, has_gates = queries, None, self._config.layers[layer].has_latent_gates
        if weights.query_up is not None:
            has_other_readers = batch.lora_rows is not None or weights.indexer is not None or has_gates
            consumer = None if has_other_readers else weights.query_up
            normed = native.norm_rows(queries.contiguous(), weights.query_latent_norm, consumer=consumer)
            read = torch.cat((normed, queries), 1) if has_gates else normed
            queries = self._linears.apply_linear(read, batch, layer, "query_up")
        heads = self._config.heads
        queries = queries.view(len(queries), heads, queries.shape[1] // heads)  # a batch may have no rows
        if has_gates:
            queries, gates = queries.split([sizes.head_dim, sizes.value_dim], -1)
            queries, gates = queries.contiguous(), gates.flatten(1)
        return native.absorb_queries(queries, weights.key_up, cos, sin, is_interleaved=is_interleaved), normed, gates
