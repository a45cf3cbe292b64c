"""Counts the bytes of all tensors in packed weights, in any nested structure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch

from parley import native
from parley.model.checkpoint.mlx import MlxRows
from parley.model.checkpoint.weights import GgufBlockWeight, StoredEmbedding
from parley.model.networks.token_embeddings import EmbeddingParts, LayerInputs, StreamProjections
from parley.native.layer import AltUpWeights, DecoderLayer, IndexerWeights, StateWeights

PACKED_STRUCTURES = (
    DecoderLayer
    | StateWeights
    | IndexerWeights
    | native.Mixture
    | native.Experts
    | native.Norm
    | native.PackedWeight
    | EmbeddingParts
    | LayerInputs
    | AltUpWeights
    | StreamProjections
    | StoredEmbedding
    | GgufBlockWeight
    | MlxRows
)


def tensor_bytes(structures: Iterable[object]) -> int:
    """Return the bytes of all tensors in weights and layers, counting shared ones once."""
    bytes_by_id: dict[int, int] = {}
    pending = list(structures)
    while pending:
        structure = pending.pop()
        if isinstance(structure, torch.Tensor):
            bytes_by_id[id(structure)] = structure.nbytes
        elif isinstance(structure, PACKED_STRUCTURES):
            pending += [getattr(structure, field.name) for field in fields(structure)]
        elif isinstance(structure, tuple):
            pending += structure
    return sum(bytes_by_id.values())
