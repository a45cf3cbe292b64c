"""Reads the token embedding of a decoder from the mapped files, and the tensors that are added to or computed from
it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch

from parley import native
from parley.model.checkpoint.weights import LinearSpec, PlainWeight, StoredEmbedding
from parley.model.load.altup_weights import LayerAltUpWeights
from parley.model.load.hyper_weights import LayerHyperWeights
from parley.model.load.linear_reader import LinearReader
from parley.model.load.media_vocabularies import media_vocabulary_tensors, read_media_rows
from parley.model.load.memory import refuse_large_tensors
from parley.model.load.norm_weights import NormWeights
from parley.model.networks.token_embeddings import EmbeddingParts, LayerInputs
from parley.native.torch_forms.torch_kernels import TorchPacked


class EmbeddingWeights:
    """The embeddings of one checkpoint: of tokens, positions and layers. ``token_table``: that of tokens."""

    def __init__(self, weights: LinearReader, norms: NormWeights, altup: LayerAltUpWeights, hyper: LayerHyperWeights):
        self._weights, self._norms, self._altup, self._hyper = weights, norms, altup, hyper
        self._config, self._dtype, self._device = weights.config, weights.dtype, weights.device
        rows = self._config.vocab_size + self._config.extra_tokens
        self.token_table = LinearSpec(self._config.tensors.embedding, rows, self._config.hidden_size)

    def embedding_tensors(self) -> list[str]:
        """Return the names of the tensors of ``embedding_parts``."""
        names = self._config.tensors
        tensors = [names.positions + ".weight"] if names.positions else []
        tensors += self._norms.norm_tensors(names.embedding_norm or "")
        if self._config.layer_inputs.count:
            tensors += self._norms.norm_tensors(names.input_norm)
            tensors += chain.from_iterable(map(self._weights.linear_tensors, filter(None, self.input_linears())))
        tensors += chain.from_iterable(map(self._weights.linear_tensors, chain(*self._altup.stream_linears())))
        return tensors + self._hyper.last_tensors() + media_vocabulary_tensors(self._weights)

    def input_linears(self) -> tuple[LinearSpec | None, LinearSpec]:
        """Return the table of per-layer inputs, if there is one, and the linear layer that computes them from
        embeddings."""
        config, sizes = self._config, self._config.layer_inputs
        width = sizes.count * sizes.width
        name = config.tensors.layer_inputs
        table = LinearSpec(name, sizes.vocab_size, width) if name else None
        return table, LinearSpec(config.tensors.input_projection, width, config.hidden_size)

    def layer_inputs(self) -> LayerInputs | None:
        """Read the tensors that compute per-layer inputs; None for models without them. Raises LoadError.

        The model multiplies by 1 / sqrt(hidden) before the norm; here eps is scaled instead, with the same result.
        """
        config = self._config
        if not config.layer_inputs.count:
            return None
        table, projection = self.input_linears()
        norm = self._norms.read_norm(config.tensors.input_norm, config.layer_inputs.width)
        return LayerInputs(
            None if table is None else self._open_table(table),
            self._weights.pack_weights([self._weights.read_linear(projection)], None),
            replace(norm, eps=norm.eps * config.hidden_size),
        )

    def embedding_parts(self) -> EmbeddingParts:
        """Read or compute the embeddings of positions, and read the norm of embeddings. Raises LoadError."""
        config, positions, norm = self._config, None, None
        rows, first = config.max_len + config.position_offset, config.position_offset
        if config.sinusoids is not None:
            subject = f"The embeddings of {config.max_len} positions (max_position_embeddings)"
            size = config.sinusoids.table_work_bytes(rows)
            refuse_large_tensors(subject, size, torch.device("cpu"), "serve a model with a shorter context")
            positions = config.sinusoids.make_table(rows)[first:].to(self._device, self._dtype)
        if config.tensors.positions:
            positions = self._weights.copy_tensor(config.tensors.positions + ".weight", rows, config.hidden_size)[
                first:
            ]
        if config.tensors.embedding_norm is not None:
            norm = self._norms.read_norm(config.tensors.embedding_norm)
        streams, media_rows = self._altup.pack_streams(), read_media_rows(self._weights)
        return EmbeddingParts(positions, norm, self.layer_inputs(), streams, media_rows, self._hyper.pack_last())

    def embedding_table(self, head: native.PackedWeight) -> torch.Tensor | StoredEmbedding:
        """Return the embedding [vocab, hidden].

        A tied head that kept its layout is the embedding itself. A table in the network's dtype stays in the mapped
        file, because few rows are ever read, and so does one of few bits; otherwise it is copied.
        """
        shape = self._config.vocab_size, self._config.hidden_size
        weight, is_onednn = head.weight, isinstance(head, TorchPacked) and head.onednn
        if self._config.tied and not is_onednn and (weight.shape, weight.dtype) == (shape, self._dtype):
            return weight
        return self._open_table(self.token_table)

    def _open_table(self, table: LinearSpec) -> torch.Tensor | StoredEmbedding:
        """Return a table whose rows are read when they are needed. Raises LoadError."""
        shape = table.out_features, table.in_features
        stored = self._weights.quantization.read_embedding(self._weights.checkpoint, table)
        if not isinstance(stored, PlainWeight) and self._device.type != "cuda":
            return StoredEmbedding(stored, self._dtype, self._device)
        if not isinstance(stored, PlainWeight):
            return stored.decode_into(torch.empty(shape, dtype=self._dtype)).to(self._device)
        return (
            stored.values
            if self._device.type == "cpu" and stored.values.dtype == self._dtype
            else self._weights.copy_tensor(table.name + ".weight", *shape)
        )

    @property
    def extra_parameters(self) -> int:
        """The number of elements in all weights here but the embedding of tokens."""
        config, numbers, total = self._config, 1 + self._config.norms.has_bias, 0
        if config.tensors.positions:
            total += (config.max_len + config.position_offset) * config.hidden_size
        if config.tensors.embedding_norm:
            total += config.hidden_size * numbers
        if config.layer_inputs.count:
            total += config.layer_inputs.width + sum(
                linear.out_features * linear.in_features for linear in filter(None, self.input_linears())
            )
        total += self._hyper.last_parameters()
        return total + sum(linear.out_features * linear.in_features for linear in chain(*self._altup.stream_linears()))
