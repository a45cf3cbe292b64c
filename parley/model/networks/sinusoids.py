"""Embeddings of positions that are computed instead of learnt: arXiv 1706.03762, section 3.5, as in tensor2tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_SINE_PERIOD = 10000.0  # of a sine, over 2 pi


@dataclass(frozen=True)
class Sinusoids:
    """Embeddings of ``hidden_size`` numbers: the sines of a row's number times each rate, then the cosines.

    Rates fall from 1 to 1 / MAX_SINE_PERIOD. ``padding``: the row of the padding token, which is zeros.
    """

    hidden_size: int
    padding: int | None

    def table_work_bytes(self, rows: int) -> int:
        """Return the largest memory of ``make_table`` while it computes, in bytes: the angles, sines and cosines have
        half the size of the table each, their concatenation and the result its full size."""
        return 4 * rows * self.hidden_size * 7 // 2

    def make_table(self, rows: int) -> torch.Tensor:
        """Return the first rows, float32 [rows, hidden_size]."""
        half = self.hidden_size // 2
        rates = (torch.arange(half).float() * -(math.log(MAX_SINE_PERIOD) / (half - 1))).exp()
        angles = torch.outer(torch.arange(rows).float(), rates)
        table = torch.zeros(rows, self.hidden_size)
        table[:, : 2 * half] = torch.cat((angles.sin(), angles.cos()), 1)
        if self.padding is not None and 0 <= self.padding < rows:
            table[self.padding] = 0
        return table
