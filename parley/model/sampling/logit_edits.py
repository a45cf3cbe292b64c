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
from parley.model.sampling.bans import Grams, Phrases
from parley.types import Work

FAR = 1e30  # stands in for infinity before further arithmetic: float32 sums and penalty products stay free of NaN


class Edit:
    """The logits processors of one sequence. ``count_token`` must see every drawn token, or penalties lag."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        work, sampling = sequence.work, sequence.work.sampling
        self._sequence = sequence
        bias = {id: value for id, value in sampling.logit_bias.items() if 0 <= id < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor([max(-FAR, min(FAR, value)) for value in bias.values()], dtype=torch.float32)
        stops = sorted({id for id in work.stop_ids if 0 <= id < vocab_size})
        self.stop_ids = torch.tensor(stops, dtype=torch.int64)
        # If every token is a stop token, nothing would remain to draw, so min_tokens is ignored.
        self.min_tokens = work.min_tokens if 0 < len(stops) < vocab_size else 0
        self.refused: torch.Tensor | None = None  # bool [V]
        if sampling.allowed:
            self.refused = torch.ones(vocab_size, dtype=torch.bool)
            self.refused[[id for id in sampling.allowed if 0 <= id < vocab_size]] = False
        self.phrases = Phrases(sampling.banned) if sampling.banned else None
        self.grams = Grams(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None
        self.ids = np.arange(vocab_size, dtype=np.uint32) if sampling.watermark else None
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.penalized = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        self.tally = Tally(sequence.tokens, sequence.prompt_len, vocab_size) if self.penalized else None
        forbids = (self.refused, self.phrases, self.grams)
        self.always = self.penalized or sampling.watermark or len(bias) > 0 or any(each is not None for each in forbids)

    def copy(self, sequence: Sequence) -> Edit:
        """Return a copy for a sequence that forks from this one's tokens."""
        other = copy(self)
        other._sequence = sequence
        if self.grams is not None:
            other.grams = Grams(sequence.work.sampling.no_repeat_ngram)
        if self.tally is not None:
            other.tally = self.tally.copy()
        return other

    @staticmethod
    def wanted(work: Work) -> bool:
        """Whether a sequence of this request may ever need logits processors."""
        sampling = work.sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        forbidden = sampling.allowed or sampling.banned or sampling.no_repeat_ngram or work.min_tokens
        return bool(sampling.logit_bias or sampling.watermark or forbidden) or penalties != (1.0, 0.0, 0.0)

    def changes(self, position: int) -> bool:
        """Whether any processor changes the logits of output token ``position`` (from 0)."""
        return self.always or position < self.min_tokens

    def apply(self, row: torch.Tensor, position: int) -> None:
        """Process the logits (float32 [V], in place) of output token ``position`` (from 0).

        Repetition penalty (Keskar et al. 2019) divides positive and multiplies negative logits of tokens in prompt or
        output; presence and frequency penalties subtract a constant and a multiple of the count of output tokens.
        """
        if len(self.bias):
            row[self.bias_ids.to(row.device)] += self.bias.to(row.device)
        if self.ids is not None:
            green = watermark.green(self._sequence.tokens[-1], self.ids)
            row += torch.from_numpy(green * np.float32(watermark.RAISE)).to(row.device)
        if self.refused is not None:
            self._forbid(row, self.refused.to(row.device))
        banned = self._banned(len(row))
        if banned:
            self._forbid(row, torch.tensor(banned, device=row.device))
        if position < self.min_tokens:
            self._forbid(row, self.stop_ids.to(row.device))
        if self.tally is not None:
            ids, counts = self.tally.tensors(row.device)
            logits = row[ids]
            logits = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits -= counts * self.frequency
            logits -= (counts > 0) * self.presence
            row[ids] = logits.clamp_(max=FAR)

    def _banned(self, vocab_size: int) -> list[int]:
        """Return the tokens that the output so far forbids. ``sequence.tokens`` holds all tokens drawn before."""
        sequence = self._sequence
        found: set[int] = set()
        if self.phrases is not None:
            found |= self.phrases.next(sequence.tokens, sequence.prompt_len)
        if self.grams is not None:
            found |= self.grams.next(sequence.tokens)
        return sorted(id for id in found if 0 <= id < vocab_size)

    @staticmethod
    def _forbid(row: torch.Tensor, which: torch.Tensor) -> None:
        """Set logits to -inf, unless no token would remain."""
        before = row[which]
        row[which] = float("-inf")
        if torch.isneginf(row.amax()):
            row[which] = before

    def append(self, token: int) -> None:
        """Count a drawn token for the penalties."""
        if self.tally is not None:
            self.tally.append(token)


class Tally:
    """Counts the tokens of a sequence: those that occur in prompt and output, with their number in the output."""

    def __init__(self, tokens: list[int], prompt_len: int, vocab_size: int):
        counts = Counter(tokens[prompt_len:])
        ids = [id for id in dict.fromkeys(tokens) if 0 <= id < vocab_size]
        self.index = {id: place for place, id in enumerate(ids)}
        self.ids = np.array(ids, dtype=np.int64)
        self.counts = np.array([counts[id] for id in ids], dtype=np.float32)

    def copy(self) -> Tally:
        """Return an independent copy."""
        other = copy(self)
        other.index, other.ids, other.counts = dict(self.index), self.ids.copy(), self.counts.copy()
        return other

    def append(self, token: int) -> None:
        """Count one more output token."""
        place = self.index.setdefault(token, len(self.index))
        if place == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros(place + 16, dtype=np.int64)])
            self.counts = np.concatenate([self.counts, np.zeros(place + 16, dtype=np.float32)])
        self.ids[place] = token
        self.counts[place] += 1

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 [n] and their counts in the output float32 [n]."""
        count = len(self.index)
        return torch.from_numpy(self.ids[:count]).to(device), torch.from_numpy(self.counts[:count]).to(device)
