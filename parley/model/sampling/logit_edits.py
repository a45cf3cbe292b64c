"""Logits processors of one sequence, applied before temperature: bias, watermark, banned tokens, penalties.

State is sparse (only ids that occur), because a dense table per slot would be as large as the KV cache of a small
model. This module knows one sequence's parameters and tokens, and nothing of slots or batches.
"""

from __future__ import annotations

from collections import Counter
from copy import copy

import numpy as np
import torch

from parley import watermark
from parley.core.sequence import Sequence
from parley.model.sampling.bans import BannedPhrases, RepeatedNgrams
from parley.types import EngineRequest

# Stands in for infinity before further arithmetic: float32 sums and penalty products stay free of NaN.
FINITE_INFINITY = 1e30


class LogitsProcessor:
    """The logits processors of one sequence. ``count_token`` must see every drawn token, or penalties lag."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        work, sampling = sequence.request, sequence.request.sampling
        self._sequence = sequence
        bias = {token_id: value for token_id, value in sampling.logit_bias.items() if 0 <= token_id < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor(
            [max(-FINITE_INFINITY, min(FINITE_INFINITY, value)) for value in bias.values()], dtype=torch.float32
        )
        stops = sorted({token_id for token_id in work.stop_ids if 0 <= token_id < vocab_size})
        self.stop_ids = torch.tensor(stops, dtype=torch.int64)
        # If every token is a stop token, nothing would remain to draw, so min_tokens is ignored.
        self.min_tokens = work.min_tokens if 0 < len(stops) < vocab_size else 0
        self.disallowed: torch.Tensor | None = None  # bool [V]
        if sampling.allowed:
            self.disallowed = torch.ones(vocab_size, dtype=torch.bool)
            self.disallowed[[token_id for token_id in sampling.allowed if 0 <= token_id < vocab_size]] = False
        self.phrases = BannedPhrases(sampling.banned) if sampling.banned else None
        self.ngrams = RepeatedNgrams(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None
        self.vocabulary_ids = np.arange(vocab_size, dtype=np.uint32) if sampling.watermark else None
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.penalized = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        self.token_counts = TokenCounts(sequence.tokens, sequence.prompt_len, vocab_size) if self.penalized else None
        bans = (self.disallowed, self.phrases, self.ngrams)
        self.always_active = (
            self.penalized or sampling.watermark or len(bias) > 0 or any(each is not None for each in bans)
        )

    def copy_for(self, sequence: Sequence) -> LogitsProcessor:
        """Return a copy for a sequence that forks from this one's tokens."""
        duplicate = copy(self)
        duplicate._sequence = sequence
        if self.ngrams is not None:
            duplicate.ngrams = RepeatedNgrams(sequence.request.sampling.no_repeat_ngram)
        if self.token_counts is not None:
            duplicate.token_counts = self.token_counts.copy_counts()
        return duplicate

    @staticmethod
    def needs_processor(work: EngineRequest) -> bool:
        """Whether a sequence of this request may ever need logits processors."""
        sampling = work.sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        bans = sampling.allowed or sampling.banned or sampling.no_repeat_ngram or work.min_tokens
        return bool(sampling.logit_bias or sampling.watermark or bans) or penalties != (1.0, 0.0, 0.0)

    def changes_logits(self, position: int) -> bool:
        """Whether any processor changes the logits of output token ``position`` (from 0)."""
        return self.always_active or position < self.min_tokens

    def edit_logits(self, row: torch.Tensor, position: int) -> None:
        """Process the logits (float32 [V], in place) of output token ``position`` (from 0).

        Repetition penalty (Keskar et al. 2019) divides positive and multiplies negative logits of tokens in prompt or
        output; presence and frequency penalties subtract a constant and a multiple of the count of output tokens.
        """
        if len(self.bias):
            row[self.bias_ids.to(row.device)] += self.bias.to(row.device)
        if self.vocabulary_ids is not None:
            green = watermark.is_green(self._sequence.tokens[-1], self.vocabulary_ids)
            row += torch.from_numpy(green * np.float32(watermark.GREEN_BONUS)).to(row.device)
        if self.disallowed is not None:
            self._mask_tokens(row, self.disallowed.to(row.device))
        banned = self._banned_tokens(len(row))
        if banned:
            self._mask_tokens(row, torch.tensor(banned, device=row.device))
        if position < self.min_tokens:
            self._mask_tokens(row, self.stop_ids.to(row.device))
        if self.token_counts is not None:
            ids, counts = self.token_counts.as_tensors(row.device)
            logits = row[ids]
            logits = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits -= counts * self.frequency
            logits -= (counts > 0) * self.presence
            row[ids] = logits.clamp_(max=FINITE_INFINITY)

    def _banned_tokens(self, vocab_size: int) -> list[int]:
        """Return the tokens that the output so far forbids. ``sequence.tokens`` holds all tokens drawn before."""
        sequence = self._sequence
        banned: set[int] = set()
        if self.phrases is not None:
            banned |= self.phrases.banned_next(sequence.tokens, sequence.prompt_len)
        if self.ngrams is not None:
            banned |= self.ngrams.repeating_next(sequence.tokens)
        return sorted(token_id for token_id in banned if 0 <= token_id < vocab_size)

    @staticmethod
    def _mask_tokens(row: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Set logits to -inf, unless no token would remain."""
        previous = row[token_ids]
        row[token_ids] = float("-inf")
        if torch.isneginf(row.amax()):
            row[token_ids] = previous

    def count_token(self, token: int) -> None:
        """Count a drawn token for the penalties."""
        if self.token_counts is not None:
            self.token_counts.add_token(token)


class TokenCounts:
    """Counts the tokens of a sequence: those that occur in prompt and output, with their number in the output."""

    def __init__(self, tokens: list[int], prompt_len: int, vocab_size: int):
        counts = Counter(tokens[prompt_len:])
        ids = [token_id for token_id in dict.fromkeys(tokens) if 0 <= token_id < vocab_size]
        self.index = {token_id: place for place, token_id in enumerate(ids)}
        self.ids = np.array(ids, dtype=np.int64)
        self.counts = np.array([counts[token_id] for token_id in ids], dtype=np.float32)

    def copy_counts(self) -> TokenCounts:
        """Return an independent copy."""
        duplicate = copy(self)
        duplicate.index, duplicate.ids, duplicate.counts = dict(self.index), self.ids.copy(), self.counts.copy()
        return duplicate

    def add_token(self, token: int) -> None:
        """Count one more output token."""
        position = self.index.setdefault(token, len(self.index))
        if position == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros(position + 16, dtype=np.int64)])
            self.counts = np.concatenate([self.counts, np.zeros(position + 16, dtype=np.float32)])
        self.ids[position] = token
        self.counts[position] += 1

    def as_tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 [n] and their counts in the output float32 [n]."""
        count = len(self.index)
        return torch.from_numpy(self.ids[:count]).to(device), torch.from_numpy(self.counts[:count]).to(device)
