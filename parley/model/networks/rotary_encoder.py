"""Fused encoders with rotary positions: ModernBERT, NomicBERT, GTE and jina-embeddings-v3.

ModernBERT (arXiv 2412.13663, section 2.1) normalizes the input of a sublayer and has layers with local attention;
NomicBERT (arXiv 2402.01613, section 3) and GTE (arXiv 2407.19669, section 2) normalize the sum after a sublayer, as
BERT does. Texts are packed without padding, as in ``encoder.py``, whose layers of weights it shares. This module must
not know files or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parley.heartbeat import beat
from parley.model.networks.activations import ACTIVATION_FUNCTIONS
from parley.model.networks.encoder import EncoderLinear, LayerNorm, PackedTexts
from parley.model.networks.encoder_mixtures import EncoderMixture

QUERY_BLOCK = 256  # queries of a local layer that are computed at once; bounds the memory of their masks


@dataclass(frozen=True)
class RotaryEncoderConfig:
    """Sizes of an encoder.

    * ``local_layers``: for each layer, whether a token attends only to those at most ``reach`` tokens away.
    * ``global_theta``, ``local_theta``: bases of the rotary angles in both kinds of layers.
    * ``angle_divisor`` divides the angles of all.
    * ``normalizes_sums``: norms follow the sublayers instead of preceding them, and there is no final one.
    * ``is_gated``: the activated half of a feed-forward layer is multiplied by the other.
    * ``experts``, ``experts_per_token``: how many a mixture has, and how many of them a token uses; 0 without mixtures.
      Each ``mixture_step``-th layer has one, beginning with the second layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    local_layers: tuple[bool, ...]
    eps: float
    max_length: int
    reach: int
    global_theta: float
    local_theta: float
    activation: str
    angle_divisor: float = 1.0
    normalizes_sums: bool = False
    is_gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    mixture_step: int = 0

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.local_layers)

    def has_mixture(self, layer: int) -> bool:
        """Whether the feed-forward layer with this number is a mixture of experts."""
        return self.mixture_step > 0 and layer % self.mixture_step == 1


@dataclass(frozen=True)
class RotaryEncoderLayer:
    """The weights of one layer. ``qkv``: query, key and value merged. ``up``: the activated half, then the gate
    if there is one. A layer with a ``mixture`` has that instead of ``up`` and ``down``.

    ``attention_norm`` belongs to the attention, ``norm`` to the feed-forward layer. If norms precede sublayers,
    ``attention_norm`` is None in the first layer, whose input is normalized already.
    """

    attention_norm: LayerNorm | None
    qkv: EncoderLinear
    output: EncoderLinear
    norm: LayerNorm
    up: EncoderLinear | None = None
    down: EncoderLinear | None = None
    mixture: EncoderMixture | None = None


def rotary_table(theta: float, divisor: float, width: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of all angles, float32 [length, width]; both halves of a head have the same angles."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width) / divisor
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class RotaryEncoder:
    """An encoder with rotary positions. ``word_embeddings`` include the embedding of the first token type.

    ``final_norm`` is None if norms follow the sublayers. ``second_type`` [hidden] is added to the embeddings of a
    pair's second text, in models with two token types.
    """

    def __init__(
        self,
        config: RotaryEncoderConfig,
        word_embeddings: torch.Tensor,
        embedding_norm: LayerNorm,
        layers: list[RotaryEncoderLayer],
        final_norm: LayerNorm | None,
        second_type: torch.Tensor | None = None,
    ):
        self.config = config
        self.device = word_embeddings.device
        self._word_embeddings, self._embedding_norm, self._second_type = word_embeddings, embedding_norm, second_type
        self._layers, self._final_norm = layers, final_norm
        self._activate = ACTIVATION_FUNCTIONS[config.activation]
        width = config.hidden_size // config.heads
        self._rotary_tables = {
            is_local: tuple(
                part.to(self.device) for part in rotary_table(theta, config.angle_divisor, width, config.max_length)
            )
            for is_local, theta in ((False, config.global_theta), (True, config.local_theta))
            if is_local in config.local_layers
        }

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._word_embeddings.index_select(0, texts.token_ids)
        if texts.second_rows is not None and self._second_type is not None:
            x[texts.second_rows] += self._second_type
        x = self._normalize_rows(x, self._embedding_norm)
        angles = {
            is_local: tuple(part.index_select(0, texts.positions)[:, None] for part in table)
            for is_local, table in self._rotary_tables.items()
        }
        norms_before, norms_after = (False, True) if self.config.normalizes_sums else (True, False)
        for layer, is_local in zip(self._layers, self.config.local_layers, strict=True):
            beat()
            normalized = self._normalize_rows(x, layer.attention_norm, norms_before)
            qkv = layer.qkv(normalized).view(len(x), 3, self.config.heads, -1)
            cosine, sine = angles[is_local]
            attended = self._attend_runs(
                _rotate_heads(qkv[:, 0], cosine, sine),
                _rotate_heads(qkv[:, 1], cosine, sine),
                qkv[:, 2],
                texts.runs,
                is_local,
            )
            x = self._normalize_rows(layer.output.apply_added(attended, x), layer.attention_norm, norms_after)
            x = self._feed_forward(layer, self._normalize_rows(x, layer.norm, norms_before), x)
            x = self._normalize_rows(x, layer.norm, norms_after)
        return self._normalize_rows(x, self._final_norm)

    def _normalize_rows(self, x: torch.Tensor, norm: LayerNorm | None, is_here: bool = True) -> torch.Tensor:
        """Return ``x`` normalized, or unchanged if ``norm`` is None or not ``is_here``."""
        if norm is None or not is_here:
            return x
        return F.layer_norm(x, (self.config.hidden_size,), norm.weight, norm.bias, self.config.eps)

    def _feed_forward(self, layer: RotaryEncoderLayer, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Apply a feed-forward layer and add ``residual``: twice [T, hidden] -> [T, hidden]."""
        if layer.mixture is not None:
            return layer.mixture.apply_added(x, residual, self._activate)
        assert layer.up is not None and layer.down is not None
        return layer.down.apply_added(self._apply_up(layer.up, x), residual)

    def _apply_up(self, up: EncoderLinear, x: torch.Tensor) -> torch.Tensor:
        """Return the inner numbers of a feed-forward layer: [T, hidden] -> [T, intermediate]."""
        if not self.config.is_gated:
            return self._activate(up(x))
        activated, gate = up(x).chunk(2, -1)
        return self._activate(activated) * gate

    def _attend_runs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: list[tuple[int, int]], is_local: bool
    ) -> torch.Tensor:
        """Compute attention of each text to itself: three times [T, heads, width] -> [T, hidden]."""
        attended, start = q.new_empty(len(q), self.config.hidden_size), 0
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
        """Compute local attention: each token attends to those at most ``reach`` tokens away. Three times [texts,
        heads, length, width] -> the same."""
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


def _rotate_heads(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [T, heads, width] by the angles of their positions [T, 1, width]."""
    first_half, second_half = x.chunk(2, -1)
    return x * cosine + torch.cat((-second_half, first_half), -1) * sine
