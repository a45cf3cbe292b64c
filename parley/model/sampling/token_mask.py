"""Excludes tokens from a draw, unless that would exclude all of them."""

from __future__ import annotations

import torch


def mask_tokens(row: torch.Tensor, tokens: torch.Tensor) -> None:
    """Set logits (float [V], in place) to -inf, unless no token would remain. ``tokens``: ids int64, or bool [V]."""
    previous = row[tokens]
    row[tokens] = float("-inf")
    if torch.isneginf(row.amax()):
        row[tokens] = previous
