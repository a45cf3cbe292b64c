"""The texts that the numeric check of an encoder compares, and the error that all numeric checks measure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PROBE_LENGTHS = (17, 5)  # tokens of the two texts


def probe_texts(vocab_size: int, max_length: int, lengths: Sequence[int] = PROBE_LENGTHS) -> list[list[int]]:
    """Return texts of these lengths in tokens, cut to ``max_length``; their tokens are spread over the vocabulary."""
    ids = torch.linspace(0, vocab_size - 1, sum(lengths)).long()
    return [text.tolist()[:max_length] for text in ids.split(list(lengths))]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm (L2) of the difference of two tensors of one shape, relative to that of ``expected``."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
