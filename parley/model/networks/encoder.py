"""Fused encoders of the BERT family: query, key and value are one linear layer, and texts are packed without padding.

Each text attends only to itself, in both directions, so a step needs no mask: adjacent texts of the same length attend
in one call. This module must not know files or configs; it receives weights as described by ``EncoderConfig``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from parley import native
from parley.heartbeat import beat
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, GELU, GELU_TANH, RELU
from parley.native.torch_forms.torch_kernels import HAS_ONEDNN


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder. ``first_position``: the position of a text's first token. ``buckets``: number of relative
    positions. ``embedding``: width of an embedding, if a linear layer projects embeddings to hidden states, else 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    eps: float
    positions: int
    first_position: int
    activation: str
    buckets: int = 0
    embedding: int = 0

    @property
    def max_length(self) -> int:
        """The longest text in tokens that has positions."""
        return self.positions - self.first_position

    @property
    def embedding_width(self) -> int:
        """Width of an embedding."""
        return self.embedding or self.hidden_size


class EncoderSizes(Protocol):
    """The sizes that every encoder has."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def hidden_size(self) -> int:
        """Width of a token's hidden state."""

    @property
    def max_length(self) -> int:
        """The longest text in tokens that has positions."""


class EncoderNetwork(Protocol):
    """An encoder of any family."""

    device: torch.device

    @property
    def config(self) -> EncoderSizes:
        """The sizes of the encoder."""

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""


class PackedTexts:
    """Texts concatenated into T tokens and positions, int64 [T] each. ``runs``: (length, texts) of equal lengths.

    ``second_starts``: for each text, where the second text of a pair begins, or 0. ``second_rows``: the rows of all
    tokens of such second texts, int64; None if there are none.
    """

    def __init__(self, texts: Sequence[list[int]], device: torch.device, second_starts: Sequence[int] = ()):
        self.lengths = [len(text) for text in texts]
        self.runs = [(length, sum(1 for _ in group)) for length, group in groupby(self.lengths)]
        token_ids = np.array([token_id for text in texts for token_id in text], np.int64)
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        self.token_ids = torch.from_numpy(token_ids).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self.second_rows: torch.Tensor | None = None
        if any(second_starts):
            starts = np.repeat(np.array(second_starts), self.lengths)
            self.second_rows = torch.from_numpy(np.flatnonzero((starts > 0) & (positions >= starts))).to(device)


class EncoderLinear:
    """A linear layer, optionally fused with an activation or with the addition of the residual stream."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        # oneDNN's layout for float32 needs a second copy of the weights, saves an eighth to a third of the time, and
        # computes the fused operation in the same pass.
        self.fused = weight.device.type == "cpu" and weight.dtype == torch.float32 and HAS_ONEDNN
        self.bias = bias
        if self.fused:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self.packed = native.pack_weight(weight.contiguous(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [T, in] -> [T, out]."""
        return self._apply_onednn(x) if self.fused else native.linear(x, self.packed)

    def apply_activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Apply the layer and then an activation: [T, in] -> [T, out]."""
        if self.fused:
            return self._apply_onednn(x, *ONEDNN_NAMES[activation])
        return ACTIVATION_FUNCTIONS[activation](self(x))

    def apply_added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Apply the layer and then add ``residual``: [T, in] -> [T, out]."""
        if self.fused:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return result
        return self(x) + residual

    def _apply_onednn(self, x: torch.Tensor, activation: str = "none", algorithm: str = "") -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], algorithm)
        return result


ONEDNN_NAMES = {GELU: ("gelu", "none"), GELU_TANH: ("gelu", "tanh"), RELU: ("relu", "")}


@dataclass(frozen=True)
class LayerNorm:
    """Weight and bias of a LayerNorm, [hidden] each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class EncoderLayer:
    """The weights of one encoder layer, query, key and value merged."""

    qkv: EncoderLinear
    output: EncoderLinear
    attention_norm: LayerNorm
    up: EncoderLinear
    down: EncoderLinear
    norm: LayerNorm


class Encoder:
    """A BERT-like encoder. ``position_embeddings`` [max_length, hidden] include that of the first token type.

    ``bias`` [heads, max_length, max_length] is added to the attention scores, in models with relative positions.
    ``second_type`` [hidden] is added to the embeddings of a pair's second text, in models with two token types. With
    ``projection``, embeddings have ``embedding_width`` numbers, and the projection to [hidden] follows their norm.
    """

    def __init__(
        self,
        config: EncoderConfig,
        word_embeddings: torch.Tensor,
        position_embeddings: torch.Tensor,
        norm: LayerNorm,
        layers: list[EncoderLayer],
        bias: torch.Tensor | None,
        second_type: torch.Tensor | None = None,
        projection: EncoderLinear | None = None,
    ):
        self.config = config
        self.layers = layers
        self._projection = projection
        self.device = word_embeddings.device
        self._word_embeddings = word_embeddings
        self._position_embeddings = position_embeddings
        self._norm = norm
        self._bias = bias
        self._second_type = second_type

    def encode_packed(self, texts: PackedTexts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._word_embeddings.index_select(0, texts.token_ids) + self._position_embeddings.index_select(
            0, texts.positions
        )
        if texts.second_rows is not None and self._second_type is not None:
            x[texts.second_rows] += self._second_type
        x = self._layer_norm(x, self._norm)
        if self._projection is not None:
            x = self._projection(x)
        for layer in self.layers:
            beat()
            attended = self._attend_runs(layer.qkv(x), texts.runs)
            x = self._layer_norm(layer.output.apply_added(attended, x), layer.attention_norm)
            x = self._layer_norm(
                layer.down.apply_added(layer.up.apply_activated(x, self.config.activation), x), layer.norm
            )
        return x

    def _layer_norm(self, x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self.config.eps)

    def _attend_runs(self, qkv: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
        """Compute attention of each text to itself: qkv [T, 3 * hidden] -> [T, hidden]."""
        config, start = self.config, 0
        attended = qkv.new_empty(len(qkv), config.hidden_size)
        for length, count in runs:
            end = start + length * count
            part = qkv[start:end].view(count, length, 3, config.heads, -1).permute(2, 0, 3, 1, 4)
            bias = None if self._bias is None else self._bias[:, :length, :length].expand(count, -1, -1, -1)
            result = F.scaled_dot_product_attention(part[0], part[1], part[2], attn_mask=bias)
            attended[start:end].view(count, length, config.heads, -1).copy_(result.transpose(1, 2))
            start = end
        return attended
