"""The fused decoder: few operators per layer, all of them native kernels. ``LayerShape`` defines a layer's computation.

This module has the order of the kernels. The parts between norms are in ``layer_attention``, ``state_scans`` and
``layer_mlps``; the tables of tokens and positions in ``token_embeddings`` and ``position_tables``. Query, key and value
are one linear layer, as are gate and up, and each residual addition is fused into the following norm.

If the compiled kernels can compute all layers in a single call (a *stack*), that call is used; it only saves Python's
time. Steps with tokens that attend to later ones, or with embeddings for several layers, run kernel by kernel.

This module knows neither files nor configs of checkpoints; it receives packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.block_attention import BlockIndexedStep
from parley.model.networks.decoder_config import DecoderConfig
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
from parley.model.networks.state_arena import BatchStates, temporary_states
from parley.model.networks.state_scans import StateScans
from parley.model.networks.token_embeddings import EmbeddingParts, TokenEmbeddings
from parley.native.layer import DecoderLayer
from parley.native.layer_shape import BlockIndexerShape


class NormOfRows(NamedTuple):
    """A norm, and the only linear layer that reads its result; None: several layers read it, or none does. The norm
    quantizes its result if that layer computes with int8 rows.

    A LoRA adapter reads unquantized rows; then the linear layer quantizes them itself, with the same result.
    """

    norm: native.Norm | None
    consumer: native.PackedWeight | None = None


class DecoderStep(NamedTuple):
    """The inputs that all layers of a step share.

    ``rotations``: (cosines, sines) by number of the rotary embedding, or None for layers without one. ``query_scales``:
    the factors of queries in layers that scale them. ``layer_inputs``: per-layer inputs [T, layers, width], for models
    that have them.
    """

    batch: PackedBatch
    pages: KVPages
    rotations: Mapping[int | None, tuple[torch.Tensor, torch.Tensor]]
    query_scales: torch.Tensor | None
    layer_inputs: torch.Tensor | None
    indexed: IndexedStep | None
    states: BatchStates


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
        self.vocab_size = config.vocab_size
        self.kv_layers = config.kv_layers
        self.state_sizes = config.state_sizes
        self.layer_weights = layer_weights
        self.embeddings = TokenEmbeddings(config, embedding, embedding_parts or EmbeddingParts())
        self._layer_linears = LayerLinears(layer_weights)
        layer_parts = config, layer_weights, self._layer_linears
        self._attention, self._state_scans = LayerAttention(*layer_parts), StateScans(*layer_parts)
        self._mlps = LayerMLPs(*layer_parts)
        self._norm = norm
        self._head: native.PackedWeight | None = head  # None after ``release_head``
        self.position_tables = PositionTables(
            config, rope_table, make_query_scales(config, rope_table.shape[1], rope_table.device)
        )
        self.long_rope_after = config.rope.long_rope_after
        self.stack = self._build_stack()  # all layers as one call; None: run kernel by kernel

    def set_context_length(self, length: int) -> None:
        """Extend the tables of positions to contexts of ``length`` tokens."""
        rope_table = make_rope_table(self.config, length, self.device)
        query_scales = make_query_scales(self.config, length, self.device)
        self.position_tables = PositionTables(self.config, rope_table, query_scales)
        self.stack = self._build_stack()

    def release_head(self) -> native.PackedWeight | None:
        """Remove the head from the decoder and return it; None if it is also the embedding. No logits can be computed
        afterwards."""
        head, self._head = self._head, None
        return None if head is None or head.weight is self.embeddings.table else head

    def position_bytes(self, length: int) -> int:
        """Return the bytes of the tables of positions for each position of a context of ``length`` tokens."""
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
        if self.config.indexer is not None or self.config.hyper is not None:  # no stack stores index keys, or streams
            return None
        table = self.embeddings.table
        if not isinstance(table, torch.Tensor):
            table = torch.empty(0, self.config.hidden_size, dtype=self.dtype)
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
        pools = [pages.layer_pool(i) for i in range(len(self.kv_layers))]
        has_own_embeddings = batch.media is not None or self.embeddings.is_computed
        return self.stack.run_layers(
            batch.token_ids,
            self.position_tables.rope_rows(batch, batch.positions),
            batch.slot_mapping,
            batch.spans,
            pools,
            batch.lora_rows,
            embeddings=self.embeddings.embed_tokens(batch) if has_own_embeddings else None,
            angles=None if batch.rope_positions is None else self.position_tables.rope_angles(batch),
            query_scales=self.position_tables.position_scales(batch),
            result_counts=batch.result_counts,
        )

    def _index_batch(self, batch: PackedBatch) -> IndexedStep | None:
        """Return the computation of a batch's indexers; None for models without them."""
        shape = self.config.indexer
        if shape is None:
            return None
        cos, sin = self.position_tables.rope_angles(batch)[:, None, :, : shape.rotary_dim // 2].unbind(2)
        cos, sin = spread_angles(cos, sin, is_interleaved=shape.is_interleaved)
        if isinstance(shape, BlockIndexerShape):
            return BlockIndexedStep(shape, batch, cos, sin)
        return IndexedStep(shape, batch, cos, sin)

    def _begin_step(self, batch: PackedBatch, pages: KVPages, embeddings: torch.Tensor) -> DecoderStep:
        """Compute what all layers of a step share. ``embeddings`` [T, hidden]: of the batch's tokens."""
        return DecoderStep(
            batch,
            pages,
            self.position_tables.rotations(batch),
            self.position_tables.position_scales(batch),
            self.embeddings.compute_inputs(batch, embeddings),
            self._index_batch(batch),
            batch.states or temporary_states(self.state_sizes, batch.spans, batch.token_ids.device),
        )

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden`` kernel by kernel. This is the definition; a stack does the same in one call."""
        residual = self.embeddings.embed_tokens(batch)
        step = self._begin_step(batch, pages, residual)
        has_adapters = batch.lora_rows is not None
        norms = [*(self._first_norm(i, has_adapters) for i in range(self.config.layer_count)), NormOfRows(self._norm)]
        x = native.norm_rows(residual, norms[0].norm, consumer=norms[0].consumer)
        for i, next_norm in enumerate(norms[1:]):
            beat()
            x, residual = self._run_layer(i, x, residual, step, next_norm)
        result: torch.Tensor = x
        return result

    def _run_layer(
        self,
        i: int,
        x: Any,
        residual: torch.Tensor,
        step: DecoderStep,
        next_norm: NormOfRows,
    ) -> tuple[Any, torch.Tensor]:
        """Compute layer ``i``, as ``LayerShape`` defines it. Return (the result of ``next_norm`` for the new residual,
        the new residual).

        ``x``: the residual [T, hidden] after the layer's first norm: a tensor, or ``QuantizedRows`` if the only linear
        layer that reads it computes with int8 rows. The first result likewise.
        """
        shape, weights, linears = self.config.layers[i], self.layer_weights[i], self._layer_linears
        batch = step.batch
        if shape.has_gated_attention_norm:
            x = self._gate_norm(x, weights.attention_norm_down, weights.attention_norm_up)
        if not shape.has_mixer and not shape.has_mlp:
            return native.norm_rows(residual, next_norm.norm, consumer=next_norm.consumer), residual
        if shape.has_normed_residual:
            residual = x
        logits = self._mlps.route_early(i, residual)
        if shape.is_hybrid:
            scanned = self._state_scans.scan_layer(i, x, batch, step.states)
            added = linears.apply_linear(scanned, batch, i, "state_output")
            residual = native.add_norm(added, residual, None, scale=shape.state_scale)[1]
        if shape.has_attention:
            rotation = step.rotations[shape.rope]
            mixed = self._attention.attend_layer(i, x, batch, step.pages, *rotation, step.query_scales, step.indexed)
            mixed = native.norm_rows(mixed, weights.attended_norm)
        elif shape.has_linear_mixer:
            mixed = x
        elif shape.has_mixer:
            mixed = self._state_scans.scan_layer(i, x, batch, step.states)
        if shape.has_mixer:
            x, after_norm = linears.apply_linear(mixed, batch, i, "output"), weights.attention_after_norm
        if shape.has_mixer and shape.has_mlp:
            x, residual = self._finish_attention(i, x, residual, batch)
        if shape.has_mlp:
            x, after_norm = self._mlps.run_mlps(i, x, residual, batch, logits), weights.mlp_after_norm
        scale = shape.mlp_scale if shape.has_mlp and shape.mlp_scale is not None else shape.residual_scale
        residual_factor = shape.mlp_residual_factor if shape.has_mlp else shape.attention_residual_factor
        if step.layer_inputs is not None and shape.layer_input is not None:
            residual = native.add_norm(x, residual, None, after=after_norm, scale=scale)[1]
            x = self._mlps.apply_layer_input(i, residual, step.layer_inputs[:, shape.layer_input], batch)
            after_norm = weights.input_after_norm
        x, residual = native.add_norm(
            x,
            residual,
            next_norm.norm,
            after=after_norm,
            scale=scale / residual_factor,
            total_scale=residual_factor * weights.output_scale,
            consumer=next_norm.consumer,
        )
        if batch.media is not None and i < len(batch.media.deepstack):
            residual[batch.media.tokens] += batch.media.deepstack[i]
            x = native.norm_rows(residual, next_norm.norm, consumer=next_norm.consumer)
        return x, residual

    def _first_norm(self, layer: int, has_adapters: bool) -> NormOfRows:
        """Return the norm of a layer's input, with its only reader, if there is a single one."""
        shape, weights = self.config.layers[layer], self.layer_weights[layer]
        norm, consumer = weights.attention_norm, weights.output if shape.has_linear_mixer else weights.qkv
        if not shape.has_mixer:  # nor a norm, in a layer without an MLP
            norm, consumer = (weights.mlp_norm, weights.gate_up)
        has_other_readers = (
            has_adapters
            or shape.is_hybrid
            or shape.has_normed_residual
            or shape.has_indexer
            or shape.has_gated_attention_norm
            or not (shape.has_mixer or weights.mixture is None)
        )
        return NormOfRows(norm, None if has_other_readers else consumer)

    def _gate_norm(
        self, x: torch.Tensor, down: native.PackedWeight | None, up: native.PackedWeight | None
    ) -> torch.Tensor:
        """Return x * sigmoid(up(silu(down(x)))), for a norm x [T, hidden], which may be overwritten."""
        assert down is not None and up is not None
        active = native.activate(native.linear(x, down), "silu", is_gated=False)
        return native.gate_rows(x, native.linear(active, up))

    def _finish_attention(
        self, layer: int, x: torch.Tensor, residual: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor | native.QuantizedRows, torch.Tensor]:
        """Add the output of a layer's attention to the residual. Return (the input of the MLP, the residual)."""
        shape, weights = self.config.layers[layer], self.layer_weights[layer]
        norm = weights.mlp_norm
        after_norm = weights.attention_after_norm
        residual_factor = shape.attention_residual_factor
        scale = shape.residual_scale / residual_factor
        has_other_readers = batch.lora_rows is not None or weights.mixture is not None or shape.has_normed_residual
        consumer = None if has_other_readers else weights.gate_up
        if not shape.is_parallel:
            rows, residual = native.add_norm(
                x, residual, norm, after=after_norm, scale=scale, total_scale=residual_factor, consumer=consumer
            )
            if shape.has_gated_mlp_norm:
                rows = self._gate_norm(rows, weights.mlp_norm_down, weights.mlp_norm_up)
            return rows, rows if shape.has_normed_residual else residual
        rows = native.norm_rows(residual, norm, consumer=consumer)
        return rows, native.add_norm(x, residual, None, after=after_norm, scale=scale, total_scale=residual_factor)[1]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]."""
        assert self._head is not None, "the head is given up"
        logits, config = native.lm_head_logits(hidden, self._head), self.config
        if config.logit_scale == 1 and config.logit_softcap is None:
            return logits
        return native.scale_logits(logits, config.logit_scale, config.logit_softcap)
