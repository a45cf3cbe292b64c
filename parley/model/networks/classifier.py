"""The head of a classifier: computes a logit for each class from a text's hidden states, and scores from the logits.

Knows no checkpoints: ``load/text_encoders/classifier.py`` reads the weights and chooses the function of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from parley.model.networks.encoder import LayerNorm, PackedTexts

HeadReads = Literal["first", "last", "mean", "late"]
ScoreFunction = Literal["sigmoid", "softmax", "tanh", "identity"]
SCORE_FUNCTIONS: dict[ScoreFunction, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "tanh": torch.tanh,
    "identity": lambda logits: logits,
}


@dataclass(frozen=True)
class PlainLinear:
    """A linear layer for a few rows. ``weight`` [out, in], ``bias`` [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [N, in] -> [N, out]."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class ClassifierHead:
    """A hidden layer with its activation and a norm, in families that have these, and the layer that has one output for
    each class.

    It reads the state of a text's first or last token, or the mean of all. The last token is the last one that is not
    ``padding_id``, or the first if all are.

    * ``late``: the mean is taken after the activation.
    * ``eps``: that of the norm.
    * ``labels``: names of the classes.
    * ``score_function``: turns logits into scores.
    * ``by_token``: every token has logits of its own, and ``reads`` has no meaning.
    """

    hidden_layer: PlainLinear | None
    activate: Callable[[torch.Tensor], torch.Tensor]
    output_layer: PlainLinear
    labels: list[str]
    score_function: ScoreFunction
    norm: LayerNorm | None = None
    eps: float = 0.0
    reads: HeadReads = "first"
    padding_id: int | None = None
    by_token: bool = False

    def score_texts(self, states: torch.Tensor, texts: PackedTexts) -> torch.Tensor:
        """Return the logits of texts, whose hidden states are given: [T, hidden] -> [texts, labels], or [T, labels]."""
        lengths = texts.lengths
        if self.by_token:
            x = self._apply_hidden_layer(states.float())
        elif self.reads == "late":
            x = _text_means(self._apply_hidden_layer(states.float()), lengths)
        elif self.reads == "mean":
            x = self._apply_hidden_layer(_text_means(states.float(), lengths))
        else:
            rows = _last_rows(texts, self.padding_id) if self.reads == "last" else _first_rows(texts)
            x = self._apply_hidden_layer(states.index_select(0, rows).float())
        if self.norm is not None:
            x = F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, self.eps)
        return self.output_layer(x)

    def _apply_hidden_layer(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.hidden_layer is None else self.activate(self.hidden_layer(x))

    def activate_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores of logits: [rows, labels] -> [rows, labels]."""
        return SCORE_FUNCTIONS[self.score_function](logits)


def _first_rows(texts: PackedTexts) -> torch.Tensor:
    """Return the row of each text's first token: int64 [texts]."""
    lengths = torch.tensor(texts.lengths, device=texts.token_ids.device)
    return lengths.cumsum(0) - lengths


def _last_rows(texts: PackedTexts, padding_id: int | None) -> torch.Tensor:
    """Return the row of each text's last token that is not padding, or of its first token: int64 [texts]."""
    lengths = torch.tensor(texts.lengths, device=texts.token_ids.device)
    if padding_id is None:
        return lengths.cumsum(0) - 1
    positions = texts.positions * (texts.token_ids != padding_id)
    return _first_rows(texts) + torch.stack([part.amax() for part in positions.split(texts.lengths)])


def _text_means(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the mean of each text's rows: [T, width] -> [texts, width]."""
    return torch.stack([part.mean(0) for part in rows.split(lengths)])
