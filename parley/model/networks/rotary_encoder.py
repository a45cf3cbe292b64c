"""Fused encoders of ModernBERT's family: rotary positions, gated feed-forward layers, and layers that attend nearby.

Texts are packed without padding, as in ``encoder.py``, whose layers of weights it shares. Architecture: arXiv
2412.13663, section 2.1. This module must not know files or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.heartbeat import beat
from parley.model.networks.encoder import TANH, EncoderLinear, LayerNorm, PackedTexts

QUERY_BLOCK = 256  # queries of a local layer that are computed at once; bounds the memory of their masks


@dataclass(frozen=True)
class RotaryEncoderConfig:
    """Sizes of an encoder. ``local_layers``: for each layer, whether a token attends only to those at most ``reach``
    tokens away. ``global_theta``, ``local_theta``: bases of the rotary angles in both kinds of layers."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    local_layers: tuple[bool, ...]
    eps: float
    max_length: int
    reach: int
    global_theta: float
    local_theta: float
    activation: str

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.local_layers)


@dataclass(frozen=True)
class RotaryEncoderLayer:
    """The weights of one layer. ``qkv``: query, key and value merged. ``up``: the activated half, then the gate.

    ``attention_norm`` is None in the first layer, whose input is normalized already.
    """

    attention_norm: LayerNorm | None
    qkv: EncoderLinear
    output: EncoderLinear
    norm: LayerNorm
    up: EncoderLinear
    down: EncoderLinear


def rotary_table(theta: float, width: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of all angles, float32 [length, width]; both halves of a head have the same angles."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class RotaryEncoder:
    """An encoder of ModernBERT's family."""

    def __init__(
        self,
        config: RotaryEncoderConfig,
        word_embeddings: torch.Tensor,
        embedding_norm: LayerNorm,
        layers: list[RotaryEncoderLayer],
        final_norm: LayerNorm,
    ):
        self.config = config
        self.device = word_embeddings.device
        self._word_embeddings, self._embedding_norm = word_embeddings, embedding_norm
        self._layers, self._final_norm = layers, final_norm
        width = config.hidden // config.heads
        self._rotary_tables = {
            is_local: tuple(part.to(self.device) for part in rotary_table(theta, width, config.max_length))
            for is_local, theta in ((False, config.global_theta), (True, config.local_theta))
        }

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._normalize(self._word_embeddings.index_select(0, texts.token_ids), self._embedding_norm)
        angles = {
            is_local: tuple(part.index_select(0, texts.positions)[:, None] for part in table)
            for is_local, table in self._rotary_tables.items()
        }
        for layer, is_local in zip(self._layers, self.config.local_layers, strict=True):
            beat()
            normalized = x if layer.attention_norm is None else self._normalize(x, layer.attention_norm)
            qkv = layer.qkv(normalized).view(len(x), 3, self.config.heads, -1)
            cosine, sine = angles[is_local]
            attended = self._attend_runs(
                _rotate(qkv[:, 0], cosine, sine), _rotate(qkv[:, 1], cosine, sine), qkv[:, 2], texts.runs, is_local
            )
            x = layer.output.apply_added(attended, x)
            activated, gate = layer.up(self._normalize(x, layer.norm)).chunk(2, -1)
            x = layer.down.apply_added(self._activate(activated) * gate, x)
        return self._normalize(x, self._final_norm)

    def _normalize(self, x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
        return F.layer_norm(x, (self.config.hidden,), norm.weight, norm.bias, self.config.eps)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh" if self.config.activation == TANH else "none")

    def _attend_runs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: list[tuple[int, int]], is_local: bool
    ) -> torch.Tensor:
        """Compute attention of each text to itself: three times [T, heads, width] -> [T, hidden]."""
        attended, start = q.new_empty(len(q), self.config.hidden), 0
        for length, count in runs:
            end = start + length * count
            queries, keys, values = (
                part[start:end].view(count, length, self.config.heads, -1).transpose(1, 2) for part in (q, k, v)
            )
            if is_local and length > self.config.reach + 1:
                result = self._attend_nearby(queries, keys, values)
            else:
                result = F.scaled_dot_product_attention(queries, keys, values)
            attended[start:end].view(count, length, self.config.heads, -1).copy_(result.transpose(1, 2))
            start = end
        return attended

    def _attend_nearby(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention to the tokens within reach: three times [texts, heads, length, width] -> the same."""
        length, reach, results = q.shape[2], self.config.reach, []
        positions = torch.arange(length, device=q.device)
        for start in range(0, length, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, length)
            first, last = max(0, start - reach), min(length, end + reach)
            mask = (positions[start:end, None] - positions[first:last]).abs() <= reach
            results.append(
                F.scaled_dot_product_attention(
                    q[:, :, start:end], k[:, :, first:last], v[:, :, first:last], attn_mask=mask
                )
            )
        return torch.cat(results, 2)


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [T, heads, width] by the angles of their positions [T, 1, width]."""
    low, high = x.chunk(2, -1)
    return x * cosine + torch.cat((-high, low), -1) * sine
