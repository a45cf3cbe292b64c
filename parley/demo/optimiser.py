"""The optimiser of the built-in model: Muon for the matrices of the layers, AdamW for all other parameters.

Muon replaces each matrix's momentum by the nearest orthogonal matrix (five Newton-Schulz steps), which needs about a
third fewer tokens than AdamW here. Matrices of equal size are processed together, which matters on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from parley.demo.network import PRODUCT_DTYPE

MUON_RATE = 0.01
MUON_MOMENTUM = 0.95
MUON_DECAY = 0.05
ADAM_RATE = 0.003


def _orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the orthogonal factor of each matrix in (count, rows, columns)."""
    x = matrices.to(PRODUCT_DTYPE)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):  # the usual quintic, tuned to bring singular values near 1 quickly
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = (x.transpose(1, 2) if tall else x).float()
    return result


class MuonAdam:
    """Muon and AdamW as one optimiser with `step(scale)`; `scale` multiplies both learning rates."""

    def __init__(self, network: nn.Module) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        other_parameters: list[nn.Parameter] = []
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                groups[tuple(parameter.shape)].append(parameter)
            else:
                other_parameters.append(parameter)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]
        self.other_parameters = other_parameters
        self.adam = torch.optim.AdamW(other_parameters, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update all parameters and clear their gradients."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum.lerp_(gradients, 1 - MUON_MOMENTUM)
            updates = _orthogonalize(gradients.lerp(momentum, MUON_MOMENTUM))
            rate = MUON_RATE * scale
            size = 0.2 * max(group[0].shape) ** 0.5  # gives updates the root mean square of AdamW's
            for parameter, update in zip(group, updates, strict=True):
                parameter.mul_(1 - rate * MUON_DECAY).add_(update, alpha=-rate * size)
                parameter.grad = None
        nn.utils.clip_grad_norm_(self.other_parameters, 1.0)
        for settings in self.adam.param_groups:
            settings["lr"] = ADAM_RATE * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of both optimisers."""
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])
