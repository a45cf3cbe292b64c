"""What an adapter adds to a linear layer, as it is read. Plain data: ``torch_lora`` says what is computed with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """scale * up [out, rank] * down [rank, into], added to ``out`` outputs from ``first`` on. Numbers of any kind."""

    first: int
    down: torch.Tensor
    up: torch.Tensor
    scale: float
