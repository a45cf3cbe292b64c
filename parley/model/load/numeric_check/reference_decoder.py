"""A decoder by its definitions, for the numeric check: plain float32, from token ids to logits.

It computes on the unmerged weights of the checkpoint and knows nothing of kernels and packed weights, so that it cannot
be wrong in the same way as the fused decoder. ``reference_layer.py`` defines a layer.
"""

from __future__ import annotations

import torch

from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantization
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.media_vocabularies import read_media_rows
from parley.model.load.numeric_check.reference_altup import ReferenceAltUpLayer, make_streams, merge_streams
from parley.model.load.numeric_check.reference_compression import ReferenceCompressedLayer
from parley.model.load.numeric_check.reference_hyper import ReferenceHyperLayer, sum_streams
from parley.model.load.numeric_check.reference_layer import ReferenceLayer, ReferenceNorms, StoredKV
from parley.model.networks.decoder_config import DecoderConfig


class ReferenceDecoder:
    """Computes logits of one sequence. ``media_positions`` int64 [3, T]: the tokens' positions on the axes of M-RoPE.

    Weights are read when they are needed, and a layer's pages of the file are released after it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        quantization: Quantization,
        media_positions: torch.Tensor,
    ):
        self._checkpoint, self._config = checkpoint, config
        self._weights = DecoderWeights(checkpoint, config, quantization, torch.float32, torch.device("cpu"))
        self._norms = ReferenceNorms(self._weights, config)
        self._media_positions = media_positions

    def compute_logits(self, token_ids: torch.Tensor, outputs: torch.Tensor, layers: list[int]) -> torch.Tensor:
        """Return the logits of some ``outputs`` after the last token, using only ``layers``.

        token_ids int64 [T], outputs int64 [N] -> float32 [1, N]. The whole vocabulary in float32 would cost more than
        the rest of the start.
        """
        x = self._embed_tokens(token_ids)
        inputs = self._layer_inputs(token_ids, x) if self._config.layer_inputs.count else None
        stored: StoredKV = {}
        if self._config.altup is not None:
            x = make_streams(self._weights, x)
        layer_class = ReferenceLayer if self._config.altup is None else ReferenceAltUpLayer
        if self._config.hyper is not None:
            x, layer_class = x[:, None].repeat(1, self._config.hyper.streams, 1), ReferenceHyperLayer
        if self._config.compression is not None:
            layer_class = ReferenceCompressedLayer
        for number in layers:
            layer = layer_class(self._weights, self._config, number, self._media_positions, stored, token_ids)
            x = layer.run_rows(x, None if inputs is None else inputs[:, number])
            self._checkpoint.release_pages(*self._weights.layer_tensors(number))
        if self._config.altup is not None:
            x = merge_streams(self._weights, x)
        if self._config.hyper is not None:
            x = sum_streams(self._weights, x)
        return self._score_outputs(x[-1:], outputs)

    def _embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens with those of their positions, float32 [T, hidden]."""
        config, count = self._config, len(token_ids)
        embedding = self._weights.quantization.read_embedding(self._checkpoint, self._weights.embeddings.token_table)
        x = embedding.select_outputs(token_ids).decode_into(torch.empty(count, config.hidden_size))
        x = x * config.embedding_scale
        if (rows := read_media_rows(self._weights)) is not None:
            first = config.vocab_size - len(rows)
            x[token_ids >= first] = rows[token_ids[token_ids >= first] - first]
        size, places = config.max_len + config.position_offset, torch.arange(count) + config.position_offset
        if config.tensors.positions:
            x = x + self._view_float(config.tensors.positions + ".weight", size, config.hidden_size)[places]
        if config.sinusoids is not None:
            x = x + config.sinusoids.make_table(size)[places]
        if config.tensors.embedding_norm is not None:
            x = self._norms.norm_rows(x, config.tensors.embedding_norm, config.hidden_size)
        return x

    def _layer_inputs(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Return the inputs of all layers for the tokens with these embeddings, float32 [T, layers, width]."""
        config, sizes = self._config, self._config.layer_inputs
        table, projection = self._weights.embeddings.input_linears()
        projected = self._weights.read_linear(projection).multiply_rows(embeddings) * config.hidden_size**-0.5
        projected = self._norms.norm_rows(projected, config.tensors.input_norm, sizes.width)
        shape = sizes.count, sizes.width
        if table is None:
            result: torch.Tensor = projected.unflatten(-1, shape)
            return result
        token_ids = torch.where(token_ids < sizes.vocab_size, token_ids, 0)
        rows = self._weights.quantization.read_embedding(self._checkpoint, table).select_outputs(token_ids)
        own = rows.decode_into(torch.empty(len(token_ids), table.in_features)).mul(sizes.width**0.5)
        inputs: torch.Tensor = ((projected + own) / 2**0.5).unflatten(-1, shape)
        return inputs

    def _score_outputs(self, x: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``outputs`` for rows of the last layer."""
        config, head = self._config, self._weights.head
        rows = self._norms.norm_rows(x, config.tensors.norm, config.hidden_size, offset=config.norms.last_offset)
        logits = self._weights.read_linear(head, outputs).multiply_rows(rows)
        if head.bias:
            logits = logits + self._view_float(head.name + ".bias", config.vocab_size)[outputs]
        self._checkpoint.release_pages(*self._weights.linear_tensors(head))
        logits = logits * config.logit_scale
        cap = config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _view_float(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.view_tensor(name, *shape).float()
