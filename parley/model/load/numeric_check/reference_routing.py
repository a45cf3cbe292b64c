"""The router of a mixture of experts by its definition, for the numeric check."""

from __future__ import annotations

import math

import torch

from parley.native.layer_shape import Routing


def expert_shares(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """Return the weight of each expert for each row, 0 if it is not chosen: float32 [T, experts] for logits alike."""
    if routing.margin >= 0:
        return sparse_shares(logits, routing)
    scores = expert_scores(logits, routing)
    basis = logits if routing.chooses_by_logits else scores
    choice = basis if bias is None else basis + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(routing.group_best).values.sum(-1).topk(routing.chosen_groups).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, best, False)
        choice = choice.masked_fill(outside.repeat_interleave(grouped.shape[2], 1), -math.inf)
    return weigh_shares(scores, choice.topk(routing.experts_per_token).indices, routing)


def expert_scores(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the scores of all experts, float32 [T, experts]."""
    if routing.sqrt_softplus:
        return (1 + logits.double().exp()).log().sqrt().float()
    return logits.sigmoid() if routing.sigmoid else logits.softmax(-1)


def weigh_shares(scores: torch.Tensor, chosen: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the result of ``expert_shares`` for the experts ``chosen`` int64 [T, N], of which some may be equal."""
    shares = torch.zeros_like(scores).scatter_add(1, chosen, scores.gather(1, chosen))
    return routing.scale * (shares / shares.sum(-1, keepdim=True) if routing.normalized else shares)


def sparse_shares(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the result of ``expert_shares`` for a sparse mixer."""
    shares, remaining = torch.zeros_like(logits), logits.clone()
    for _ in range(routing.experts_per_token):
        best_logit, expert = remaining.max(-1, keepdim=True)
        close = best_logit - logits <= routing.margin * logits.abs().clamp_min(best_logit)
        share = remaining.masked_fill(~close, -math.inf).softmax(-1).gather(1, expert)
        shares.scatter_(1, expert, routing.scale * share)
        remaining.scatter_(1, expert, -math.inf)
    return shares
