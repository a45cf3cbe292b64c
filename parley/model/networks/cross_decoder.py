"""The fused decoder of models with layers of cross-attention to images (Llama 3.2 Vision).

The embeddings of images are not tokens of the batch. Each layer with cross-attention computes keys and values of them,
once, and keeps these in its own pages, those of the tokens that lead the prompt. The tokens of the text attend to these
pages there, and to those of the text in all other layers. ``CrossAttentionWeights`` defines such a layer.

Rows that see no image pass these layers unchanged. A step without rows that see any runs as a single call.
"""

from __future__ import annotations

from typing import Any

import torch

from parley import native
from parley.model.networks.decoder import DecoderStep, FusedDecoder, NormOfRows
from parley.model.networks.network import KVPages, PackedBatch, SeenImages
from parley.native.layer import CrossAttentionWeights


class CrossDecoder(FusedDecoder):
    """``network.DecoderNetwork`` for one model with cross-attention."""

    def compute_hidden(self, batch: PackedBatch, pages: KVPages) -> torch.Tensor:
        """Return final (normed) hidden states [T, hidden]; write the keys and values of all T tokens to the pages, and
        those of the step's images."""
        if batch.images is None:
            return super().compute_hidden(batch, pages)
        return self.kernel_by_kernel(batch, pages)

    def _run_layer(
        self, i: int, x: Any, residual: torch.Tensor, step: DecoderStep, next_norm: NormOfRows
    ) -> tuple[Any, torch.Tensor]:
        images, weights = step.batch.images, self.layer_weights[i].cross
        if images is not None and weights is not None:
            residual = self._attend_images(i, weights, residual, images, step.pages)
        return super()._run_layer(i, x, residual, step, next_norm)

    def _attend_images(
        self,
        layer: int,
        weights: CrossAttentionWeights,
        residual: torch.Tensor,
        images: SeenImages,
        pages: KVPages,
    ) -> torch.Tensor:
        """Return the residual [T, hidden] after a layer with cross-attention; write keys and values of images."""
        sizes, heads = self.config.head_sizes(layer), self.config.query_heads(layer)
        kv_index = sum(shape.stores_kv for shape in self.config.layers)
        kv_index += sum(shape.has_cross_attention for shape in self.config.layers[:layer])
        if images.embeddings is not None:
            rows = native.linear(images.embeddings, weights.keys_values).view(-1, 2 * sizes.kv_heads, sizes.dim)
            keys, values = (part.contiguous() for part in rows.split(sizes.kv_heads, 1))
            keys = native.norm_rows(keys.view(-1, sizes.dim), weights.key_norm).view_as(values)
            pages.write_kv(kv_index, keys, values, images.written)
        if not len(images.rows):
            return residual
        seeing = residual.index_select(0, images.rows)
        queries = native.linear(native.norm_rows(seeing, weights.norm), weights.query)
        queries = native.norm_rows(queries.view(-1, sizes.dim), weights.query_norm).view(-1, heads, sizes.dim)
        attended = pages.attend_pages(kv_index, queries, images.attention, scale=sizes.dim**-0.5)
        output = native.linear(attended.flatten(1), weights.output)
        x, seeing = native.add_norm(output, seeing, weights.mlp_norm, scale=weights.attention_gate)
        active = native.activate(native.linear(x, weights.gate_up), "silu", is_gated=True)
        output = native.linear(active, weights.down)
        seeing = native.add_norm(output, seeing, None, scale=weights.mlp_gate)[1]
        return residual.index_copy(0, images.rows, seeing)
