"""Mixtures of experts in torch operators: the definitions of the kernels, and their implementation without them."""

from __future__ import annotations

from dataclasses import replace

import torch

from parley.native.experts import Experts, expert_of
from parley.native.layer_shape import GateLimits, Routing
from parley.native.packed import TORCH_WEIGHTS, PackedWeight
from parley.native.torch_forms import torch_kernels
from parley.native.torch_forms.torch_int8 import TorchInt8Packed, TorchRows, quantize_rows
from parley.native.torch_forms.torch_streams import limit_gates


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row, best first, int64 [T, chosen], and their weights float32 [T, chosen].

    ``logits`` float32 [T, experts]; ``bias`` float32 [experts] is added for the choice only. Of equal scores,
    the expert with the lower number is chosen first. The weight of a shared expert comes last, and so does its logit.
    """
    own_logits = logits[:, : routing.experts]
    ids, weights = (_mix_sparsely if routing.margin >= 0 else _choose_best)(own_logits, bias, routing)
    return ids, _complete_weights(weights, logits, routing)


def weigh_experts(logits: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the weights of experts that are not chosen by their scores, float32 as of ``route``. ``ids`` int64 [T,
    chosen]."""
    weights = _normalize_weights(_score_experts(logits[:, : routing.experts], routing).gather(1, ids), routing)
    return _complete_weights(weights, logits, routing)


def _complete_weights(weights: torch.Tensor, logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the weights of chosen experts with their scale, and with that of the shared expert."""
    weights = weights * routing.scale
    if routing.shared:
        shared = _sigmoid(logits[:, routing.experts :]) if routing.shared == 2 else weights.new_ones(len(weights), 1)
        weights = torch.cat((weights, shared), -1)
    return weights


def _score_experts(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the scores of all experts, float32 [T, experts]."""
    if routing.sqrt_softplus:  # in float64, because the last bit of a float32 depends on its index in the tensor
        scores: torch.Tensor = torch.logaddexp(logits.double(), logits.new_zeros((), dtype=torch.float64)).sqrt()
        return scores.float()
    return _sigmoid(logits) if routing.sigmoid else logits.softmax(-1)


def _normalize_weights(weights: torch.Tensor, routing: Routing) -> torch.Tensor:
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if routing.normalized else weights


def _choose_best(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts with the largest scores, and their weights before ``scale``."""
    scores = _score_experts(logits, routing)
    basis = logits if routing.chooses_by_logits else scores
    choice = basis if bias is None else basis + bias
    if routing.groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), float("-inf"))
    ids = _best_numbers(choice, routing.experts_per_token)
    return ids, _normalize_weights(scores.gather(1, ids), routing)


def _mix_sparsely(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choice of a sparse mixer, which has no bias, and its weights before ``scale``."""
    remaining_logits, ids, weights = logits, [], []
    for _ in range(routing.experts_per_token):
        best = _best_numbers(remaining_logits, 1)
        best_logits = remaining_logits.gather(1, best)
        is_far = best_logits - logits > routing.margin * torch.maximum(logits.abs(), best_logits)
        shares = remaining_logits.masked_fill(is_far, float("-inf")).softmax(-1)
        ids.append(best)
        weights.append(shares.gather(1, best))
        remaining_logits = remaining_logits.scatter(1, best, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return sigmoids. The last bit of torch's own depends on an element's index in the tensor."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best_numbers(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers of the largest values [T, N] of each row: int64 [T, count]."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return whether each expert is in one of the chosen groups: bool [T, experts]."""
    grouped = choice.unflatten(1, (routing.groups, -1))
    sums = grouped.topk(routing.group_best, -1).values.sum(-1)
    is_chosen = torch.zeros_like(sums, dtype=torch.bool)
    is_chosen.scatter_(1, _best_numbers(sums, routing.chosen_groups), True)
    return is_chosen[..., None].expand_as(grouped).flatten(1)


def mix_experts(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    weighs_inputs: bool = False,
    limits: GateLimits | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' MLPs for rows x [T, hidden]: [T, hidden].

    ``ids`` and ``weights``: from ``route``. ``shared`` [T, hidden]: the shared expert's outputs. A row's sum is
    computed in float32, in the order of its ``ids``, and the shared expert last. ``weighs_inputs``: weights multiply
    the inputs of the chosen experts, not their outputs. ``limits``: of the gates and ups of the chosen experts.
    """
    outputs = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = expert_of(experts.gate_up, expert), expert_of(experts.down, expert)
        assert isinstance(gate_up, TORCH_WEIGHTS) and isinstance(down, TORCH_WEIGHTS)
        inputs = _weighed_rows(x[rows], weights[rows, slots], gate_up) if weighs_inputs else x[rows]
        gates = limit_gates(torch_kernels.linear(inputs, gate_up), limits)
        active = torch_kernels.activate(gates, activation, is_gated=experts.is_gated)
        outputs[rows, slots] = torch_kernels.lm_head_logits(active, down)
    total = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(ids.shape[1]):
        total += outputs[:, slot] * (1 if weighs_inputs else weights[:, slot, None])
    if shared is not None:
        total += weights[:, -1:] * shared.float()
    return total.to(x.dtype)


def _weighed_rows(x: torch.Tensor, weights: torch.Tensor, reader: PackedWeight) -> torch.Tensor | TorchRows:
    """Return rows x [R, hidden] times weights [R], quantized before if ``reader`` takes int8."""
    if not isinstance(reader, TorchInt8Packed):
        return (x * weights[:, None]).to(x.dtype)
    rows = quantize_rows(x)
    return replace(rows, scales=rows.scales * weights)
