"""The fused decoder of Llama-shaped models: few operators per layer, all of them native kernels.

Query, key and value are one linear layer, as are gate and up, and each residual addition is fused into the following
norm. If the compiled kernels offer all layers as a single call, that call is used; it only saves Python overhead. Steps
with tokens that see later ones, or with embeddings for several layers, run kernel by kernel.
This module must not know files or configs; it receives packed weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from parley import native
from parley.heartbeat import beat
from parley.model.networks.config import DecoderConfig
from parley.model.networks.network import KVPages, LinearSite, PackedBatch
from parley.native.layer import DecoderLayer
from parley.native.layout import LayerKV

LINEAR_SITES = ("qkv", "output", "gate_up", "down")  # the linear layers within a layer, in the order of adapter sites


def make_rope_table(config: DecoderConfig, max_len: int, device: torch.device) -> torch.Tensor:
    """Return cosines and sines of the rotary embedding's angles, float32 [max_len, 2, rotary / 2].

    A table, because the cosine of an angle must not depend on its place in a vector. If sequences of this length may
    use the long factors, ``max_len`` more rows follow, with these.
    """
    positions, rope = torch.arange(max_len).float(), config.rope
    frequencies = [rope.inverse_frequencies()]
    if max_len > rope.long_rope_after:
        frequencies.append(rope.inverse_frequencies(is_long=True))
    angles = torch.cat([torch.outer(positions, each) for each in frequencies])
    return (torch.stack((angles.cos(), angles.sin()), 1) * rope.scale).to(device)


class FusedDecoder:
    """``network.DecoderNetwork`` for one Llama-shaped model. ``rope_table``: from ``make_rope_table``."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        layer_weights: list[DecoderLayer],
        norm: torch.Tensor,
        head: native.PackedWeight,
        rope_table: torch.Tensor,
        parameters: int,
        weights_bytes: int,
        linears: Mapping[str, LinearSite] | None = None,
    ):
        self.config = config
        self.linears = linears or {}
        self.parameters = parameters
        self.weights_bytes = weights_bytes
        self.vocab_size = config.vocab
        self._kv = LayerKV(config.kv_heads, config.head_dim, config.head_dim)
        self.layers = [self._kv] * len(layer_weights)
        self.layer_weights = layer_weights
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._scale = config.head_dim**-0.5
        self._rope_table = rope_table
        self._frequency_axes = config.rope.frequency_axes().to(rope_table.device) if config.rope.mrope_section else None
        self.long_rope_after = config.rope.long_rope_after
        self.stack = self._build_stack()  # all layers as one call; None: run kernel by kernel

    def select_layers(self, layers: list[int]) -> FusedDecoder:
        """Return a decoder with only ``layers``. It shares the weights."""
        return FusedDecoder(
            self.config,
            self._embedding,
            [self.layer_weights[i] for i in layers],
            self._norm,
            self._head,
            self._rope_table,
            self.parameters,
            self.weights_bytes,
            self.linears,
        )

    def _build_stack(self) -> native.Stack | None:
        """Build the single call for all layers, or return None if the kernels have none for them."""
        heads, eps = self.config.heads, self.config.eps
        tables = self._embedding, self._norm, self._rope_table
        return native.build_stack(self.layer_weights, *tables, heads, self._kv, eps=eps, scale=self._scale)

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write keys and values of all T tokens to the pages."""
        if self.stack is None or batch.visible_ends is not None or (batch.media is not None and batch.media.deep):
            return self.kernel_by_kernel(batch, pages)
        pools = [pages.layer_pool(i) for i in range(len(self.layers))]
        return self.stack.run_layers(
            batch.token_ids,
            self._rope_rows(batch, batch.positions),
            batch.slots,
            batch.spans,
            pools,
            batch.adapted,
            embeddings=None if batch.media is None else self._embed_tokens(batch),
            angles=None if batch.rope_positions is None else self._rope_angles(batch),
        )

    def _embed_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """Return the embeddings of all tokens [T, hidden]. Those of media replace their placeholders'."""
        media = batch.media
        if media is None:
            return native.embed_tokens(batch.token_ids, self._embedding)
        token_ids = batch.token_ids.index_fill(0, media.tokens, 0)  # placeholders may lie beyond the table
        return native.embed_tokens(token_ids, self._embedding).index_copy_(0, media.tokens, media.embeddings)

    def _rope_rows(self, batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
        """Return the row of the rope table for each position, in the second half for the long factors."""
        if batch.long_rope is None:
            return positions
        return positions + batch.long_rope * (len(self._rope_table) // 2)

    def _rope_angles(self, batch: PackedBatch) -> torch.Tensor:
        """Return cosines and sines for each token, float32 [T, 2, rotary / 2].

        With M-RoPE each frequency has those of the position on its axis. They come from the same table, so a token with
        the same position on all axes has the same bits with and without.
        """
        if batch.rope_positions is None:
            return self._rope_table.index_select(0, self._rope_rows(batch, batch.positions))
        assert self._frequency_axes is not None, "the model has no M-RoPE"
        rows = self._rope_rows(batch, batch.rope_positions).index_select(0, self._frequency_axes).t()
        frequencies = torch.arange(rows.shape[1], device=rows.device)
        return self._rope_table[rows, :, frequencies].transpose(1, 2).contiguous()

    def _apply_linear(
        self, x: torch.Tensor | native.QuantizedRows, batch: PackedBatch, layer: int, name: str
    ) -> torch.Tensor:
        """Apply one linear layer and add the LoRA adapters' share."""
        y = native.linear(x, getattr(self.layer_weights[layer], name))
        if batch.adapted is not None:
            assert isinstance(x, torch.Tensor), "adapters read rows as they are"
            batch.adapted.add_lora(x, y, LINEAR_SITES.index(name) + layer * len(LINEAR_SITES))
        return y

    def kernel_by_kernel(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Compute ``compute_hidden`` kernel by kernel. This is the definition; a stack does the same in one call."""
        config = self.config
        cos, sin = self._rope_angles(batch)[:, None].unbind(2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        residual = self._embed_tokens(batch)
        # A norm knows which layer reads its result, because that layer may want int8; the head's rows are selected
        # later. A LoRA adapter reads rows unquantised; the layer then quantises them itself, with the same result.
        has_adapters = batch.adapted is not None
        norms_with_readers = [
            (block.input_norm, None if has_adapters else block.qkv) for block in self.layer_weights
        ] + [(self._norm, None)]
        norm, reader = norms_with_readers[0]
        x = native.rms_norm(residual, norm, config.eps, consumer=reader)
        for i, (block, (norm, reader)) in enumerate(zip(self.layer_weights, norms_with_readers[1:], strict=True)):
            beat()
            qkv = self._apply_linear(x, batch, i, "qkv")
            pool, places = pages.layer_pool(i), pages.token_places(i, batch)
            queries = native.rope_write(qkv, cos, sin, pool, places, head_norm=block.head_norm, eps=config.eps)
            attended = pages.attend_pages(i, queries, batch, scale=self._scale, window=block.window)
            x = self._apply_linear(attended.view(-1, config.heads * config.head_dim), batch, i, "output")
            to = None if has_adapters else block.gate_up
            x, residual = native.add_rms_norm(x, residual, block.post_norm, config.eps, consumer=to)
            x = native.silu_mul(
                self._apply_linear(x, batch, i, "gate_up"), consumer=None if has_adapters else block.down
            )
            x = self._apply_linear(x, batch, i, "down")
            x, residual = native.add_rms_norm(x, residual, norm, config.eps, consumer=reader)
            if batch.media is not None and i < len(batch.media.deep):
                residual[batch.media.tokens] += batch.media.deep[i]
                x = native.rms_norm(residual, norm, config.eps, consumer=reader)
        result: torch.Tensor = x
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the given hidden rows: float32 [rows, vocab_size]."""
        return native.lm_head_logits(hidden, self._head)
