"""The embeddings of tokens, which are a decoder's input, and the per-layer inputs that are computed from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley import native
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.network import PackedBatch
from parley.native.layer import HyperWeights


@dataclass(frozen=True)
class LayerInputs:
    """Computes the per-layer inputs, a row of ``width`` numbers for each token and layer (Gemma 3n). A row is the
    normed ``projection`` of the token's embedding. If there is a ``table`` [vocab, layers * width], the token's row in
    it, times the square root of ``width``, is added.
    """

    table: native.EmbeddingRows | None
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
    """What follows the lookup of a token's embedding: position embeddings [max_len, hidden] are added, and the sum is
    normed. ``layer_inputs`` computes the per-layer inputs from the result, ``streams`` the other residual streams.
    ``media_rows`` [count, hidden]: the embeddings of the last ``count`` token ids, which replace those of the table.
    ``last_hyper`` reads the streams of hyper-connections after the last layer."""

    positions: torch.Tensor | None = None
    norm: native.Norm | None = None
    layer_inputs: LayerInputs | None = None
    streams: StreamProjections | None = None
    media_rows: torch.Tensor | None = None
    last_hyper: HyperWeights | None = None


class TokenEmbeddings:
    """Embeds the tokens of one decoder. ``table``: [vocab, hidden]. ``is_computed``: an embedding is not just a row of
    the table times ``scale``."""

    def __init__(self, config: DecoderConfig, table: native.EmbeddingRows, parts: EmbeddingParts):
        self._config, self.table, self.parts = config, table, parts
        self.is_computed = not isinstance(table, torch.Tensor) or parts != EmbeddingParts()
        # Gemma was trained with the rounded scale.
        self.scale = float(torch.tensor(config.embedding_scale, dtype=table.dtype))

    def embed_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """Return the embeddings of all tokens [T, hidden]. Those of media replace their placeholders'."""
        media = batch.media
        # Placeholders of media may lie beyond the table.
        token_ids = batch.token_ids if media is None else batch.token_ids.index_fill(0, media.tokens, 0)
        embeddings = native.embed_tokens(token_ids, self.table)
        if self.scale != 1:
            embeddings.mul_(self.scale)
        if (rows := self.parts.media_rows) is not None:
            row_numbers = token_ids - (self._config.vocab_size - len(rows))
            embeddings = torch.where((row_numbers >= 0)[:, None], rows[row_numbers.clamp_min(0)], embeddings)
        if media is not None:
            media_embeddings = media.embeddings * self.scale if self._config.scales_media else media.embeddings
            embeddings.index_copy_(0, media.tokens, media_embeddings)
        # Those of media have positions and a norm as well.
        if (table := self.parts.positions) is not None:
            embeddings += table.index_select(0, batch.positions)
        if (norm := self.parts.norm) is not None:
            embeddings = native.norm_rows(embeddings, norm)
        return embeddings

    def compute_inputs(self, batch: PackedBatch, embeddings: torch.Tensor) -> torch.Tensor | None:
        """Return the per-layer inputs of all tokens, [T, layers, width]; None for models without them. Placeholders of
        media have the padding token's row of the table."""
        parts, sizes = self.parts.layer_inputs, self._config.layer_inputs
        if parts is None:
            return None
        projected = native.linear(embeddings, parts.projection).view(-1, sizes.width)
        if parts.table is None:
            result: torch.Tensor = native.norm_rows(projected, parts.norm).view(len(batch.token_ids), -1, sizes.width)
            return result
        media = batch.media
        token_ids = batch.token_ids if media is None else batch.token_ids.index_fill(0, media.tokens, sizes.padding)
        if sizes.vocab_size < self._config.vocab_size:  # other tokens have those of the first
            token_ids = token_ids.masked_fill(token_ids >= sizes.vocab_size, 0)
        token_inputs = native.embed_tokens(token_ids, parts.table).view(-1, sizes.width)
        # The table's factor is rounded as that of embeddings.
        scale = float(torch.tensor(sizes.width**0.5, dtype=self.table.dtype))
        inputs = native.add_norm(
            token_inputs, native.norm_rows(projected, parts.norm), None, scale=scale, total_scale=0.5**0.5
        )
        return inputs[1].view(len(batch.token_ids), -1, sizes.width)
