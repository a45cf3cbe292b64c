"""Mixtures of experts in encoders: feed-forward layers of which each token uses a few (nomic-embed-text-v2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parley.model.networks.encoder import EncoderLinear


@dataclass(frozen=True)
class EncoderMixture:
    """The experts of a layer, and the ``router`` that scores them. ``ups``, ``downs``: the layers of each expert, which
    have no biases. ``bias`` [hidden] is added once to their sum. Each token uses the ``experts_per_token`` experts with
    the best scores; their weights are their shares of a softmax over all experts, which are not normalized again.
    """

    router: EncoderLinear
    ups: list[EncoderLinear]
    downs: list[EncoderLinear]
    bias: torch.Tensor
    experts_per_token: int

    def apply_added(
        self, x: torch.Tensor, residual: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Apply the experts and add ``residual``: twice [T, hidden] -> [T, hidden]. A token's experts are added in
        their order, so its numbers do not depend on the others."""
        shares, experts = self.router(x).softmax(-1).topk(self.experts_per_token, -1)
        result = self.bias.expand_as(x).clone()
        for number, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            rows, slots = (experts == number).nonzero(as_tuple=True)
            if len(rows):
                result[rows] += down(activate(up(x[rows]))) * shares[rows, slots, None]
        return result + residual
