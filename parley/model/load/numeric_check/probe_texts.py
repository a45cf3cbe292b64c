"""The numeric check of encoders: the texts that it compares, and the largest error; and how all checks measure it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley.model.checkpoint.files import LoadError

PROBE_LENGTHS = (17, 5)  # tokens of the two texts
ENCODER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # relative error (L2) of the hidden states


def probe_texts(vocab_size: int, max_length: int, lengths: Sequence[int] = PROBE_LENGTHS) -> list[list[int]]:
    """Return texts of these lengths in tokens, cut to ``max_length``; their tokens are spread over the vocabulary."""
    ids = torch.linspace(0, vocab_size - 1, sum(lengths)).long()
    return [text.tolist()[:max_length] for text in ids.split(list(lengths))]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm (L2) of the difference of two tensors of one shape, relative to that of ``expected``."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def refuse_large_error(error: float, dtype: torch.dtype = torch.float32) -> None:
    """Raise LoadError if the relative error of an encoder of ``dtype`` is too large, or no number."""
    if not error <= ENCODER_TOLERANCE[dtype]:
        raise LoadError(f"The encoder failed its numeric check (off by {error:.2g}) and is not used.")
