"""Sampling options that other engines lack, applied to the logits of one choice: typical_p, no_repeat_ngram, a window
of penalties, watermark, thinking budget, and forced tokens at the start of the output.

``worker/vllm/logits_plugin.py`` applies them in vLLM's workers, with the results of parley's own engine. Each choice
that uses them costs time in Python; other choices cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from parley.model.sampling.bans import RepeatedNgrams
from parley.model.sampling.extra_options import ExtraOptions
from parley.model.sampling.penalties import Penalties
from parley.model.sampling.thinking_budget import ThinkingBudget
from parley.model.sampling.token_mask import mask_tokens
from parley.watermark import GREEN_BONUS, is_green


class RowEdits:
    """The edits of one choice. ``tokens``: its prompt; ``add_tokens`` appends the output.

    ``token_bytes``: returns the bytes of a token.
    """

    def __init__(self, options: ExtraOptions, tokens: list[int], token_bytes: Callable[[int], bytes]):
        self.options = options
        self.tokens = tokens
        self._ngrams = RepeatedNgrams(options.no_repeat_ngram) if options.no_repeat_ngram else None
        self._penalties = Penalties(options.penalties, 0) if options.penalties is not None else None
        limit = options.reasoning_limit
        self._budget = ThinkingBudget(limit, token_bytes) if limit is not None else None
        self._output_count = 0

    @property
    def output_count(self) -> int:
        """Number of output tokens so far."""
        return self._output_count

    def add_tokens(self, output: list[int]) -> None:
        """Append new output tokens."""
        self.tokens += output
        self._output_count += len(output)
        if self._budget is not None:
            for token in output:
                self._budget.track_token(token)

    def edit_logits(self, row: torch.Tensor) -> None:
        """Edit the logits (float [V], in place) of the next token, before temperature."""
        if self.options.watermark and self.tokens:
            green = is_green(self.tokens[-1], np.arange(len(row), dtype=np.uint32))
            row += torch.from_numpy(green * np.float32(GREEN_BONUS)).to(row.device, row.dtype)
        if self._ngrams is not None:
            repeating = sorted(token for token in self._ngrams.repeating_next(self.tokens) if 0 <= token < len(row))
            mask_tokens(row, torch.tensor(repeating, dtype=torch.int64, device=row.device))
        if self._penalties is not None:
            self._penalties.edit_logits(row, self.tokens)
        if self._budget is not None and (forced := self._budget.forced) is not None and 0 <= forced < len(row):
            is_other = torch.ones(len(row), dtype=torch.bool, device=row.device)
            is_other[forced] = False
            mask_tokens(row, is_other)
        if self._output_count < len(self.options.forced):
            row.fill_(float("-inf"))
            row[self.options.forced[self._output_count]] = 0.0

    def cut_logits(self, row: torch.Tensor, temperature: float) -> None:
        """Exclude the tokens (float [V], in place) that typical_p and the cuts before it drop.

        ``temperature``: 1 if the logits have been divided by it already.
        """
        if self.options.typical_p < 1 and temperature > 0 and self._output_count >= len(self.options.forced):
            row[~typical_tokens(row.float() / temperature, self.options)] = float("-inf")


def typical_tokens(x: torch.Tensor, options: ExtraOptions) -> torch.Tensor:
    """Return which tokens stay (bool [V]), given logits divided by the temperature (float32 [V]).

    In this order: min_p relative to the most likely token, top_k, top_p of the remaining tokens, and typical_p (Meister
    et al. 2022) of those that then remain: the tokens whose surprise is nearest to the entropy. Tokens of equal rank
    stay or go together.
    """
    x = x - x.amax()
    weights = x.exp()
    weights[weights < options.min_p] = 0
    if 0 < options.top_k < len(x):
        weights[x < x.topk(options.top_k).values[-1]] = 0
    if options.top_p < 1:
        weights[~_first_of_mass(-x, weights, options.top_p)] = 0
    mean = torch.where(weights > 0, weights * x, 0.0).sum() / weights.sum()
    return (weights > 0) & _first_of_mass((x - mean).abs(), weights, options.typical_p)


def _first_of_mass(ranks: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
    """Return the tokens of lowest rank (bool [V]) that together have this share of all weights."""
    order = torch.where(weights > 0, ranks, torch.inf).argsort()
    mass_before = weights[order].cumsum(0) - weights[order]
    last = int(((mass_before < share * weights.sum()) & (weights[order] > 0)).sum()) - 1
    return ranks <= ranks[order[max(last, 0)]]
