"""The fused decoder: few operators per layer, all of them native kernels. ``LayerShape`` says what a layer computes.

Query, key and value are one linear layer, as are gate and up, and each residual addition is fused into the following
norm. If the compiled kernels offer all layers as a single call, that call is used; it only saves Python overhead. Steps
with tokens that see later ones, or with embeddings for several layers, run kernel by kernel.
This module must not know files or configs; it receives packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from parley import native
from parley.heartbeat import beat
from parley.model.networks.config import DecoderConfig
from parley.model.networks.indexed_attention import IndexedStep
from parley.model.networks.network import KVPages, LinearSite, PackedBatch
from parley.model.networks.state_arena import BatchStates, temporary_states
from parley.native.layer import DecoderLayer
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape

# The linear layers within a layer, by number of their adapter site, as in ``layers.cpp``. A layer has only one of those
# with the same number. The sites of LAST_LINEARS follow those of all layers.
LINEAR_SITES = {
    **{"qkv": 0, "output": 1, "gate_up": 2, "down": 3, "query_up": 4},
    **dict.fromkeys(("state_gates", "state_parameters", "state_input", "input_gate"), 4),
}
SITES_OF_LAYER = 5
LAST_LINEARS = {"state_step": 0, "state_output": 0, "input_up": 0, "laurel_left": 1, "laurel_right": 2}


# Positions whose rotary angles are computed at once, so that a table of millions takes little memory besides itself
ROPE_TABLE_PIECE = 1 << 14


def linear_site(name: str, layer: int, layer_count: int) -> int | None:
    """Return the number of a layer's linear layer among those that adapters change, None if they cannot change it."""
    if name in LAST_LINEARS:
        return layer_count * (SITES_OF_LAYER + LAST_LINEARS[name]) + layer
    return layer * SITES_OF_LAYER + LINEAR_SITES[name] if name in LINEAR_SITES else None


def make_rope_table(config: DecoderConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """Return cosines and sines of each rotary embedding's angles, float32 [ropes, max_len, 2, rotary / 2].

    Only of pairs that turn; of embeddings with fewer of these, the last numbers have no meaning. A table, because the
    cosine of an angle must not depend on its place in a vector. If sequences of this length may use the long factors,
    ``max_len`` more rows follow, with these.
    """
    sets = _frequency_sets(config, max_len)
    table = torch.empty(len(config.ropes), sets, max_len, 2, _table_pairs(config), device=device)
    for first in range(0, max_len, ROPE_TABLE_PIECE):
        positions = torch.arange(first, min(first + ROPE_TABLE_PIECE, max_len)).float()
        for i, rope in enumerate(config.ropes):
            for j in range(sets):
                angles = torch.outer(positions, rope.inverse_frequencies(is_long=bool(j))[: rope.pairs])
                piece = torch.stack((angles.cos(), -angles.sin() if rope.is_reversed else angles.sin()), 1) * rope.scale
                table[i, j, first : first + len(positions), :, : rope.pairs] = piece
    return table.flatten(1, 2)


def _table_pairs(config: DecoderConfig) -> int:
    """Return the pairs of dimensions that a row of the rotary table has angles of."""
    return max(rope.pairs for rope in config.ropes)


def _frequency_sets(config: DecoderConfig, max_len: int) -> int:
    """Return how many sets of rotary frequencies contexts of ``max_len`` tokens need: 2 if some use long factors."""
    return 1 + (max_len > config.rope.long_rope_after)


def spread_angles(cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines that ``rope_write`` takes [..., rotary], of those of each pair [..., rotary / 2]."""
    if is_interleaved:
        return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def position_table_bytes(config: DecoderConfig, max_len: int) -> int:
    """Return the bytes of the tables of ``FusedDecoder.set_context_length`` for each of ``max_len`` positions."""
    angles = len(config.ropes) * _frequency_sets(config, max_len) * 2 * _table_pairs(config)
    return torch.float32.itemsize * (angles + (config.query_scaling is not None))


def make_query_scales(config: DecoderConfig, max_len: int, device: torch.device) -> torch.Tensor | None:
    """Return the factor of queries at each position, float32 [max_len]; None if no layer scales them."""
    scaling = config.query_scaling
    if scaling is None:
        return None
    steps = (torch.arange(max_len) + scaling.shift) // scaling.length
    return (1 + scaling.weight * steps.float().log1p()).to(device)


@dataclass(frozen=True)
class LayerInputs:
    """Makes a row of numbers for each token and layer: the sum of one of the token's embedding, which ``projection``
    makes and ``norm`` norms, and of one from ``table`` [vocab, layers * width], times the square root of their width.
    """

    table: native.EmbeddingRows
    projection: native.PackedWeight
    norm: native.Norm


@dataclass(frozen=True)
class StreamProjections:
    """The linear layers at both ends of N residual streams: ``first`` [(N - 1) * hidden, hidden] makes all streams but
    the first of the embedding, and each of ``last`` [hidden, hidden] reads one of them after the last layer."""

    first: native.PackedWeight
    last: tuple[native.PackedWeight, ...]


@dataclass(frozen=True)
class EmbeddingParts:
    """Changes to the embeddings of tokens: those of positions [max_len, hidden] are added, and the sum is normed.
    ``layer_inputs`` makes inputs of layers of the result, ``streams`` the other residual streams.
    ``media_rows`` [count, hidden]: the embeddings of the last tokens, in place of those of the table."""

    positions: torch.Tensor | None = None
    norm: native.Norm | None = None
    layer_inputs: LayerInputs | None = None
    streams: StreamProjections | None = None
    media_rows: torch.Tensor | None = None


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
        embedding_parts: EmbeddingParts = EmbeddingParts(),
    ):
        self.config = config
        self._embedding_parts = embedding_parts
        self._query_scales = make_query_scales(config, rope_table.shape[1], rope_table.device)
        self.linears = linears or {}
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self.vocab_size = config.vocab
        self.layers = config.stored_layers
        self.state_sizes = config.state_sizes
        # The number of each layer's pages, of the pages of its index keys, and of the layer among those with a state.
        self._store_numbers = [
            sum(other.stores_kv for other in config.layers[: i if shape.kv_layer is None else shape.kv_layer])
            for i, shape in enumerate(config.layers)
        ]
        self._index_numbers = [
            sum(other.stores_kv for other in config.layers) + sum(other.has_indexer for other in config.layers[:i])
            for i in range(len(config.layers))
        ]
        self._state_numbers = [
            sum(other.state is not None for other in config.layers[:i]) for i in range(len(layer_weights))
        ]
        self.layer_weights = layer_weights
        self._embedding = embedding
        self._computes_embeddings = not isinstance(embedding, torch.Tensor) or embedding_parts != EmbeddingParts()
        self._norm = norm
        self._head: native.PackedWeight | None = head  # None: given up
        # Gemma was trained with the rounded scale.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=embedding.dtype))
        self._rope_table = rope_table
        self._frequency_axes = config.rope.frequency_axes().to(rope_table.device) if config.rope.mrope_section else None
        self.long_rope_after = config.rope.long_rope_after
        self.stack = self._build_stack()  # all layers as one call; None: run kernel by kernel

    def set_context_length(self, length: int) -> None:
        """Make the tables of positions as long as the longest context."""
        self._rope_table = make_rope_table(self.config, length, self.device)
        self._query_scales = make_query_scales(self.config, length, self.device)
        self.stack = self._build_stack()

    def release_head(self) -> native.PackedWeight | None:
        """Give up the head, so that no logits can be computed. Return it; None if it is the embedding as well."""
        head, self._head = self._head, None
        return None if head is None or head.weight is self._embedding else head

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
            self._embedding,
            [self.layer_weights[i] for i in layers],
            self._norm,
            self._head,
            self._rope_table,
            self.parameters,
            self.weights_bytes,
            self.linears,
            self._embedding_parts,
        )

    def _build_stack(self) -> native.Stack | None:
        """Build the single call for all layers, or return None if the kernels have none for them."""
        if self.config.indexer is not None:  # they have none that stores index keys
            return None
        hidden = self.config.hidden
        table = (
            self._embedding if isinstance(self._embedding, torch.Tensor) else torch.empty(0, hidden, dtype=self.dtype)
        )
        tables = table, self._norm, self._rope_table
        return native.build_stack(
            self.layer_weights,
            self.config.layers,
            *tables,
            self.config.heads,
            self.config.layer_kv(0),
            is_interleaved=self.config.rope.is_interleaved,
            plain_dim=self.config.latent.plain_dim if self.config.latent is not None else 0,
            embedding_scale=self._embedding_scale,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the decoder computes."""
        return self._embedding.device

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write keys and values of all T tokens to the pages."""
        if self.stack is None or batch.visible_ends is not None or (batch.media is not None and batch.media.deepstack):
            return self.kernel_by_kernel(batch, pages)
        pools = [pages.layer_pool(i) for i in range(len(self.layers))]
        return self.stack.run_layers(
            batch.token_ids,
            self._rope_rows(batch, batch.positions),
            batch.slots,
            batch.spans,
            pools,
            batch.adapted,
            embeddings=self._embed_tokens(batch) if batch.media is not None or self._computes_embeddings else None,
            angles=None if batch.rope_positions is None else self._rope_angles(batch),
            query_scales=self._position_scales(batch),
            result_counts=batch.result_counts,
        )

    def _position_scales(self, batch: PackedBatch) -> torch.Tensor | None:
        """Return the factor of each token's queries, float32 [T]; None if no layer scales them."""
        return None if self._query_scales is None else self._query_scales.index_select(0, batch.positions)

    def _embed_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """Return the embeddings of all tokens [T, hidden]. Those of media replace their placeholders'."""
        media = batch.media
        # Placeholders of media may lie beyond the table.
        token_ids = batch.token_ids if media is None else batch.token_ids.index_fill(0, media.tokens, 0)
        embeddings = native.embed_tokens(token_ids, self._embedding)
        if self._embedding_scale != 1:
            embeddings.mul_(self._embedding_scale)
        if (rows := self._embedding_parts.media_rows) is not None:
            places = token_ids - (self.config.vocab - len(rows))
            embeddings = torch.where((places >= 0)[:, None], rows[places.clamp_min(0)], embeddings)
        if (table := self._embedding_parts.positions) is not None:
            embeddings += table.index_select(0, batch.positions)
        if (norm := self._embedding_parts.norm) is not None:
            embeddings = native.norm_rows(embeddings, norm)
        return embeddings if media is None else embeddings.index_copy_(0, media.tokens, media.embeddings)

    def _rope_rows(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """Return the row of the rope table for each position, in the second half for the long factors."""
        if batch.long_rope is None:
            return positions
        return positions + batch.long_rope * (self._rope_table.shape[1] // 2)

    def _rope_angles(self, batch: PackedBatch, rope: int = 0) -> torch.Tensor:
        """Return cosines and sines of one rotary embedding for each token, float32 [T, 2, rotary / 2].

        With M-RoPE each frequency has those of the position on its axis. They come from the same table, so a token with
        the same position on all axes has the same bits with and without.
        """
        table = self._rope_table[rope]
        if batch.rope_positions is None:
            return table.index_select(0, self._rope_rows(batch, batch.positions))
        assert self._frequency_axes is not None, "the model has no M-RoPE"
        rows = self._rope_rows(batch, batch.rope_positions).index_select(0, self._frequency_axes).t()
        frequencies = torch.arange(rows.shape[1], device=rows.device)
        return table[rows, :, frequencies].transpose(1, 2).contiguous()

    def _rotations(self, batch: PackedBatch) -> dict[int | None, tuple[torch.Tensor, torch.Tensor]]:
        """Return the cosines and sines that ``rope_write`` takes, float32 [T, 1, rotary], by rotary embedding."""
        nothing = torch.empty(len(batch.token_ids), 1, 0, device=self._rope_table.device)
        rotations: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {None: (nothing, nothing)}
        for rope in {shape.rope for shape in self.config.layers} - {None}:
            assert rope is not None
            pairs, still = self.config.ropes[rope].pairs, self.config.ropes[rope].rotary // 2
            cos, sin = self._rope_angles(batch, rope)[:, None, :, :pairs].unbind(2)
            if still > pairs:  # others turn by an angle of 0
                cos, sin = F.pad(cos, (0, still - pairs), value=1.0), F.pad(sin, (0, still - pairs))
            rotations[rope] = spread_angles(cos, sin, is_interleaved=self.config.rope.is_interleaved)
        return rotations

    def _index_batch(self, batch: PackedBatch) -> IndexedStep | None:
        """Return what computes the indexers of a batch, None for models without them."""
        shape = self.config.indexer
        if shape is None:
            return None
        cos, sin = self._rope_angles(batch)[:, None, :, : shape.rotary_dim // 2].unbind(2)
        return IndexedStep(shape, batch, *spread_angles(cos, sin, is_interleaved=shape.is_interleaved))

    def _apply_linear(
        self, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch, layer: int, name: str
    ) -> torch.Tensor:
        """Apply one linear layer and add the LoRA adapters' share."""
        y = native.linear(x, getattr(self.layer_weights[layer], name))
        site = linear_site(name, layer, len(self.layer_weights))
        if batch.adapted is not None and site is not None:
            assert isinstance(x, torch.Tensor), "adapters read rows as they are"
            batch.adapted.add_lora(x, y, site)
        return y

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden`` kernel by kernel. This is the definition; a stack does the same in one call."""
        config = self.config
        rotations = self._rotations(batch)
        residual = self._embed_tokens(batch)
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
        query_scales, inputs = self._position_scales(batch), self._compute_inputs(batch, residual)
        indexed = self._index_batch(batch)
        states = batch.states or temporary_states(self.state_sizes, batch.spans)
        for i, (block, shape, (norm, reader)) in enumerate(layers):
            beat()
            if shape.has_normed_residual:
                residual = x
            if shape.is_hybrid:
                added = self._apply_linear(self._run_state_layer(i, x, batch, states), batch, i, "state_output")
                residual = native.add_norm(added, residual, None, scale=shape.state_scale)[1]
            if shape.has_attention:
                attended = self._attend_layer(i, x, batch, pages, *rotations[shape.rope], query_scales, indexed)
            elif shape.has_mixer:
                attended = self._run_state_layer(i, x, batch, states)
            if shape.has_mixer:
                x, after = self._apply_linear(attended, batch, i, "output"), block.attention_after_norm
            if shape.has_mixer and shape.has_mlp:
                x, residual = self._finish_attention(i, x, residual, batch)
            if shape.has_mlp:
                x, after = self._run_mlps(i, x, residual, batch), block.mlp_after_norm
            scale = shape.mlp_scale if shape.has_mlp and shape.mlp_scale is not None else shape.residual_scale
            carry = shape.mlp_carry if shape.has_mlp else shape.attention_carry
            if inputs is not None and shape.layer_input is not None:
                residual = native.add_norm(x, residual, None, after=after, scale=scale)[1]
                x, after = self._run_input(i, residual, inputs[:, shape.layer_input], batch), block.input_after_norm
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

    def _attend_layer(
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
        """Return the attention of one layer before its output layer, [T, heads * head_dim]; write keys and values."""
        config, shape, block = self.config, self.config.layers[layer], self.layer_weights[layer]
        store = self._store_numbers[layer]
        rows, gates = self._apply_linear(x, batch, layer, "qkv"), None
        if shape.has_output_gate:
            rows, gates = self._split_output_gates(rows, layer)
        if shape.has_keys_as_values:
            rows = torch.cat((rows, rows[:, config.heads * config.head_sizes(layer).dim :]), 1)
        if shape.value_dim is not None:
            rows = self._widen_values(rows, layer, shape.value_dim)
        query_scales = query_scales if shape.has_scaled_queries else None
        if config.latent is not None:
            queries, latents = self._write_latents(layer, rows, config.latent, batch, pages, cos, sin)
            if indexed is not None and block.indexer is not None:
                indexed.run_indexer(x, latents, block.indexer, pages, self._index_numbers[layer])
            if query_scales is not None:
                queries *= query_scales[:, None, None]
        else:
            queries = native.rope_write(
                rows,
                cos,
                sin,
                pages.layer_pool(store),
                pages.token_places(store, batch),
                head_norm=block.head_norm,
                has_whole_norm=shape.has_whole_qk_norm,
                is_norm_late=shape.is_qk_norm_late,
                is_interleaved=config.rope.is_interleaved,
                query_scales=query_scales,
                has_normed_values=shape.has_normed_values,
                is_query_only=not shape.stores_kv,
            )
        attended = pages.attend_pages(
            store,
            queries,
            batch,
            scale=shape.score_scale,
            window=shape.window,
            chunk=shape.chunk,
            softcap=shape.softcap,
            sinks=block.sinks,
            slopes=block.slopes,
            sees_later=shape.sees_later_media,
            most_seen=None if config.indexer is None else config.indexer.chosen,
        )
        if indexed is not None and indexed.has_choice:
            indexed.attend(queries, attended, pages.layer_pool(store), scale=shape.score_scale)
        if block.value_up is not None:
            attended = native.linear_heads(attended, block.value_up)
        if shape.value_dim is not None:
            attended = attended[..., : shape.value_dim] * shape.value_scale
        if gates is None:
            return attended.flatten(1)
        return native.gate_rows(attended.flatten(1), gates, has_softplus=shape.has_softplus_gates)

    def _widen_values(self, rows: torch.Tensor, layer: int, value_dim: int) -> torch.Tensor:
        """Return the outputs of qkv with zeros after each value, which is as long as a key then."""
        sizes = self.config.head_sizes(layer)
        others, values = rows.split([rows.shape[1] - sizes.kv_heads * value_dim, sizes.kv_heads * value_dim], 1)
        wide = F.pad(values.unflatten(1, (-1, value_dim)), (0, sizes.dim - value_dim))
        return torch.cat((others, wide.flatten(1)), 1)

    def _split_output_gates(self, rows: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of qkv without the gates of attention, and the gates [T, heads * value_dim]."""
        config, latent, shape = self.config, self.config.latent, self.config.layers[layer]
        heads, value_dim = config.query_heads(layer), config.value_dim(layer)
        width = heads * config.head_dim
        if latent is not None and latent.query_rank:
            width = latent.query_rank
        gate_width = heads if shape.has_head_gates else heads * value_dim
        queries, gates, rest = rows.split([width, gate_width, rows.shape[1] - width - gate_width], 1)
        gates = gates.repeat_interleave(value_dim, 1) if shape.has_head_gates else gates
        return torch.cat((queries, rest), 1), gates

    def _run_state_layer(
        self, layer: int, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch, states: BatchStates
    ) -> torch.Tensor:
        """Return the result of a layer with a state before its output layer, [T, inner]; advance the states."""
        shape, weights = self.config.layers[layer].state, self.layer_weights[layer].state
        assert shape is not None and weights is not None
        stored = states.layers[self._state_numbers[layer]]
        rows = self._apply_linear(x, batch, layer, "state_input" if self.config.layers[layer].is_hybrid else "qkv")
        if isinstance(shape, GatedDeltaShape):
            gates = self._apply_linear(x, batch, layer, "state_gates")
            return native.scan_gated_delta(rows, gates, weights, shape, stored, states.spans)
        if isinstance(shape, KimiDeltaShape):
            rows = self._widen_gates(rows, batch, layer, shape) if shape.rank else rows
            return native.scan_kimi_delta(rows, weights, shape, stored, states.spans)
        if isinstance(shape, Mamba2Shape):
            return native.scan_mamba2(rows, weights, shape, stored, states.spans)
        if isinstance(shape, Mamba1Shape):
            active = native.convolve_channels(rows, weights, shape, stored, states.spans)
            steps, *keys = self._state_parameters(active, batch, layer, shape)
            steps = self._apply_linear(steps, batch, layer, "state_step")
            return native.scan_channels(rows, active, steps, torch.cat(keys, 1), weights, shape, stored, states.spans)
        return native.convolve_gated(rows, weights, shape, stored, states.spans)

    def _widen_gates(self, rows: torch.Tensor, batch: PackedBatch, layer: int, shape: KimiDeltaShape) -> torch.Tensor:
        """Return the rows that the scan of Kimi Delta Attention reads, whose decays and gates have ``rank`` numbers."""
        first, *low = rows.split([shape.channels + shape.heads, shape.rank, shape.rank], 1)
        steps, gates = (
            self._apply_linear(numbers.contiguous(), batch, layer, name)
            for numbers, name in zip(low, ("state_step", "state_gates"), strict=True)
        )
        return torch.cat((first, steps, gates), 1)

    def _state_parameters(
        self, active: torch.Tensor, batch: PackedBatch, layer: int, shape: Mamba1Shape
    ) -> list[torch.Tensor]:
        """Return the numbers that a Mamba 1 layer computes from its convolved channels: those of its steps [T, rank],
        and B and C [T, state_dim]."""
        rows, weights = self._apply_linear(active, batch, layer, "state_parameters"), self.layer_weights[layer].state
        assert weights is not None
        parts = [part.contiguous() for part in rows.split(shape.parameter_sizes, 1)]
        norms = weights.parameter_norms or (None,) * len(parts)
        return [native.norm_rows(part, norm) for part, norm in zip(parts, norms, strict=True)]

    def _write_latents(
        self,
        layer: int,
        rows: torch.Tensor,
        sizes: native.LatentShape,
        batch: PackedBatch,
        pages: KVPages,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | native.QuantizedRows]:
        """Write the latents of one layer to the pages. Return the queries that latents are multiplied by, [T, heads,
        stored_dim], and the normed latents of queries. ``rows``: the outputs of qkv."""
        block, is_interleaved = self.layer_weights[layer], self.config.rope.is_interleaved
        assert block.latent_norm is not None and block.key_up is not None
        queries, latents = rows.split([rows.shape[1] - sizes.stored_dim, sizes.stored_dim], -1)
        store = self._store_numbers[layer]
        places = pages.layer_pool(store), pages.token_places(store, batch)
        native.write_latents(latents, block.latent_norm, cos, sin, *places, is_interleaved=is_interleaved)
        normed = queries
        if block.query_up is not None:
            reader = None if batch.adapted is not None or block.indexer is not None else block.query_up
            normed = native.norm_rows(queries.contiguous(), block.query_latent_norm, consumer=reader)
            queries = self._apply_linear(normed, batch, layer, "query_up")
        queries = queries.view(-1, self.config.heads, sizes.head_dim)
        return native.absorb_queries(queries, block.key_up, cos, sin, is_interleaved=is_interleaved), normed

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

    def _run_mlps(
        self, layer: int, x: torch.Tensor | native.QuantizedRows, residual: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """Return the output of a layer's MLP, of its mixture of experts, or of both: [T, hidden]. ``x``: the norm of
        the residual."""
        block = self.layer_weights[layer]
        if block.mixture is None:
            return self._run_mlp(layer, x, batch)
        if not self.config.layers[layer].has_dense_beside:
            return self._mix_experts(layer, x, x, batch)
        dense = native.norm_rows(self._run_mlp(layer, x, batch), block.dense_after_norm)
        router_rows = native.norm_rows(residual, block.mixture.router_norm)
        mixed = self._mix_experts(layer, native.norm_rows(residual, block.experts_norm), router_rows, batch)
        return native.add_norm(mixed, dense, None, after=block.experts_after_norm)[1]

    def _run_input(self, layer: int, residual: torch.Tensor, inputs: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return what a layer makes of its own inputs [T, width]: [T, hidden]."""
        reader = None if batch.adapted is not None else self.layer_weights[layer].input_up
        gates = self._apply_linear(residual, batch, layer, "input_gate")
        active = native.activate(torch.cat((gates, inputs), 1), self.config.layers[layer].activation, consumer=reader)
        return self._apply_linear(active, batch, layer, "input_up")

    def _compute_inputs(self, batch: PackedBatch, embeddings: torch.Tensor) -> torch.Tensor | None:
        """Return the inputs of layers for all tokens, [T, layers, width]; None without any. Placeholders of media have
        the table's row of the padding token."""
        parts, width = self._embedding_parts.layer_inputs, self.config.inputs_width
        if parts is None:
            return None
        projected = native.linear(embeddings, parts.projection).view(-1, width)
        media, padding = batch.media, self.config.inputs_padding
        token_ids = batch.token_ids if media is None else batch.token_ids.index_fill(0, media.tokens, padding)
        if self.config.inputs_vocab < self.config.vocab:  # other tokens have those of the first
            token_ids = token_ids.masked_fill(token_ids >= self.config.inputs_vocab, 0)
        own = native.embed_tokens(token_ids, parts.table).view(-1, width)
        # The table's factor is rounded as that of embeddings.
        scale = float(torch.tensor(width**0.5, dtype=self.dtype))
        inputs = native.add_norm(own, native.norm_rows(projected, parts.norm), None, scale=scale, total_scale=0.5**0.5)
        return inputs[1].view(len(batch.token_ids), -1, width)

    def _run_mlp(self, layer: int, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch) -> torch.Tensor:
        """Return the output of a layer's MLP, or of its shared expert: [T, hidden]."""
        shape, down = self.config.layers[layer], self.layer_weights[layer].down
        rows = self._apply_linear(x, batch, layer, "gate_up")
        if shape.gate_scale != 1:
            rows[:, : rows.shape[1] // 2] *= shape.gate_scale
        if shape.gate_deviations is not None:
            rows = native.sparsify_gates(rows, shape.gate_deviations)
        active = native.activate(
            rows,
            shape.activation,
            is_gated=shape.is_gated,
            factors=self.layer_weights[layer].activation_factors,
            consumer=None if batch.adapted is not None else down,
        )
        return self._apply_linear(active, batch, layer, "down")

    def _mix_experts(
        self,
        layer: int,
        x: torch.Tensor | native.QuantizedRows,
        router_rows: torch.Tensor | native.QuantizedRows,
        batch: PackedBatch,
    ) -> torch.Tensor:
        """Return the output of a layer's mixture of experts: [T, hidden]."""
        shape, mixture = self.config.layers[layer], self.layer_weights[layer].mixture
        assert mixture is not None and shape.routing is not None
        assert isinstance(x, torch.Tensor) and isinstance(router_rows, torch.Tensor), "routers read rows as they are"
        ids, weights = native.route(native.lm_head_logits(router_rows, mixture.router), mixture.bias, shape.routing)
        if mixture.scales is not None:
            weights = weights * mixture.scales[ids]
        shared = self._run_mlp(layer, x, batch) if shape.routing.shared else None
        weighs_inputs = shape.routing.weighs_inputs
        return native.mix_experts(
            x, mixture.experts, ids, weights, shared, shape.activation, weighs_inputs=weighs_inputs
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]."""
        assert self._head is not None, "the head is given up"
        logits, config = native.lm_head_logits(hidden, self._head), self.config
        if config.logit_scale == 1 and config.logit_softcap is None:
            return logits
        return native.scale_logits(logits, config.logit_scale, config.logit_softcap)
