"""The largest logits and the softmax totals of rows, in torch operators.

A vocabulary is long: the largest logits are found through the maxima of blocks, and totals are summed in portions of
rows. A weight is floor(2^40 * exp(x)), with x the distance to the row's largest logit: integer sums are exact in any
order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

ARGMAX_BLOCK = 32  # tokens per block; the maxima of blocks show where the best tokens are

WEIGHT_SCALE = 2.0**40  # a vocabulary of up to 2^22 tokens sums without overflow
ZERO_WEIGHT_BELOW = -64.0  # lower numbers have weight 0, and are raised to this, as exp(-inf) is several times slower
PORTION_CELLS = 1 << 18  # logits whose weights are computed at once: bounds memory, and fits in the CPU cache


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row and its id: the lowest of equal ones. A NaN counts as the largest.

    float32 [R, V] -> float32 [R], int64 [R]. (torch's argmax alone is many times slower than amax.)
    """
    blocks = _vocabulary_blocks(logits)
    block = blocks.amax(-1).argmax(-1)
    values, index = blocks[torch.arange(len(blocks), device=blocks.device), block].max(-1)
    return values, block * ARGMAX_BLOCK + index


def top_k(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row, descending, and their ids. Ties are broken arbitrarily.

    float32 [R, V] -> float32, int64 [R, count]. The ``count`` blocks with the largest maxima contain them all.
    """
    vocab = logits.shape[1]
    blocks = _vocabulary_blocks(logits)
    if count * 4 > blocks.shape[1]:
        values, ids = logits.topk(min(count, vocab))
        return values, ids
    block_ids = blocks.amax(-1).topk(count, sorted=False).indices
    candidates = blocks.gather(1, block_ids[:, :, None].expand(-1, -1, ARGMAX_BLOCK)).flatten(1)
    values, index = candidates.topk(count)
    ids = block_ids.gather(1, index // ARGMAX_BLOCK) * ARGMAX_BLOCK + index % ARGMAX_BLOCK
    return values, ids


def softmax_totals(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's weights: float32 [R, V] and the largest logits, finite [R] -> int64 [R]."""
    sums = [integer_weights(logits[rows] - peaks[rows, None]).sum(-1) for rows in row_portions(logits)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=logits.device)


def integer_weights(x: torch.Tensor) -> torch.Tensor:
    """Return the integer weights of shifted logits x <= 0: float32 -> int64, at most 2^40."""
    return x.clamp(min=ZERO_WEIGHT_BELOW).exp_().mul_(WEIGHT_SCALE).long()


def row_portions(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the rows of logits [R, V] in portions of about PORTION_CELLS numbers."""
    count = max(1, PORTION_CELLS // logits.shape[1])
    for first in range(0, len(logits), count):
        yield slice(first, first + count)


def masked_argmax(logits: torch.Tensor, bits: np.ndarray) -> int:
    """Return the id of the largest logit whose bit is 1, even if it is -inf; the lowest id of equal ones.

    float32 [V] without NaN; ``bits`` as in ``apply_mask``, at least one of them 1.
    """
    ids = torch.from_numpy(np.flatnonzero(np.unpackbits(bits, count=len(logits), bitorder="little"))).to(logits.device)
    return int(ids[argmax(logits[ids][None])[1][0]])


def apply_mask(logits: torch.Tensor, bits: np.ndarray) -> None:
    """Set the logits whose bit is 0 to -inf, in place: float32 [V], uint8 [V / 8 or more], lowest bit first."""
    keep = np.unpackbits(bits, count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(keep == 0).to(logits.device), float("-inf"))


def _vocabulary_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Return [R, V] as [R, blocks, ARGMAX_BLOCK], padded with -inf."""
    spare = -logits.shape[1] % ARGMAX_BLOCK
    if spare:
        logits = torch.nn.functional.pad(logits, (0, spare), value=float("-inf"))
    result: torch.Tensor = logits.unflatten(1, (-1, ARGMAX_BLOCK))
    return result
