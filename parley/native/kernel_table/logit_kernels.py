"""Operators on the logits [R, V] of a step."""

from __future__ import annotations

import numpy as np
import torch

from parley.native.kernel_choice import form_for_rows


def scale_logits(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(scale * logits / cap), or scale * logits without a cap; float32 [R, V], overwritten."""
    result: torch.Tensor = form_for_rows("scale_logits", logits).scale_logits(logits, scale, cap)
    return result


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row of float32 [R, V], and its lowest id: float32 [R], int64 [R]."""
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("argmax", logits).argmax(logits)
    return result


def top_k(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row, and their ids: float32 and int64 [R, count], descending.

    Of equal logits, those with the lowest ids are chosen and come first.
    """
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("top_k", logits).top_k(logits, count)
    return result


def softmax_totals(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's integer softmax weights: int64 [R]. ``peaks`` [R] holds the largest logits."""
    result: torch.Tensor = form_for_rows("softmax_totals", logits).softmax_totals(logits, peaks)
    return result


def masked_argmax(logits: torch.Tensor, bits: np.ndarray) -> int:
    """Return the id of the largest logit whose bit is 1. logits [V]; bits uint8 [V / 8 or more], low bit first."""
    result: int = form_for_rows("masked_argmax", logits).masked_argmax(logits, bits)
    return result


def apply_mask(logits: torch.Tensor, bits: np.ndarray) -> None:
    """Set the logits whose bit is 0 to -inf, in place. Shapes as in ``masked_argmax``."""
    form_for_rows("apply_mask", logits).apply_mask(logits, bits)
