"""Fused encoders of DeBERTa's second and third version, whose attention also scores the distances between tokens.

The score of a query and a key is the sum of three products: of their contents, of the query with the distance between
them as a key, and of the key with that distance as a query (arXiv 2006.03654, section 3.1). Distances have embeddings
that all layers share. Texts are packed without padding, as in ``encoder.py``, whose layers of weights it shares. This
module must not know files or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.heartbeat import beat
from parley.model.networks.activations import ACTIVATION_FUNCTIONS
from parley.model.networks.encoder import EncoderConfig, EncoderLayer, LayerNorm, PackedTexts

MAX_SCORES = 1 << 19  # scores of one head that are computed at once; bounds the memory of attention


@dataclass(frozen=True)
class DisentangledEncoderConfig(EncoderConfig):
    """Sizes of an encoder. ``span``: half the number of rows of the distances' embeddings. ``distance_buckets``: from
    half of this distance on, ranges of distances up to ``max_distance`` share a row; 0: each has its own.
    ``score_terms``: the products that are added to a score."""

    span: int = 0
    distance_buckets: int = 0
    max_distance: int = 0
    score_terms: int = 1


@dataclass(frozen=True)
class DistanceProjections:
    """The distances' embeddings as one layer's keys and as its queries, [heads, 2 * span, width] each; None if scores
    do not contain that product."""

    keys: torch.Tensor | None
    queries: torch.Tensor | None


@dataclass(frozen=True)
class EncoderConvolution:
    """A convolution over the embeddings that is added after the first layer. ``weight`` [hidden, hidden / groups,
    kernel], ``bias`` [hidden]; ``activation``: of its result."""

    weight: torch.Tensor
    bias: torch.Tensor
    norm: LayerNorm
    activation: str
    groups: int


class DisentangledEncoder:
    """An encoder of DeBERTa's second or third version.

    ``distance_rows``, int64 [2 * max_length - 1]: the row of each distance (query's position - key's), the farthest
    key after the query first. ``position_embeddings`` [max_length, hidden] include that of the first token type;
    ``second_type`` [hidden] is added for a pair's second text.
    """

    def __init__(
        self,
        config: DisentangledEncoderConfig,
        word_embeddings: torch.Tensor,
        norm: LayerNorm,
        layers: list[EncoderLayer],
        distance_rows: torch.Tensor,
        projections: list[DistanceProjections],
        *,
        position_embeddings: torch.Tensor | None = None,
        second_type: torch.Tensor | None = None,
        convolution: EncoderConvolution | None = None,
    ):
        self.config = config
        self.device = word_embeddings.device
        self._word_embeddings, self._norm, self._layers = word_embeddings, norm, layers
        self._distance_rows, self._projections = distance_rows, projections
        self._position_embeddings, self._second_type = position_embeddings, second_type
        self._convolution = convolution

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._word_embeddings.index_select(0, texts.token_ids)
        if self._position_embeddings is not None:
            x = x + self._position_embeddings.index_select(0, texts.positions)
        if texts.second_rows is not None and self._second_type is not None:
            x[texts.second_rows] += self._second_type
        x = embeddings = self._layer_norm(x, self._norm)
        rows = {length: self._rows_of_length(length) for length, _ in texts.runs}
        for index, (layer, projections) in enumerate(zip(self._layers, self._projections, strict=True)):
            beat()
            attended = self._attend_runs(layer.qkv(x), texts.runs, rows, projections)
            x = self._layer_norm(layer.output.apply_added(attended, x), layer.attention_norm)
            x = self._layer_norm(
                layer.down.apply_added(layer.up.apply_activated(x, self.config.activation), x), layer.norm
            )
            if index == 0 and self._convolution is not None:
                convolved = self._convolve_runs(embeddings, texts.runs, self._convolution)
                x = self._layer_norm(x + convolved, self._convolution.norm)
        return x

    def _layer_norm(self, x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
        return F.layer_norm(x, (self.config.hidden_size,), norm.weight, norm.bias, self.config.eps)

    def _rows_of_length(self, length: int) -> torch.Tensor:
        """Return the row of each query's distance to each key, int64 [length, length]."""
        positions = torch.arange(length, device=self.device)
        return self._distance_rows[positions[:, None] - positions + self.config.max_length - 1]

    def _attend_runs(
        self,
        qkv: torch.Tensor,
        runs: list[tuple[int, int]],
        rows: dict[int, torch.Tensor],
        projections: DistanceProjections,
    ) -> torch.Tensor:
        """Compute attention of each text to itself: qkv [T, 3 * hidden] -> [T, hidden]."""
        attended, start = qkv.new_empty(len(qkv), self.config.hidden_size), 0
        for length, count in runs:
            group = max(1, MAX_SCORES // length**2)
            for first in range(0, count, group):
                texts = min(group, count - first)
                end = start + length * texts
                part = qkv[start:end].view(texts, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
                result = self._attend_texts(part[0], part[1], part[2], rows[length], projections)
                attended[start:end].view(texts, length, self.config.heads, -1).copy_(result.transpose(1, 2))
                start = end
        return attended

    def _attend_texts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, projections: DistanceProjections
    ) -> torch.Tensor:
        """Compute attention within texts of one length: three times [texts, heads, length, width] -> the same."""
        scale = (q.shape[-1] * self.config.score_terms) ** -0.5
        low, high = int(rows[0, -1]), int(rows[-1, 0]) + 1  # rows grow with the distance; short texts need few
        index = (rows - low).expand(*q.shape[:2], -1, -1)
        bias: torch.Tensor | None = None
        if projections.keys is not None:
            bias = (q @ projections.keys[:, low:high].mT).gather(-1, index)
        if projections.queries is not None:
            by_key = (k @ projections.queries[:, low:high].mT).gather(-1, index.mT).mT
            bias = by_key if bias is None else bias + by_key
        return F.scaled_dot_product_attention(q, k, v, None if bias is None else bias * scale, scale=scale)

    def _convolve_runs(
        self, x: torch.Tensor, runs: list[tuple[int, int]], convolution: EncoderConvolution
    ) -> torch.Tensor:
        """Convolve each text by itself and activate the result: [T, hidden] -> [T, hidden]."""
        results, start = [], 0
        for length, count in runs:
            end = start + length * count
            part = x[start:end].view(count, length, -1).mT
            padding = convolution.weight.shape[-1] // 2
            y = F.conv1d(part, convolution.weight, convolution.bias, padding=padding, groups=convolution.groups)
            results.append(y.mT.reshape(end - start, -1))
            start = end
        return ACTIVATION_FUNCTIONS[convolution.activation](torch.cat(results))
