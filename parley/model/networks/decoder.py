"""The fused decoder: few operators per layer, all of them native kernels. ``LayerShape`` says what a layer computes.

This is the order of the kernels. What a layer computes between its norms is in ``layer_attention``, ``state_scans`` and
``layer_mlps``; what depends on tokens and positions alone in ``token_embeddings`` and ``position_tables``.
Query, key and value are one linear layer, as are gate and up, and each residual addition is fused into the following
norm. If the compiled kernels offer all layers as a single call, that call is used; it only saves Python overhead. Steps
with tokens that see later ones, or with embeddings for several layers, run kernel by kernel.
This module must not know files or configs; it receives packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.config import DecoderConfig
from parley.model.networks.indexed_attention import IndexedStep
from parley.model.networks.layer_attention import LayerAttention
from parley.model.networks.layer_linears import LayerLinears
from parley.model.networks.layer_mlps import LayerMLPs
from parley.model.networks.network import KVPages, LinearSite, PackedBatch
from parley.model.networks.position_tables import (
    PositionTables,
    make_query_scales,
    make_rope_table,
    position_table_bytes,
    spread_angles,
)
from parley.model.networks.state_arena import temporary_states
from parley.model.networks.state_scans import StateScans
from parley.model.networks.token_embeddings import EmbeddingParts, TokenEmbeddings
from parley.native.layer import DecoderLayer


class FusedDecoder:
    """``network.DecoderNetwork`` for one model. ``rope_table``: from ``make_rope_table``."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: native.EmbeddingRows,
        layer_weights: list[DecoderLayer],
        norm: native.Norm,
        head: native.PackedWeight,
        rope_table: torch.Tensor,
        parameters: int,
        weights_bytes: int,
        linears: Mapping[str, LinearSite] | None = None,
        embedding_parts: EmbeddingParts | None = None,
    ):
        self.config = config
        self.linears = linears or {}
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self.vocab_size = config.vocab
        self.layers = config.stored_layers
        self.state_sizes = config.state_sizes
        self.layer_weights = layer_weights
        self.embeddings = TokenEmbeddings(config, embedding, embedding_parts or EmbeddingParts())
        self._layer_linears = LayerLinears(layer_weights)
        layer_parts = config, layer_weights, self._layer_linears
        self._attention, self._state_scans = LayerAttention(*layer_parts), StateScans(*layer_parts)
        self._mlps = LayerMLPs(*layer_parts)
        self._norm = norm
        self._head: native.PackedWeight | None = head  # None: given up
        self.position_tables = PositionTables(
            config, rope_table, make_query_scales(config, rope_table.shape[1], rope_table.device)
        )
        self.long_rope_after = config.rope.long_rope_after
        self.stack = self._build_stack()  # all layers as one call; None: run kernel by kernel

    def set_context_length(self, length: int) -> None:
        """Make the tables of positions as long as the longest context."""
        rope_table = make_rope_table(self.config, length, self.device)
        query_scales = make_query_scales(self.config, length, self.device)
        self.position_tables = PositionTables(self.config, rope_table, query_scales)
        self.stack = self._build_stack()

    def release_head(self) -> native.PackedWeight | None:
        """Give up the head, so that no logits can be computed. Return it; None if it is the embedding as well."""
        head, self._head = self._head, None
        return None if head is None or head.weight is self.embeddings.table else head

    def position_bytes(self, length: int) -> int:
        """Return the bytes that each position of a context of ``length`` tokens takes in tables."""
        return position_table_bytes(self.config, length)

    def select_layers(self, layers: list[int], config: DecoderConfig | None = None) -> FusedDecoder:
        """Return a decoder with only ``layers``, described by ``config`` if given. It shares the weights."""
        config = config or self.config
        assert self._head is not None, "the head is given up"
        shapes = [config.layers[i] for i in layers]
        return type(self)(
            replace(
                config,
                layers=tuple(
                    shape if shape.kv_layer is None else replace(shape, kv_layer=layers.index(shape.kv_layer))
                    for shape in shapes
                ),
            ),
            self.embeddings.table,
            [self.layer_weights[i] for i in layers],
            self._norm,
            self._head,
            self.position_tables.rope_table,
            self.parameters,
            self.weights_bytes,
            self.linears,
            self.embeddings.parts,
        )

    def _build_stack(self) -> native.Stack | None:
        """Build the single call for all layers, or return None if the kernels have none for them."""
        if self.config.indexer is not None:  # they have none that stores index keys
            return None
        table = self.embeddings.table
        if not isinstance(table, torch.Tensor):
            table = torch.empty(0, self.config.hidden, dtype=self.dtype)
        tables = table, self._norm, self.position_tables.rope_table
        return native.build_stack(
            self.layer_weights,
            self.config.layers,
            *tables,
            self.config.heads,
            self.config.layer_kv(0),
            is_interleaved=self.config.rope.is_interleaved,
            plain_dim=self.config.latent.plain_dim if self.config.latent is not None else 0,
            embedding_scale=self.embeddings.scale,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self.embeddings.table.dtype

    @property
    def device(self) -> torch.device:
        """Where the decoder computes."""
        return self.embeddings.table.device

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write keys and values of all T tokens to the pages."""
        if self.stack is None or batch.visible_ends is not None or (batch.media is not None and batch.media.deepstack):
            return self.kernel_by_kernel(batch, pages)
        pools = [pages.layer_pool(i) for i in range(len(self.layers))]
        has_own_embeddings = batch.media is not None or self.embeddings.is_computed
        return self.stack.run_layers(
            batch.token_ids,
            self.position_tables.rope_rows(batch, batch.positions),
            batch.slots,
            batch.spans,
            pools,
            batch.adapted,
            embeddings=self.embeddings.embed_tokens(batch) if has_own_embeddings else None,
            angles=None if batch.rope_positions is None else self.position_tables.rope_angles(batch),
            query_scales=self.position_tables.position_scales(batch),
            result_counts=batch.result_counts,
        )

    def _index_batch(self, batch: PackedBatch) -> IndexedStep | None:
        """Return what computes the indexers of a batch, None for models without them."""
        shape = self.config.indexer
        if shape is None:
            return None
        cos, sin = self.position_tables.rope_angles(batch)[:, None, :, : shape.rotary_dim // 2].unbind(2)
        return IndexedStep(shape, batch, *spread_angles(cos, sin, is_interleaved=shape.is_interleaved))

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden`` kernel by kernel. This is the definition; a stack does the same in one call."""
        config, linears = self.config, self._layer_linears
        rotations, query_scales = self.position_tables.rotations(batch), self.position_tables.position_scales(batch)
        residual = self.embeddings.embed_tokens(batch)
        # A norm knows which layer reads its result, because that layer may want int8; the head's rows are selected
        # later. A LoRA adapter reads rows unquantized; the layer then quantizes them itself, with the same result.
        has_adapters = batch.adapted is not None
        norms_with_readers = [
            *(self._first_norm(i, has_adapters) for i in range(len(config.layers))),
            (self._norm, None),
        ]
        norm, reader = norms_with_readers[0]
        x = native.norm_rows(residual, norm, consumer=reader)
        layers = zip(self.layer_weights, config.layers, norms_with_readers[1:], strict=True)
        inputs, indexed = self.embeddings.compute_inputs(batch, residual), self._index_batch(batch)
        states = batch.states or temporary_states(self.state_sizes, batch.spans)
        for i, (block, shape, (norm, reader)) in enumerate(layers):
            beat()
            if shape.has_normed_residual:
                residual = x
            if shape.is_hybrid:
                scanned = self._state_scans.scan_layer(i, x, batch, states)
                added = linears.apply_linear(scanned, batch, i, "state_output")
                residual = native.add_norm(added, residual, None, scale=shape.state_scale)[1]
            if shape.has_attention:
                rotation = rotations[shape.rope]
                attended = self._attention.attend_layer(i, x, batch, pages, *rotation, query_scales, indexed)
            elif shape.has_mixer:
                attended = self._state_scans.scan_layer(i, x, batch, states)
            if shape.has_mixer:
                x, after = linears.apply_linear(attended, batch, i, "output"), block.attention_after_norm
            if shape.has_mixer and shape.has_mlp:
                x, residual = self._finish_attention(i, x, residual, batch)
            if shape.has_mlp:
                x, after = self._mlps.run_mlps(i, x, residual, batch), block.mlp_after_norm
            scale = shape.mlp_scale if shape.has_mlp and shape.mlp_scale is not None else shape.residual_scale
            carry = shape.mlp_carry if shape.has_mlp else shape.attention_carry
            if inputs is not None and shape.layer_input is not None:
                residual = native.add_norm(x, residual, None, after=after, scale=scale)[1]
                x = self._mlps.run_input(i, residual, inputs[:, shape.layer_input], batch)
                after = block.input_after_norm
            x, residual = native.add_norm(
                x,
                residual,
                norm,
                after=after,
                scale=scale / carry,
                total_scale=carry * block.output_scale,
                consumer=reader,
            )
            if batch.media is not None and i < len(batch.media.deepstack):
                residual[batch.media.tokens] += batch.media.deepstack[i]
                x = native.norm_rows(residual, norm, consumer=reader)
        result: torch.Tensor = x
        return result

    def _first_norm(self, layer: int, has_adapters: bool) -> tuple[native.Norm | None, native.PackedWeight | None]:
        """Return the norm of a layer's input, and the only linear layer that reads it, None if there are several."""
        shape, block = self.config.layers[layer], self.layer_weights[layer]
        norm, reader = (block.attention_norm, block.qkv) if shape.has_mixer else (block.mlp_norm, block.gate_up)
        has_several = shape.is_hybrid or shape.has_normed_residual or not (shape.has_mixer or block.mixture is None)
        has_several = has_several or shape.has_indexer
        return norm, None if has_adapters or has_several else reader

    def _finish_attention(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor | native.QuantizedRows, torch.Tensor]:
        """Add the output of a layer's attention to the residual. Return (the input of the MLP, the residual)."""
        shape, block = self.config.layers[layer], self.layer_weights[layer]
        norm, after, carry = block.mlp_norm, block.attention_after_norm, shape.attention_carry
        scale = shape.residual_scale / carry
        has_readers = batch.adapted is not None or block.mixture is not None or shape.has_normed_residual
        reader = None if has_readers else block.gate_up
        if not shape.is_parallel:
            rows, residual = native.add_norm(
                x, residual, norm, after=after, scale=scale, total_scale=carry, consumer=reader
            )
            return rows, rows if shape.has_normed_residual else residual
        rows = native.norm_rows(residual, norm, consumer=reader)
        return rows, native.add_norm(x, residual, None, after=after, scale=scale, total_scale=carry)[1]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]."""
        assert self._head is not None, "the head is given up"
        logits, config = native.lm_head_logits(hidden, self._head), self.config
        if config.logit_scale == 1 and config.logit_softcap is None:
            return logits
        return native.scale_logits(logits, config.logit_scale, config.logit_softcap)
