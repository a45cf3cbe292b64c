"""The encoder of jina-embeddings-v2: shaped as BERT, with scores that fall with the distance and gated layers.

The slopes are those of ALiBi (arXiv 2108.12409), with the same distance in both directions (arXiv 2310.19923, section
3). Texts are packed without padding, as in ``encoder.py``, whose layers of weights it shares. This module must not know
files or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.heartbeat import beat
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, GELU
from parley.model.networks.encoder import EncoderLinear, LayerNorm, PackedTexts

QUERY_BLOCK = 256  # queries that are computed at once; bounds the memory of the distances


@dataclass(frozen=True)
class SlopedEncoderConfig:
    """Sizes of an encoder. ``slopes``: of each head; a score falls by it with each token of distance."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    eps: float
    max_length: int
    slopes: tuple[float, ...]

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.slopes)


@dataclass(frozen=True)
class SlopedEncoderLayer:
    """The weights of one layer. ``qkv``: query, key and value merged. ``up``: the activated half, then the gate.

    ``query_norm`` and ``key_norm`` are over all heads. ``second_norm`` follows ``attention_norm``, after the layer's
    input is added once more. Each of them may be absent.
    """

    qkv: EncoderLinear
    output: EncoderLinear
    attention_norm: LayerNorm
    up: EncoderLinear
    down: EncoderLinear
    norm: LayerNorm
    query_norm: LayerNorm | None = None
    key_norm: LayerNorm | None = None
    second_norm: LayerNorm | None = None


class SlopedEncoder:
    """An encoder without positions but for distances. ``word_embeddings`` include the embedding of the first token
    type; ``second_type`` [hidden] is added to those of a pair's second text."""

    def __init__(
        self,
        config: SlopedEncoderConfig,
        word_embeddings: torch.Tensor,
        embedding_norm: LayerNorm,
        layers: list[SlopedEncoderLayer],
        second_type: torch.Tensor | None = None,
    ):
        self.config = config
        self.device = word_embeddings.device
        self._word_embeddings, self._embedding_norm, self._second_type = word_embeddings, embedding_norm, second_type
        self._layers = layers
        self._slopes = torch.tensor(config.slopes, device=self.device)[:, None, None]

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._word_embeddings.index_select(0, texts.token_ids)
        if texts.second_rows is not None and self._second_type is not None:
            x[texts.second_rows] += self._second_type
        x = self._normalize_rows(x, self._embedding_norm)
        for layer in self._layers:
            beat()
            query, key, value = layer.qkv(x).chunk(3, -1)
            attended = self._attend_runs(
                self._normalize_rows(query, layer.query_norm),
                self._normalize_rows(key, layer.key_norm),
                value,
                texts.runs,
            )
            added = self._normalize_rows(layer.output.apply_added(attended, x), layer.attention_norm)
            if layer.second_norm is not None:
                added = self._normalize_rows(x + added, layer.second_norm)
            activated, gate = layer.up(added).chunk(2, -1)
            inner = ACTIVATION_FUNCTIONS[GELU](activated) * gate
            x = self._normalize_rows(layer.down.apply_added(inner, added), layer.norm)
        return x

    def _normalize_rows(self, x: torch.Tensor, norm: LayerNorm | None) -> torch.Tensor:
        if norm is None:
            return x
        return F.layer_norm(x, (self.config.hidden_size,), norm.weight, norm.bias, self.config.eps)

    def _attend_runs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Compute attention of each text to itself: three times [T, hidden] -> [T, hidden]."""
        attended, start = torch.empty_like(q, memory_format=torch.contiguous_format), 0
        for length, count in runs:
            end = start + length * count
            queries, keys, values = (
                part[start:end].view(count, length, self.config.heads, -1).transpose(1, 2) for part in (q, k, v)
            )
            result = attended[start:end].view(count, length, self.config.heads, -1)
            positions = torch.arange(length, device=q.device)
            for first in range(0, length, QUERY_BLOCK):
                block = slice(first, min(first + QUERY_BLOCK, length))
                falls = (positions[block, None] - positions).abs() * -self._slopes
                part = F.scaled_dot_product_attention(queries[:, :, block], keys, values, attn_mask=falls[None])
                result[:, block].copy_(part.transpose(1, 2))
            start = end
        return attended
