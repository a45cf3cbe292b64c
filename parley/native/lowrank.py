"""The part of a LoRA adapter for one linear layer, as loaded. Plain data; ``torch_lora`` defines the computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """scale * up [out, rank] * down [rank, in_features], added to ``out`` outputs starting at ``first``. Any dtype."""

    first: int
    down: torch.Tensor
    up: torch.Tensor
    scale: float
