"""The tokens around media that Gemma 3n embeds with its projectors, not with the embedding of text.

Their rows depend on the checkpoint alone, so they are computed once, at load.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import Checkpoint
from parley.model.networks.decoder_config import DecoderConfig, MediaVocabulary


class VocabularyTensorSource(Protocol):
    """The part of ``DecoderWeights`` that is used here."""

    checkpoint: Checkpoint
    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device


def media_vocabulary_tensors(weights: VocabularyTensorSource) -> list[str]:
    """Return the names of all tensors of these projectors."""
    prefixes = tuple(f"{vocabulary.module}." for vocabulary in weights.config.media_vocabularies)
    return [name for name in weights.checkpoint.tensor_names if prefixes and name.startswith(prefixes)]


def read_media_rows(weights: VocabularyTensorSource) -> torch.Tensor | None:
    """Return the embeddings of the last tokens, [count, hidden]; None if text's embedding has those of all tokens.

    Files whose projectors are quantized, or missing, serve texts only, which never have these tokens. Raises LoadError.
    """
    vocabularies, checkpoint = weights.config.media_vocabularies, weights.checkpoint
    names = ("embedding", "embedding_projection")
    needed = [f"{vocabulary.module}.{name}.weight" for vocabulary in vocabularies for name in names]
    if not all(checkpoint.has_plain_numbers(name) for name in needed):
        return None
    rows = [_embed_vocabulary(weights, vocabulary) for vocabulary in vocabularies]
    return torch.cat(rows).to(weights.device, weights.dtype) if rows else None


def _embed_vocabulary(weights: VocabularyTensorSource, vocabulary: MediaVocabulary) -> torch.Tensor:
    """Return the embeddings of a vocabulary, float32 [size, hidden]."""

    def view(name: str, *shape: int) -> torch.Tensor:
        return weights.checkpoint.view_tensor(f"{vocabulary.module}.{name}.weight", *shape).float()

    width, hidden = vocabulary.width, weights.config.hidden_size
    rows = view("embedding", vocabulary.size, width)
    rows = F.rms_norm(rows, (width,), view("hard_embedding_norm", width), vocabulary.eps)
    rows = F.linear(rows, view("embedding_projection", hidden, width))
    return F.rms_norm(rows, (hidden,), None, vocabulary.eps)
