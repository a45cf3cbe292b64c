"""Logits processors of one sequence, applied before temperature: bias, watermark, banned tokens, penalties.

This module knows one sequence's parameters and tokens, and nothing of slots or batches.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import torch

from parley import watermark
from parley.core.sequence import Sequence
from parley.model.sampling.bans import BannedPhrases, RepeatedNgrams
from parley.model.sampling.penalties import FINITE_INFINITY, Penalties
from parley.model.sampling.token_mask import mask_tokens
from parley.types import EngineRequest


class LogitsProcessor:
    """The logits processors of one sequence, whose tokens may only grow at their end."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        request, sampling = sequence.request, sequence.request.sampling
        self._sequence = sequence
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if 0 <= token_id < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor(
            [max(-FINITE_INFINITY, min(FINITE_INFINITY, value)) for value in bias.values()], dtype=torch.float32
        )
        stops = sorted({token_id for token_id in request.stop_ids if 0 <= token_id < vocab_size})
        self.stop_ids = torch.tensor(stops, dtype=torch.int64)
        # If every token is a stop token, nothing would remain to draw, so min_tokens is ignored.
        self.min_tokens = request.min_tokens if 0 < len(stops) < vocab_size else 0
        self.disallowed: torch.Tensor | None = None  # bool [V]
        if sampling.allowed:
            self.disallowed = torch.ones(vocab_size, dtype=torch.bool)
            self.disallowed[[token_id for token_id in sampling.allowed if 0 <= token_id < vocab_size]] = False
        self.phrases = BannedPhrases(sampling.banned) if sampling.banned else None
        self.ngrams = RepeatedNgrams(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None
        self.vocabulary_ids = np.arange(vocab_size, dtype=np.uint32) if sampling.watermark else None
        self.penalties = Penalties(sampling, sequence.prompt_len) if Penalties.has_effect(sampling) else None
        processors = (self.disallowed, self.phrases, self.ngrams, self.penalties)
        self.always_active = (
            sampling.watermark or len(bias) > 0 or any(processor is not None for processor in processors)
        )

    def copy_for(self, sequence: Sequence) -> LogitsProcessor:
        """Return a copy for a sequence that forks from this one's tokens."""
        duplicate = copy(self)
        duplicate._sequence = sequence
        if self.ngrams is not None:
            duplicate.ngrams = RepeatedNgrams(sequence.request.sampling.no_repeat_ngram)
        if self.penalties is not None:
            duplicate.penalties = self.penalties.copy_penalties()
        return duplicate

    @staticmethod
    def needs_processor(request: EngineRequest) -> bool:
        """Whether a sequence of this request may ever need logits processors."""
        sampling = request.sampling
        bans = sampling.allowed or sampling.banned or sampling.no_repeat_ngram or request.min_tokens
        return bool(sampling.logit_bias or sampling.watermark or bans) or Penalties.has_effect(sampling)

    def changes_logits(self, position: int) -> bool:
        """Whether any processor changes the logits of output token ``position`` (from 0)."""
        return self.always_active or position < self.min_tokens

    def edit_logits(self, row: torch.Tensor, position: int) -> None:
        """Process the logits (float32 [V], in place) of output token ``position`` (from 0)."""
        if len(self.bias):
            row[self.bias_ids.to(row.device)] += self.bias.to(row.device)
        if self.vocabulary_ids is not None:
            green = watermark.is_green(self._sequence.tokens[-1], self.vocabulary_ids)
            row += torch.from_numpy(green * np.float32(watermark.GREEN_BONUS)).to(row.device)
        if self.disallowed is not None:
            mask_tokens(row, self.disallowed.to(row.device))
        banned = self._banned_tokens(len(row))
        if banned:
            mask_tokens(row, torch.tensor(banned, device=row.device))
        if position < self.min_tokens:
            mask_tokens(row, self.stop_ids.to(row.device))
        if self.penalties is not None:
            self.penalties.edit_logits(row, self._sequence.tokens)

    def _banned_tokens(self, vocab_size: int) -> list[int]:
        """Return the tokens that the output so far forbids. ``sequence.tokens`` holds all tokens drawn before."""
        sequence = self._sequence
        banned: set[int] = set()
        if self.phrases is not None:
            banned |= self.phrases.banned_next(sequence.tokens, sequence.prompt_len)
        if self.ngrams is not None:
            banned |= self.ngrams.repeating_next(sequence.tokens)
        return sorted(token_id for token_id in banned if 0 <= token_id < vocab_size)
