"""Log-probabilities of tokens from raw logits, for sampled tokens and for prompts. Knows no sequences or requests."""

from __future__ import annotations

import math

import torch

from parley import native
from parley.native.torch_forms.torch_vocabulary import WEIGHT_SCALE
from parley.types import TokenScore

RANK_CANDIDATES = 32  # most probable tokens among which a token's rank is looked up first
SPARE_CANDIDATES = 12  # extra candidates besides the listed ones, for equal logits at the edge


def score_tokens(logits: torch.Tensor, token_ids: list[int], count: int = 0) -> list[TokenScore]:
    """Score token ``token_ids[i]`` under row i, with the ``count`` most probable tokens: float32 [N, V] -> N scores.

    Scores are natural logarithms of the softmax of the raw logits. Equal logits are listed by id. The normalizer is a
    sum of integers (``native.softmax_totals``), so a score does not depend on the other rows of the call.
    """
    best = native.top_k(logits, min(max(RANK_CANDIDATES, count + SPARE_CANDIDATES), logits.shape[1]))
    norms = _normalizers_from_peaks(logits, best[0][:, 0])
    token_logits = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = _token_ranks(logits, token_logits, best[0])
    rows = zip(norms, token_logits[:, 0].tolist(), ranks, strict=True)
    lists = zip(*_list_top(logits, count, *best), strict=True) if count else [([], [])] * len(token_ids)
    scores = []
    for (norm, logit, rank), (ids, values) in zip(rows, lists, strict=True):
        scores.append(TokenScore(logit - norm, rank, ids, [value - norm for value in values]))
    return scores


def _token_ranks(logits: torch.Tensor, token_logits: torch.Tensor, largest_logits: torch.Tensor) -> list[int]:
    """Return the number of larger logits, plus 1, per row. ``token_logits`` [N, 1]; ``largest_logits`` [N, width]."""
    ranks: list[int] = ((largest_logits > token_logits).sum(-1) + 1).tolist()
    for row in (largest_logits[:, -1:] > token_logits).nonzero()[:, 0].tolist():
        ranks[row] = int((logits[row] > token_logits[row]).sum()) + 1
    return ranks


def row_normalizers(logits: torch.Tensor) -> list[float]:
    """Return the log-sum-exp of each row: float32 [N, V] -> N numbers."""
    return _normalizers_from_peaks(logits, native.argmax(logits)[0])


def _normalizers_from_peaks(logits: torch.Tensor, peaks: torch.Tensor) -> list[float]:
    """Return the log-sum-exp of each row, given the row maxima: float32 [N, V] and [N] -> N numbers."""
    sums = native.softmax_totals(logits, peaks).tolist()
    return [peak + math.log(total / WEIGHT_SCALE) for peak, total in zip(peaks.tolist(), sums, strict=True)]


def score_alternatives(logits: torch.Tensor, norm: float, token_ids: list[int], count: int) -> list[TokenScore]:
    """Score several tokens under a single row with known normalizer: float32 [V] -> one score per token."""
    lists = top_tokens(logits[None], count) if count else ([[]], [[]])
    ids, top = lists[0][0], [value - norm for value in lists[1][0]]
    token_logits = logits[torch.tensor(token_ids, device=logits.device)]
    # Every logit above one of the tokens is above the lowest of them, so one pass over the row is enough.
    above = int((logits > token_logits.amin()).sum())
    larger = logits.topk(above).values if above else logits[:0]
    ranks = (larger > token_logits[:, None]).sum(-1) + 1
    return [
        TokenScore(logit - norm, rank, ids, top)
        for logit, rank in zip(token_logits.tolist(), ranks.tolist(), strict=True)
    ]


def token_logprobs(logits: torch.Tensor, token_ids: list[int]) -> list[float]:
    """Return the logprobs of some tokens under one row, float32 [V]."""
    (norm,) = row_normalizers(logits[None])
    return [value - norm for value in logits[torch.tensor(token_ids, device=logits.device)].tolist()]


def top_tokens(logits: torch.Tensor, count: int, width: int = 0) -> tuple[list[list[int]], list[list[float]]]:
    """Return ids and logits of the ``count`` largest logits of each row, best first and equal ones by id.

    Examines ``width`` candidates (at least ``count``), and more if equal logits lie on both sides of that edge.
    """
    vocab = logits.shape[1]
    return _list_top(logits, min(count, vocab), *native.top_k(logits, min(max(width, count + SPARE_CANDIDATES), vocab)))


def beam_candidates(logprobs: torch.Tensor, counts: list[int], stops: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Return (token, logprob) candidates of each row, best first: the ``counts[i]`` most probable tokens of row i, and
    as many that are not in ``stops[i]``; impossible ones are left out. logprobs float32 [R, V], modified.
    """
    max_count = max(counts)
    lists = [top_tokens(logprobs, max_count)]
    for row, ids in enumerate(stops):
        logprobs[row, ids] = -math.inf
    lists.append(top_tokens(logprobs, max_count))
    candidates = []
    for row, count in enumerate(counts):
        values: dict[int, float] = {}
        for listed, numbers in reversed(lists):  # logits masked for the second list are in the first
            values |= zip(listed[row][:count], numbers[row][:count], strict=True)
        ranked = sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))
        candidates.append([(token_id, value) for token_id, value in ranked if value > -math.inf])
    return candidates


def _list_top(
    logits: torch.Tensor, count: int, values: torch.Tensor, ids: torch.Tensor
) -> tuple[list[list[int]], list[list[float]]]:
    """Return ``top_tokens``, given each row's largest logits and their ids [N, width]."""
    count, width = min(count, logits.shape[1]), values.shape[1]
    if width < logits.shape[1] and bool((values[:, count - 1] == values[:, -1]).any()):
        return top_tokens(logits, count, width * 16)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order)[:, :count].tolist(), values[:, :count].tolist()
