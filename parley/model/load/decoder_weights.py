"""Reads the weights of a decoder of a known family from the mapped files, and packs them layer by layer.

Embeddings, norms, mixtures, states, indexers and alternating updates have readers of their own; ``linear_parts`` names
the linear layers.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import softplus

from parley import native
from parley.model.checkpoint.files import Checkpoint, refuse_unpackable
from parley.model.checkpoint.mlx import MlxRows
from parley.model.checkpoint.quantization import Quantization
from parley.model.checkpoint.weights import LinearSpec, LinearWeight, UnlikeWeights
from parley.model.load.altup_weights import LayerAltUpWeights
from parley.model.load.compression_weights import LayerCompressionWeights
from parley.model.load.cross_weights import LayerCrossWeights
from parley.model.load.embedding_weights import EmbeddingWeights
from parley.model.load.hyper_weights import LayerHyperWeights
from parley.model.load.indexer_weights import LayerIndexerWeights
from parley.model.load.linear_parts import LayerLinearParts
from parley.model.load.mixture_weights import MixtureWeights
from parley.model.load.norm_weights import NormWeights
from parley.model.load.states.state_weights import LayerStateWeights
from parley.model.networks.decoder_config import DecoderConfig
from parley.native.layer import DecoderLayer

# Of the activation xielu. The last is a limit of numbers so near to 0 that it does not matter.
XIELU_TENSORS = ("alpha_p", "alpha_n", "beta", "eps")


class DecoderWeights:
    """The weights of one checkpoint: their names, shapes, numbers, and packed forms."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        quantization: Quantization,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.checkpoint, self.config, self.quantization = checkpoint, config, quantization
        self.dtype, self.device = dtype, device
        self.mixtures = MixtureWeights(self)
        self.states = LayerStateWeights(self)
        self.altup = LayerAltUpWeights(self)
        self.hyper = LayerHyperWeights(self)
        self.indexers = LayerIndexerWeights(self)
        self.compression = LayerCompressionWeights(self)
        self.cross = LayerCrossWeights(self)
        self.norms = NormWeights(self, self.states.norm_names)
        self.linears = LayerLinearParts(self, self.states, self.mixtures)
        self.embeddings = EmbeddingWeights(self, self.norms, self.altup, self.hyper)
        self.head = LinearSpec(config.tensors.head, config.vocab_size, config.hidden_size, "head" in config.biases)

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""
        return f"{self.config.tensors.layer}{layer}.{name}"

    def layer_tensors(self, layer: int) -> list[str]:
        """Return all tensor names of a layer."""
        norm_names = (name for name, _ in self.norms.layer_norms(layer).values())
        names = list(chain.from_iterable(map(self.norms.norm_tensors, norm_names)))
        for parts in self.linears.linear_parts(layer).values():
            for linear in parts:
                names += self.linear_tensors(linear) + [linear.name + ".bias"] * linear.bias
        names += self.states.layer_tensors(layer)
        if self.config.tensors.output_scale:
            names.append(self.layer_name(layer, self.config.tensors.output_scale))
        if (sinks := self._sinks_name(layer)) is not None:
            names.append(sinks)
        if self.config.tensors.activation_factors:
            module = self.layer_name(layer, self.config.tensors.activation_factors)
            names += [f"{module}.{name}" for name in XIELU_TENSORS]
        names += self.indexers.layer_tensors(layer) + self.cross.layer_tensors(layer)
        names += self.hyper.layer_tensors(layer) + self.compression.layer_tensors(layer)
        return names + self.mixtures.layer_tensors(layer) + self.altup.layer_tensors(layer)

    @property
    def total_parameters(self) -> int:
        """The number of elements in all weights of the model as defined, however they are stored."""
        config, numbers = self.config, 1 + self.config.norms.has_bias  # numbers of a norm for each of its outputs
        total = config.hidden_size * numbers * bool(config.tensors.norm)
        total += config.vocab_size * (config.hidden_size * (1 if config.tied else 2) + self.head.bias)
        total += config.extra_tokens * config.hidden_size
        total += self.embeddings.extra_parameters
        for layer in range(config.layer_count):
            widths = dict(self.norms.layer_norms(layer).values())  # some are used twice
            total += numbers * sum(width for name, width in widths.items() if name)
            linears = chain.from_iterable(self.linears.linear_parts(layer).values())
            total += sum(linear.out_features * (linear.in_features + linear.bias) for linear in linears)
            total += self.mixtures.layer_parameters(layer) + config.heads * bool(self._sinks_name(layer))
            total += self.altup.layer_parameters(layer) + self.indexers.layer_parameters(layer)
            total += self.cross.layer_parameters(layer) + self.hyper.layer_parameters(layer)
            total += self.compression.layer_parameters(layer)
            total += 2 * bool(config.tensors.activation_factors)  # the third is no parameter
            total += sum(map(math.prod, self.states.layer_tensors(layer).values()))
        return total

    def linear_tensors(self, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        if linear is self.head and self.config.tied:
            linear = self.embeddings.token_table
        return self.quantization.stored_tensor_names(self.checkpoint, linear)

    def read_linear(self, linear: LinearSpec, outputs: torch.Tensor | None = None) -> LinearWeight:
        """Read a linear layer's weight, quantized if requested, or only some ``outputs`` (int64 indices) of it."""
        weight: LinearWeight
        if linear is self.head and self.config.tied:
            table = self.quantization.read_embedding(self.checkpoint, self.embeddings.token_table)
            weight = table.to_weight() if isinstance(table, MlxRows) else table
        else:
            weight = self.quantization.read_stored_weight(self.checkpoint, linear)
        if linear.order is not None:
            weight = weight.select_outputs(linear.order)
        weight = weight if outputs is None else weight.select_outputs(outputs)
        return self.quantization.quantize_plain(weight, head=linear is self.head)

    def read_bias(self, linear: LinearSpec) -> torch.Tensor:
        """Return the bias of a linear layer as it is stored, [out]."""
        bias = self.checkpoint.view_tensor(linear.name + ".bias", linear.out_features)
        return bias if linear.order is None else bias[linear.order]

    def check_shapes(self) -> None:
        """Check shapes and types of all tensors, in the order of packing, without reading any. Raises LoadError."""
        config, view = self.config, self.checkpoint.check_tensor
        for layer in range(config.layer_count):
            for linear in chain.from_iterable(self.linears.linear_parts(layer).values()):
                self.quantization.check_stored_weight(self.checkpoint, linear)
                if linear.bias:
                    view(linear.name + ".bias", linear.out_features)
            self.mixtures.check_shapes(layer)
            self.states.check_shapes(layer)
            self.altup.check_shapes(layer)
            self.hyper.check_shapes(layer)
            self.indexers.check_shapes(layer)
            self.compression.check_shapes(layer)
            self.cross.check_shapes(layer)
            self.read_sinks(layer)
            self.read_output_scale(layer)
            self.read_activation_factors(layer)
            for name, size in (*self.norms.layer_norms(layer).values(), (config.tensors.norm, config.hidden_size)):
                for tensor in self.norms.norm_tensors(name):
                    self.norms.view_norm(tensor, size)
        if not config.tied:
            self.quantization.check_stored_weight(self.checkpoint, self.head)
        if self.head.bias:
            view(self.head.name + ".bias", config.vocab_size)
        self.quantization.check_stored_weight(self.checkpoint, self.embeddings.token_table)
        self.embeddings.embedding_parts()

    def read_sinks(self, layer: int) -> torch.Tensor | None:
        """Return the score of each head's sink, float32 [heads]; None without sinks. Raises LoadError."""
        name = self._sinks_name(layer)
        if name is None:
            return None
        stored = self.checkpoint.view_tensor(name, self.config.heads)
        return stored.to(device=self.device, dtype=torch.float32, copy=True)

    def _sinks_name(self, layer: int) -> str | None:
        """Return the name of the tensor with the scores of a layer's sinks, None without sinks."""
        name = self.config.tensors.sinks
        return self.layer_name(layer, name) if name and self.config.layers[layer].has_sinks else None

    def read_output_scale(self, layer: int) -> float:
        """Return the factor of a layer's output, 1 without one. Raises LoadError."""
        name = self.config.tensors.output_scale
        return 1.0 if name is None else float(self.checkpoint.view_tensor(self.layer_name(layer, name), 1)[0])

    def read_activation_factors(self, layer: int) -> list[float]:
        """Return the factors of a layer's activation xielu; none for others. Raises LoadError.

        Those of both curves are positive, so their softplus is learned; linear is added to that below 0.
        """
        module = self.config.tensors.activation_factors
        if module is None:
            return []
        names = [self.layer_name(layer, f"{module}.{name}") for name in XIELU_TENSORS[:3]]
        positive, negative, linear = (
            self.checkpoint.view_tensor(name, *(1,) * len(self.checkpoint.tensor_shape(name))).double().view(())
            for name in names
        )
        return [float(softplus(positive)), float(linear + softplus(negative)), float(linear)]

    def copy_tensor(self, name: str, *sizes: int) -> torch.Tensor:
        """Return a copy of one tensor in the network's dtype and on its device."""
        return self.checkpoint.view_tensor(name, *sizes).to(device=self.device, dtype=self.dtype, copy=True)

    def pack_head(self) -> native.PackedWeight:
        """Pack the head and release its file pages. Raises LoadError."""
        weight = self.read_linear(self.head)
        bias = self.copy_tensor(self.head.name + ".bias", self.head.out_features) if self.head.bias else None
        with refuse_unpackable("The head"):
            head = type(weight).pack_merged([weight], bias, self.dtype, self.device)
        token_table = self.embeddings.token_table
        self.checkpoint.release_pages(*self.linear_tensors(token_table), *self.linear_tensors(self.head))
        return head

    def pack_layer(self, index: int) -> DecoderLayer:
        """Pack one layer and release its file pages. Raises LoadError."""
        linears = self.linears.linear_parts(index)
        packed = self._pack_latent_up(*linears.pop("latent_up", []))
        with refuse_unpackable(f"Layer {index}"):
            packed |= {key: self._pack_merged_linears(parts) for key, parts in linears.items()}
        members: dict[str, Any] = {
            **dict.fromkeys(("qkv", "output", "gate_up", "down")),
            **packed,
            **self.norms.read_layer_norms(index),
            "output_scale": self.read_output_scale(index),
            "activation_factors": self.read_activation_factors(index),
        }
        members |= {"sinks": self.read_sinks(index), "mixture": self.mixtures.pack_layer(index)}
        members |= {"state": self.states.read_layer(index), "altup": self.altup.pack_layer(index)}
        members |= {"indexer": self.indexers.pack_layer(index), "cross": self.cross.pack_layer(index)}
        members |= self.hyper.pack_layer(index) | self.compression.pack_layer(index)
        if slopes := self.config.layers[index].slopes:
            members["slopes"] = torch.tensor(slopes, dtype=torch.float32, device=self.device)
        layer = DecoderLayer(**members)
        self.checkpoint.release_pages(*self.layer_tensors(index))
        return layer

    def _pack_latent_up(self, linear: LinearSpec | None = None) -> dict[str, native.PackedWeight]:
        """Pack the layer that makes keys and values of latents, as ``key_up`` and ``value_up``; nothing without one.

        Both stay in the network's dtype, whatever the checkpoint or the settings say: one of them is transposed, and
        they are a small part of the model.
        """
        sizes = self.config.latent
        if linear is None or sizes is None:
            return {}
        weight = self.quantization.read_stored_weight(self.checkpoint, linear).to_float().to(self.device, self.dtype)
        keys, values = weight.view(self.config.heads, -1, sizes.rank).split([sizes.plain_dim, sizes.value_dim], 1)
        return {"key_up": native.pack_heads(keys.transpose(1, 2)), "value_up": native.pack_heads(values)}

    def _pack_merged_linears(self, parts: list[LinearSpec]) -> native.PackedWeight:
        """Read linear layers and merge them into one packed weight. Raises LoadError."""
        bias = None
        if parts[0].bias:
            bias = torch.cat([self.read_bias(linear).to(self.device, self.dtype) for linear in parts])
        return self.pack_weights([self.read_linear(linear) for linear in parts], bias)

    def pack_weights(self, weights: list[LinearWeight], bias: torch.Tensor | None) -> native.PackedWeight:
        """Merge the weights of linear layers into one."""
        kind = type(weights[0]) if all(weights[0].can_merge(weight) for weight in weights) else UnlikeWeights
        return kind.pack_merged(weights, bias, self.dtype, self.device)
