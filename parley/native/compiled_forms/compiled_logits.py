"""Calls ``vocabulary.cpp``: the choice of tokens over float32 logits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
LOGITS_SIGNATURES: dict[str, list[Any]] = {
    "scale_logits": [P, N, N, R, R, N],
    "argmax": [P, P, P, N, N, N],
    "top_k": [P, P, P, N, N, N, N],
    "softmax_totals": [P, P, P, N, N, N],
    "masked_argmax": [P, P, N],
    "apply_mask": [P, P, N],
}
LOGITS_RETURN_INT64 = ("masked_argmax",)


def scale_logits(library: ctypes.CDLL, logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(scale * logits / cap), or scale * logits without a cap; float32 [R, V], overwritten."""
    assert logits.is_contiguous()
    threads = torch.get_num_threads()
    library.scale_logits(logits.data_ptr(), *logits.shape, scale, cap or 0.0, threads)
    return logits


def argmax(library: ctypes.CDLL, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row and its lowest id: float32 [R, V] -> float32 [R], int64 [R]."""
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    values, ids = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    threads = torch.get_num_threads()
    library.argmax(logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, vocab, threads)
    return values, ids


def top_k(library: ctypes.CDLL, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row, descending, and their ids: float32 and int64 [R, count].

    Of equal logits, those with the lowest ids are chosen and come first.
    """
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    count = min(count, vocab)
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    threads = torch.get_num_threads()
    library.top_k(logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, vocab, count, threads)
    return values, ids


def softmax_totals(library: ctypes.CDLL, logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's weights: float32 [R, V] and the largest logits [R] -> int64 [R]."""
    logits, peaks, (rows, vocab) = logits.contiguous(), peaks.contiguous(), logits.shape
    sums = torch.empty(rows, dtype=torch.int64)
    threads = torch.get_num_threads()
    library.softmax_totals(logits.data_ptr(), peaks.data_ptr(), sums.data_ptr(), rows, vocab, threads)
    return sums


def masked_argmax(library: ctypes.CDLL, logits: torch.Tensor, bits: np.ndarray) -> int:
    """Return the id of the largest logit whose bit is 1: float32 [V], uint8 [V / 8 or more], lowest bit first."""
    assert logits.is_contiguous() and bits.flags.c_contiguous
    result: int = library.masked_argmax(logits.data_ptr(), bits.ctypes.data, len(logits))
    return result


def apply_mask(library: ctypes.CDLL, logits: torch.Tensor, bits: np.ndarray) -> None:
    """Set the logits whose bit is 0 to -inf, in place: float32 [V], uint8 [V / 8 or more], lowest bit first."""
    assert logits.is_contiguous() and bits.flags.c_contiguous
    library.apply_mask(logits.data_ptr(), bits.ctypes.data, len(logits))
