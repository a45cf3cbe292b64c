"""Repetition, presence and frequency penalties of one output, and the token counts that they depend on.

Counts are sparse (only ids that occur), because a dense table per slot would be as large as the KV cache of a small
model. This module knows tokens and logits, and nothing of slots or batches.
"""

from __future__ import annotations

from collections import Counter
from copy import copy

import numpy as np
import torch

from parley.types import SamplingOptions

# Stands in for infinity before further arithmetic: float32 sums and penalty products stay free of NaN.
FINITE_INFINITY = 1e30
MIN_DIVISOR = torch.finfo(torch.float32).tiny  # a smaller one would be 0 in float32


class Penalties:
    """The penalties of ``sampling`` for an output that follows ``prompt_length`` tokens.

    The repetition penalty (Keskar et al. 2019) divides positive and multiplies negative logits of tokens that occur;
    the presence and frequency penalties subtract a constant and a multiple of the count. Without a window, the
    repetition penalty counts tokens of prompt and output, the others tokens of the output only. With a window, as in
    llama.cpp, all three count the last tokens of prompt and output together.
    """

    def __init__(self, sampling: SamplingOptions, prompt_length: int):
        self._sampling = sampling
        self._window = sampling.penalty_window
        self._prompt_length = prompt_length
        self._indices: dict[int, int] = {}  # by token id: its index in both arrays
        self._ids = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.float32)
        self._counted_length = 0  # number of tokens already counted

    @staticmethod
    def has_effect(sampling: SamplingOptions) -> bool:
        """Whether any penalty changes logits."""
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    def copy_penalties(self) -> Penalties:
        """Return an independent copy, for another output that begins with the tokens counted so far."""
        duplicate = copy(self)
        duplicate._indices = dict(self._indices)
        duplicate._ids, duplicate._counts = self._ids.copy(), self._counts.copy()
        return duplicate

    def edit_logits(self, row: torch.Tensor, tokens: list[int]) -> None:
        """Change the logits (float [V], in place) of the token that follows ``tokens``, prompt and output.

        Between calls, the list may only grow at its end. Placeholders of media, whose ids may exceed V, are not
        counted.
        """
        if self._counted_length:
            self._count_new(tokens, len(row))
        else:
            self._count_first(tokens, len(row))
        ids, counts = self._occurring_tokens(row.device)
        logits = row[ids]
        repetition = max(self._sampling.repetition_penalty, MIN_DIVISOR)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits -= counts * self._sampling.frequency_penalty
        logits -= (counts > 0) * self._sampling.presence_penalty
        row[ids] = logits.clamp_(max=FINITE_INFINITY)

    def _count_first(self, tokens: list[int], vocab_size: int) -> None:
        """Count all tokens at once, which is faster for long prompts."""
        penalized = tokens[-self._window :] if self._window else tokens
        counts = Counter(penalized if self._window else tokens[self._prompt_length :])
        ids = [token_id for token_id in dict.fromkeys(penalized) if 0 <= token_id < vocab_size]
        self._indices = {token_id: index for index, token_id in enumerate(ids)}
        self._ids = np.array(ids, dtype=np.int64)
        self._counts = np.array([counts[token_id] for token_id in ids], dtype=np.float32)
        self._counted_length = len(tokens)

    def _count_new(self, tokens: list[int], vocab_size: int) -> None:
        for index in range(self._counted_length, len(tokens)):
            self._add_count(tokens[index], 1, vocab_size)
            if 0 < self._window <= index:
                self._add_count(tokens[index - self._window], -1, vocab_size)
        self._counted_length = len(tokens)

    def _add_count(self, token: int, change: int, vocab_size: int) -> None:
        if not 0 <= token < vocab_size:
            return
        index = self._indices.setdefault(token, len(self._indices))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(index + 16, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(index + 16, dtype=np.float32)])
        self._ids[index] = token
        self._counts[index] += change

    def _occurring_tokens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of the tokens that any penalty applies to, int64 [n], and their counts, float32 [n]."""
        size = len(self._indices)
        ids, counts = self._ids[:size], self._counts[:size]
        if self._window:
            occurs = counts > 0
            ids, counts = ids[occurs], counts[occurs]
        return torch.from_numpy(ids).to(device), torch.from_numpy(counts).to(device)
