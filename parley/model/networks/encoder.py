"""Fused encoders of the BERT family: query, key and value are one linear layer, and texts are packed without padding.

Each text attends only to itself, in both directions, so a step needs no mask: adjacent texts of the same length attend
in one call. This module must not know files or configs; it receives weights as described by ``EncoderConfig``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F

from parley import native
from parley.native.torch_kernels import ONEDNN

GELU, TANH, RELU = "gelu", "gelu of tanh", "relu"


@dataclass(frozen=True)
class Form:
    """Sizes of an encoder. ``first_position``: of a text's first token. ``buckets``: number of relative positions."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    layers: int
    eps: float
    positions: int
    first: int
    activation: str
    buckets: int = 0

    @property
    def longest(self) -> int:
        """The longest text in tokens that has positions."""
        return self.positions - self.first


class Texts:
    """Texts concatenated into T tokens and positions, int64 [T] each. ``runs``: (length, texts) of equal lengths."""

    def __init__(self, texts: Sequence[list[int]], device: torch.device):
        lengths = [len(text) for text in texts]
        self.runs = [(length, sum(1 for _ in group)) for length, group in groupby(lengths)]
        whole = np.array([id for text in texts for id in text], np.int64)
        places = np.concatenate([np.arange(length) for length in lengths])
        self.token_ids = torch.from_numpy(whole).to(device)
        self.positions = torch.from_numpy(places).to(device)


class Linear:
    """A linear layer with an optional fused follow-up: an activation, or the addition of the residual stream."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        # oneDNN's layout for float32 takes another copy of the weights, saves an eighth to a third of the time, and
        # computes the follow-up in the same pass.
        self.fused = weight.device.type == "cpu" and weight.dtype == torch.float32 and ONEDNN
        self.bias = bias
        if self.fused:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        else:
            self.packed = native.pack(weight.contiguous(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._onednn(x) if self.fused else native.linear(x, self.packed)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Apply the layer and then an activation: [T, in] -> [T, out]."""
        if self.fused:
            return self._onednn(x, *ONEDNN_NAMES[activation])
        y = self(x)
        return F.relu(y) if activation == RELU else F.gelu(y, approximate="tanh" if activation == TANH else "none")

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Apply the layer and then add ``residual``: [T, in] -> [T, out]."""
        if self.fused:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return self(x) + residual

    def _onednn(self, x: torch.Tensor, after: str = "none", how: str = "") -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, after, [], how)


ONEDNN_NAMES = {GELU: ("gelu", "none"), TANH: ("gelu", "tanh"), RELU: ("relu", "")}


@dataclass(frozen=True)
class Norm:
    """Weight and bias of a LayerNorm, [hidden] each."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """The weights of one encoder layer, query, key and value merged."""

    qkv: Linear
    output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    norm: Norm


class Encoder:
    """A BERT-like encoder. ``position_embeddings`` [max_length, hidden] include that of the only token type.

    ``bias`` [heads, max_length, max_length] is added to the attention scores, in models with relative positions.
    """

    def __init__(
        self,
        form: Form,
        words: torch.Tensor,
        places: torch.Tensor,
        norm: Norm,
        layers: list[Layer],
        bias: torch.Tensor | None,
    ):
        self.form = form
        self.layers = layers
        self.device = words.device
        self._words, self._places, self._norm, self._bias = words, places, norm, bias

    def hidden(self, texts: Texts) -> torch.Tensor:
        """Return the hidden states after the last layer: [T, hidden]."""
        x = self._words.index_select(0, texts.token_ids) + self._places.index_select(0, texts.positions)
        x = self._normalize(x, self._norm)
        for layer in self.layers:
            attended = self._attend(layer.qkv(x), texts.runs)
            x = self._normalize(layer.output.added(attended, x), layer.attention_norm)
            x = self._normalize(layer.down.added(layer.up.activated(x, self.form.activation), x), layer.norm)
        return x

    def _normalize(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.layer_norm(x, (self.form.hidden,), norm.weight, norm.bias, self.form.eps)

    def _attend(self, qkv: torch.Tensor, runs: list[tuple[int, int]]) -> torch.Tensor:
        """Compute attention of each text to itself: qkv [T, 3 * hidden] -> [T, hidden]."""
        form, start = self.form, 0
        attended = qkv.new_empty(len(qkv), form.hidden)
        for length, count in runs:
            end = start + length * count
            part = qkv[start:end].view(count, length, 3, form.heads, -1).permute(2, 0, 3, 1, 4)
            bias = None if self._bias is None else self._bias[:, :length, :length].expand(count, -1, -1, -1)
            result = F.scaled_dot_product_attention(part[0], part[1], part[2], attn_mask=bias)
            attended[start:end].view(count, length, form.heads, -1).copy_(result.transpose(1, 2))
            start = end
        return attended
