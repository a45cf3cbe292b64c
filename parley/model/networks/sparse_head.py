"""The head of a sparse embedding model (SPLADE, arXiv 2109.10086, section 3): a weight of each token of the vocabulary.

The head of a masked language model computes the logits of each token's hidden state. Negative logits become 0, others
are damped by log(1 + x). The weight of a vocabulary token is the largest of these values over the text's tokens, or
their sum. Knows no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from parley.heartbeat import beat
from parley.model.networks.classifier import PlainLinear
from parley.model.networks.encoder import LayerNorm
from parley.model.networks.pooling import HiddenRows, SparsePooling

MAX_LOGITS_AT_ONCE = 1 << 24  # bounds the memory of logits; a vocabulary has up to 250,000 tokens
SPARSE_PAIR = np.dtype([("token", "<u4"), ("weight", "<f4")])


@dataclass(frozen=True)
class SparseHead:
    """A masked language model's head: a hidden layer with its activation, a norm, and the layer that makes logits.

    ``eps``: of the norm. ``pooling``: how logits become weights.
    """

    hidden_layer: PlainLinear
    activate: Callable[[torch.Tensor], torch.Tensor]
    norm: LayerNorm
    eps: float
    output_layer: PlainLinear
    pooling: SparsePooling

    @property
    def vocabulary(self) -> int:
        """The number of weights of a text."""
        return self.output_layer.weight.shape[0]

    def weigh_texts(self, states: torch.Tensor, lengths: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the weights of each text, float32 [vocabulary]. ``states``: hidden states of all texts, [T, hidden]."""
        x = self.activate(self.hidden_layer(states.float()))
        x = F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, self.eps)
        sums = self.pooling.strategy == "sum"
        remaining = iter(lengths)
        missing, total = next(remaining, 0), x.new_zeros(self.vocabulary)
        for rows in x.split(max(1, MAX_LOGITS_AT_ONCE // self.vocabulary)):
            beat()
            logits = self.output_layer(rows).relu_()
            if sums:
                logits = self._damp_logits(logits)
            while len(logits):  # the rows of a text may be in several parts, and a part may have those of several texts
                part, logits = logits[:missing], logits[missing:]
                total = total + part.sum(0) if sums else torch.maximum(total, part.amax(0))
                missing -= len(part)
                if not missing:
                    yield (
                        total if sums else self._damp_logits(total)
                    )  # the logarithm keeps the order, so it can come last
                    missing, total = next(remaining, 0), torch.zeros_like(total)

    def _damp_logits(self, logits: torch.Tensor) -> torch.Tensor:
        for _ in range(self.pooling.logarithms):
            logits = logits.log1p()
        return logits


def encode_sparse_vector(weights: HiddenRows) -> bytes | None:
    """Return the tokens whose weight is not 0, in ascending order, with their weights: pairs of ``SPARSE_PAIR``; None
    if a weight is not finite. ``weights``: float32 [vocabulary]."""
    if not np.isfinite(weights).all():
        return None
    tokens = np.flatnonzero(weights)
    pairs = np.empty(len(tokens), SPARSE_PAIR)
    pairs["token"], pairs["weight"] = tokens, weights[tokens]
    return pairs.tobytes()
