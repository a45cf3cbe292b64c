"""Runs an encoder: one step's texts in, one vector out for each.

It keeps nothing between steps, neither pages nor a sampler. Texts of one length are packed side by side, so that they
attend in one call.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from parley.core.sequence import Proposer, Sampled, Sequence, Step
from parley.model.checkpoint import LoadError
from parley.model.encoder import Encoder, Texts
from parley.model.pooling import Recipe
from parley.types import Work

BROKEN = "The model produced a vector that is not made of numbers."
MANY = 4096  # tokens computed at once: bounds what layers hold at a time


class Reader:
    """``core.sequence.Runner`` over an encoder."""

    blocks = 0
    generates = False
    proposer: Proposer | None = None
    staging = None

    def __init__(self, encoder: Encoder, recipe: Recipe, *, max_model_len: int):
        self.encoder = encoder
        self.recipe = recipe
        self.max_model_len = max_model_len
        self.vocab_size = encoder.form.vocab
        self.dimensions = encoder.form.hidden * len(recipe.modes)

    def prepare(self, work: Work) -> None:
        """There is nothing to prepare."""

    def fetch(self, folder: str) -> NoReturn:
        """Raises LoadError."""
        raise LoadError("The model is an encoder, for which adapters are not available.")

    def admit(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Nothing is kept of a sequence."""

    @torch.inference_mode()
    def warm(self) -> None:
        """One forward pass: libraries set up here what they set up once."""
        self.encoder.hidden(Texts([[0] * min(16, self.max_model_len)], self.encoder.device))

    @torch.inference_mode()
    def run(self, step: Step) -> list[Sampled]:
        """Compute the step: one result per row, in order. A row whose vector is not finite gets ``error``."""
        results = [Sampled() for _ in step.rows]
        order = sorted(range(len(step.rows)), key=lambda i: step.rows[i].count)
        while order:
            count, tokens = 0, 0
            while count < len(order) and (not count or tokens + step.rows[order[count]].count <= MANY):
                tokens += step.rows[order[count]].count
                count += 1
            self._read(step, order[:count], results)
            order = order[count:]
        return results

    def _read(self, step: Step, chosen: list[int], results: list[Sampled]) -> None:
        texts = Texts([step.rows[i].sequence.tokens for i in chosen], self.encoder.device)
        states = self.encoder.hidden(texts).float().cpu().numpy()
        start = 0
        for i in chosen:
            end = start + step.rows[i].count
            wish = step.rows[i].sequence.work.pooling
            if wish is not None:
                results[i].vector = self.recipe.pool(states[start:end], wish)
                if results[i].vector is None:
                    results[i].error = BROKEN
            start = end
