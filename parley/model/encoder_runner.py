"""The encoder runner: computes one vector for each text of a step.

It keeps nothing between steps, neither pages nor a sampler. Texts of the same length are packed next to each other, so
that they attend in one call.
"""

from __future__ import annotations

from math import inf
from typing import NoReturn

import torch

from parley.core.sequence import DraftProposer, MediaEncoder, RowResult, Sequence, Step
from parley.model.checkpoint.files import LoadError
from parley.model.networks.encoder import Encoder, PackedTexts
from parley.model.networks.pooling import PoolingRecipe
from parley.types import EngineRequest

BROKEN_TEXT_VECTOR = "The model produced a vector that is not made of numbers."
MAX_TOKENS_AT_ONCE = 4096  # tokens computed at once; bounds the memory of activations


class EncoderRunner:
    """``core.sequence.Runner`` over an encoder."""

    blocks = 0
    generates = False
    proposer: DraftProposer | None = None
    media_encoder: MediaEncoder | None = None
    staging = None
    long_rope_after = inf

    def __init__(self, encoder: Encoder, recipe: PoolingRecipe, *, max_model_len: int):
        self.encoder = encoder
        self.recipe = recipe
        self.max_model_len = max_model_len
        self.vocab_size = encoder.config.vocab
        self.dimensions = encoder.config.hidden * len(recipe.modes)

    def prepare_request(self, work: EngineRequest) -> None:
        """Do nothing: an encoder has nothing to prepare."""

    def load_adapter(self, folder: str) -> NoReturn:
        """Raise LoadError: encoders have no LoRA adapters."""
        raise LoadError("The model is an encoder, and adapters are not available for encoders.")

    def admit_sequence(self, sequence: Sequence) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    def release_slot(self, sequence: Sequence) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    def fork_slots(self, forks: list[tuple[Sequence, Sequence]]) -> None:
        """Do nothing: an encoder keeps no state for a sequence."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one forward pass to trigger one-time setup in libraries."""
        self.encoder.encode_packed(PackedTexts([[0] * min(16, self.max_model_len)], self.encoder.device))

    @torch.inference_mode()
    def run_step(self, step: Step) -> list[RowResult]:
        """Compute the step: one result per row, in order. A row whose vector is not finite gets ``error``."""
        results = [RowResult() for _ in step.rows]
        order = sorted(range(len(step.rows)), key=lambda i: step.rows[i].count)
        while order:
            count, tokens = 0, 0
            while count < len(order) and (not count or tokens + step.rows[order[count]].count <= MAX_TOKENS_AT_ONCE):
                tokens += step.rows[order[count]].count
                count += 1
            self._encode_rows(step, order[:count], results)
            order = order[count:]
        return results

    def _encode_rows(self, step: Step, row_indices: list[int], results: list[RowResult]) -> None:
        """Compute the rows ``row_indices`` in one pass and store their vectors in ``results``."""
        texts = PackedTexts([step.rows[i].sequence.tokens for i in row_indices], self.encoder.device)
        states = self.encoder.encode_packed(texts).float().cpu().numpy()
        start = 0
        for i in row_indices:
            end = start + step.rows[i].count
            pooling = step.rows[i].sequence.request.pooling
            if pooling is not None:
                results[i].vector = self.recipe.pool_rows(states[start:end], pooling)
                if results[i].vector is None:
                    results[i].error = BROKEN_TEXT_VECTOR
            start = end
