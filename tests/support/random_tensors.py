"""Random numbers for tests of kernels."""

from __future__ import annotations

import torch


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return numbers of a normal distribution; they depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
