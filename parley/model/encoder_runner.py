"""The encoder runner: computes one vector for each text of a step.

It keeps nothing between steps, neither pages nor a sampler. Texts of the same length are packed next to each other, so
that they attend in one call.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from parley.core.sequence import Proposer, Sampled, Sequence, Step
from parley.model.checkpoint.files import LoadError
from parley.model.networks.encoder import Encoder, Texts
from parley.model.networks.pooling import Recipe
from parley.types import Work

BROKEN = "The model produced a vector that is not made of numbers."
MANY = 4096  # tokens computed at once; bounds the memory of activations


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
        """Do nothing: an encoder has nothing to prepare."""

    def fetch(self, folder: str) -> NoReturn:
        """Raise LoadError: encoders have no LoRA adapters."""
        raise LoadError("The model is an encoder, and adapters are not available for encoders.")

    def admit(self, sequence: Sequence) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    def release(self, sequence: Sequence) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    def follow(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    @torch.inference_mode()
    def warm(self) -> None:
        """Run one forward pass to trigger one-time setup in libraries."""
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
        """Compute the rows ``row_indices`` in one pass and store their vectors in ``results``."""
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
