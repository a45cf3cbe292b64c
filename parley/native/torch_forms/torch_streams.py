"""Torch operators on rows: sparse gates and rows with the size of others (Gemma 3n), and gates with limits (Step 3.5).

A row's result does not depend on the other rows. Torch sums a single long row in another order than one of several, so
rows are summed in pieces.
"""

from __future__ import annotations

import torch

from parley.native.layer_shape import GateLimits

PIECE = 16  # numbers of a row that are summed first
MIN_MEAN_SQUARE = 1e-5  # of rows that are divided by their size


def row_means(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row of float32 [T, width]: [T, 1]."""
    whole_width = rows.shape[1] // PIECE * PIECE
    total: torch.Tensor = rows[:, :whole_width].unflatten(1, (-1, PIECE)).sum(-1).sum(-1, keepdim=True)
    total += rows[:, whole_width:].sum(-1, keepdim=True)
    return total / rows.shape[1]


def sparsify_gates(rows: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract a threshold from each gate and make those below it 0; the gates are the first half of rows
    [T, 2 * width], which are overwritten and returned.

    The threshold of a row is the mean of its gates plus ``deviations`` of their standard deviations. Of gates with a
    normal distribution, those that stay are a fixed share (Gaussian top-k, arXiv 2506.06644).
    """
    gates = rows[:, : rows.shape[1] // 2]
    float_gates = gates.float()
    mean = row_means(float_gates)
    deviation = row_means((float_gates - mean).square()).sqrt()
    gates.copy_((float_gates - (mean + deviation * deviations)).clamp_min_(0))
    return rows


def limit_gates(rows: torch.Tensor, limits: GateLimits | None) -> torch.Tensor:
    """Limit rows [T, 2 * width] of gates and ups, in place, and return them."""
    if limits is not None:
        gate, up = rows.chunk(2, -1)
        gate.clamp_(max=limits.gate)
        up.clamp_(-limits.up, limits.up)
    return rows


def match_sizes(rows: torch.Tensor, models: torch.Tensor) -> torch.Tensor:
    """Return rows [T, width], scaled so that the mean square of each is that of the row of ``models`` [T, width]."""
    float_rows = rows.float()
    size = row_means(float_rows.square()).clamp_min_(MIN_MEAN_SQUARE).sqrt_()
    return (float_rows * (row_means(models.float().square()).sqrt_() / size)).to(rows.dtype)
