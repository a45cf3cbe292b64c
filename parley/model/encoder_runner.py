"""The encoder runner: computes for each text of a step a vector, a vector of each token, the scores of classes, or the
weights of the vocabulary's tokens (sparse embedding).

It keeps nothing between steps, and has neither pages nor a sampler. Texts of the same length are packed next to each
other, so that one call computes their attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NoReturn

import numpy as np
import torch

from parley.core.sequence import DraftProposer, MediaEncoder, RowResult, Sequence, Step, StepStarter
from parley.model.checkpoint.files import LoadError
from parley.model.networks.classifier import ClassifierHead
from parley.model.networks.encoder import EncoderNetwork, PackedTexts
from parley.model.networks.pooling import HiddenRows, PoolingRecipe, encode_vectors
from parley.model.networks.sparse_head import SparseHead, encode_sparse_vector
from parley.types import EngineRequest, PoolingOptions, PoolingTask

BROKEN_TEXT_VECTOR = "The model produced a vector that is not made of numbers."
MAX_TOKENS_AT_ONCE = 4096  # tokens computed at once; bounds the memory of activations


class EncoderRunner:
    """``core.sequence.ModelRunner`` over an encoder. With a ``head`` it is a classifier, and has no vectors. With a
    ``sparse_head`` a text's vector has a number for each token of the vocabulary."""

    page_count = 0
    generates = False
    proposer: DraftProposer | None = None
    media_encoder: MediaEncoder | None = None
    staging = None
    long_rope_after = inf
    state_slots: int | None = None
    snapshot_slots = 0
    starter: StepStarter | None = None

    def __init__(
        self,
        encoder: EncoderNetwork,
        recipe: PoolingRecipe,
        *,
        max_model_len: int,
        head: ClassifierHead | None = None,
        sparse_head: SparseHead | None = None,
    ):
        self.encoder = encoder
        self.recipe = recipe
        self.head, self.sparse_head = head, sparse_head
        self.max_model_len = max_model_len
        self.vocab_size = encoder.config.vocab_size
        self.dimensions = self.token_dimensions = 0
        tasks: tuple[PoolingTask, ...] = ("token_classify" if head is not None and head.by_token else "classify",)
        if sparse_head is not None:
            self.dimensions, tasks = sparse_head.vocabulary, ("embed", "embed_sparse")
        elif head is None:
            recipe.check_width(encoder.config.hidden_size)
            self.dimensions = recipe.vector_size(encoder.config.hidden_size)
            self.token_dimensions = recipe.token_vector_size(encoder.config.hidden_size)
            tasks = ("embed", "token_embed") if self.dimensions else ("token_embed",)
        self.pooling_tasks = frozenset(tasks)

    def prepare_request(self, request: EngineRequest) -> None:
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

    def copy_state(self, source: Sequence, target: Sequence) -> None:
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
        """Compute the rows ``row_indices`` in one pass and store their numbers in ``results``."""
        sequences = [step.rows[i].sequence for i in row_indices]
        second_starts = [sequence.request.second_text_start for sequence in sequences]
        texts = PackedTexts([sequence.tokens for sequence in sequences], self.encoder.device, second_starts)
        states = self.encoder.encode_packed(texts)
        requests = [sequence.request for sequence in sequences]
        if self.head is not None:
            vectors = self._score_classes(self.head, states, texts, requests)
        elif self.sparse_head is not None:
            vectors = self._weigh_tokens(self.sparse_head, states, texts.lengths, requests)
        else:
            vectors = self._pool_texts(states.float().cpu().numpy(), texts.lengths, requests)
        for i, vector in zip(row_indices, vectors, strict=True):
            if step.rows[i].make_vector:
                results[i].vector = vector
                if vector is None:
                    results[i].error = BROKEN_TEXT_VECTOR

    def _pool_texts(
        self, states: HiddenRows, lengths: list[int], requests: list[EngineRequest]
    ) -> Iterator[bytes | None]:
        """Yield the vector of each text, or the vectors of its tokens."""
        end = 0
        for length, request in zip(lengths, requests, strict=True):
            start, end = end, end + length
            yield self.recipe.pool_rows(states[start:end], request.pooling or PoolingOptions())

    def _weigh_tokens(
        self, head: SparseHead, states: torch.Tensor, lengths: list[int], requests: list[EngineRequest]
    ) -> Iterator[bytes | None]:
        """Yield each text's weights of the vocabulary's tokens: all of them, or those that are not 0."""
        for weights, request in zip(head.weigh_texts(states, lengths), requests, strict=True):
            pooling, numbers = request.pooling or PoolingOptions(), weights.cpu().numpy()
            if pooling.task == "embed_sparse":
                yield encode_sparse_vector(numbers)
            else:
                yield encode_vectors(numbers[None, : pooling.dimensions], normalize=pooling.normalize is True)

    def _score_classes(
        self, head: ClassifierHead, states: torch.Tensor, texts: PackedTexts, requests: list[EngineRequest]
    ) -> Iterator[bytes | None]:
        """Yield the scores of each text's classes, or of those of its tokens."""
        logits = head.score_texts(states, texts).float()
        scores, probabilities = logits.cpu().numpy(), head.activate_scores(logits).cpu().numpy()
        end = 0
        for length, request in zip(texts.lengths if head.by_token else [1] * len(requests), requests, strict=True):
            start, end = end, end + length
            is_raw = request.pooling is not None and request.pooling.normalize is False
            row = (scores if is_raw else probabilities)[start:end]
            yield row.astype("<f4").tobytes() if np.isfinite(row).all() else None
