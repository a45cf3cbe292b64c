"""Turns a checkpoint of a model of a known family into the fused decoder; ``numeric_check`` compares its logits.

Weights are merged and packed straight from the mapped files, one layer after another, so a second copy of the model
never exists in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import softplus

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError, refuse_unpackable
from parley.model.checkpoint.mlx import MlxRows
from parley.model.checkpoint.quantization import Quantization
from parley.model.checkpoint.weights import (
    BlockWeight,
    LinearSpec,
    LinearWeight,
    PlainWeight,
    StoredEmbedding,
    UnlikeWeights,
)
from parley.model.load.altup_weights import LayerAltUpWeights
from parley.model.load.indexer_weights import LayerIndexerWeights
from parley.model.load.media_vocabularies import media_vocabulary_tensors, read_media_rows
from parley.model.load.memory import refuse_large_weights
from parley.model.load.mixture_weights import MixtureWeights
from parley.model.load.packed_cache import PackedWeightCache
from parley.model.load.states.state_weights import LayerStateWeights
from parley.model.networks.altup_decoder import AltUpDecoder
from parley.model.networks.config import DecoderConfig, Unfusable
from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.layer_linears import linear_site
from parley.model.networks.network import LinearSite
from parley.model.networks.position_tables import make_rope_table
from parley.model.networks.token_embeddings import EmbeddingParts, LayerInputs, StreamProjections
from parley.native.layer import AltUpWeights, DecoderLayer, IndexerWeights, StateWeights
from parley.native.torch_forms.torch_kernels import TorchPacked

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
    | BlockWeight
    | MlxRows
)
LAYER_NORMS = (
    "attention_norm", "attention_after_norm", "mlp_norm", "mlp_after_norm", "experts_norm", "dense_after_norm",
    "experts_after_norm", "input_after_norm", "altup_norm", "laurel_norm",
)  # fmt: skip
AFTER_NORMS = ("attention_after_norm", "mlp_after_norm")
# Of the activation xielu. The last is a limit of numbers so near to 0 that it does not matter.
XIELU_TENSORS = ("alpha_p", "alpha_n", "beta", "eps")
# Norms of latents have this eps in Transformers' models, whatever their configs say of others.
LATENT_NORMS, LATENT_EPS = ("query_latent_norm", "latent_norm"), 1e-6
# Frequencies, sines, masks and fixed decays that checkpoints store, computed here; scales of an 8-bit KV cache, not
# used; and the layers of ERNIE and Qwen that predict further tokens.
IGNORED_TENSORS = re.compile(
    r"rotary_emb\.inv_freq$|\.embed_positions\.weights$|\.(attention|attn)\.((masked_)?bias|causal_mask)$|self_attn\.([qkv]_proj\.(output|[kv])|(attn\.)?([qkv]|prob(_output)?))_scale$|^(model\.)?mtp[._]"
    r"|self_attn\.(slope_rate|(query|key|diagonal)_decay)$"
)


def fuse_decoder(
    decoder_weights: DecoderWeights,
    max_len: int,
    progress: Callable[[float], None],
    packed_cache: PackedWeightCache | None = None,
) -> FusedDecoder:
    """Build the decoder from its weights, or from weights that ``packed_cache`` kept at an earlier start.

    ``check_tensor_names`` must have accepted the checkpoint. Raises LoadError."""
    config = decoder_weights.config
    weights = packed_cache.read_weights(progress) if packed_cache else None
    if weights is None:
        weights = _pack_weights(decoder_weights, progress)
        if packed_cache:
            packed_cache.write_weights(weights)
    blocks, norm, head = weights
    embedding, parts = decoder_weights.embedding_table(head), decoder_weights.embedding_parts()
    progress(1.0)
    weights_bytes = tensor_bytes([embedding, parts, norm, head, *blocks])
    network_class = FusedDecoder if config.altup is None else AltUpDecoder
    return network_class(
        config,
        embedding,
        blocks,
        norm,
        head,
        make_rope_table(config, max_len, embedding.device),
        decoder_weights.total_parameters,
        weights_bytes,
        decoder_weights.linear_sites(),
        parts,
    )


def check_tensor_names(decoder_weights: DecoderWeights) -> None:
    """Raise Unfusable if there are tensors that the config does not account for, LoadError if any are missing."""
    config, checkpoint = decoder_weights.config, decoder_weights.checkpoint
    # A tied head needs no tensor of its own, but many checkpoints have one.
    expected = {
        *decoder_weights.quantization.stored_tensor_names(checkpoint, decoder_weights.embedding),
        decoder_weights.head.name + ".weight",
        *[decoder_weights.head.name + ".bias"] * decoder_weights.head.bias,
        *decoder_weights.norm_tensors(config.tensors.norm),
        *decoder_weights.embedding_tensors(),
        *decoder_weights.linear_tensors(decoder_weights.head),
    }
    missing = set(decoder_weights.layer_tensors(config.layer_count - 1)) - set(checkpoint.tensor_names)
    if missing:  # checked before work is planned per layer: a config may claim a million layers
        raise LoadError(
            f"The checkpoint has no tensor {min(missing)}, but the config asks for {config.layer_count} layers."
        )
    for i in range(config.layer_count):
        expected.update(decoder_weights.layer_tensors(i))
    unused = tuple(f"{config.tensors.layer}{config.layer_count + i}." for i in range(config.extra_layers))
    unused += decoder_weights.unread_keys()
    for name in checkpoint.tensor_names:
        if name.startswith(unused):
            continue
        if name not in expected and not IGNORED_TENSORS.search(name) and not decoder_weights.is_zero_bias(name):
            raise Unfusable(f"it has a tensor {name}")


def _pack_weights(decoder_weights: DecoderWeights, progress: Callable[[float], None]) -> list[Any]:
    """Pack all layers, the final norm and the head."""
    config = decoder_weights.config
    blocks: list[DecoderLayer] = []
    with ThreadPoolExecutor(min(4, torch.get_num_threads()), "pack") as pool:
        last = pool.submit(decoder_weights.pack_head)  # the longest job, so it starts first
        jobs = [pool.submit(decoder_weights.pack_layer, i) for i in range(config.layer_count)]
        try:
            for job in jobs:  # in order, so that the first of several errors is reported
                blocks.append(job.result())
                progress(len(blocks) / (config.layer_count + 1))
            norm = decoder_weights.read_norm(config.tensors.norm, offset=config.last_norm_offset)
            return [blocks, norm, last.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


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


class DecoderWeights:
    """Reads and merges a layer's tensors by the names in Hugging Face checkpoints."""

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
        self.embedding = LinearSpec(config.tensors.embedding, config.vocab, config.hidden)
        self.mixtures = MixtureWeights(self)
        self.states = LayerStateWeights(self)
        self.altup = LayerAltUpWeights(self)
        self.indexers = LayerIndexerWeights(self)
        self.head = LinearSpec(config.tensors.head, config.vocab, config.hidden, "head" in config.biases)

    def linear_parts(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer, each as the parts to be merged, in order."""
        config, state = self.config, self.config.layers[layer].state
        parts: dict[str, list[LinearSpec]] = {}
        if config.layers[layer].has_mixer:
            parts = self._attention_parts(layer) if state is None else self.states.linear_parts(layer, state)
        if state is not None and config.layers[layer].is_hybrid:
            parts = {**self._attention_parts(layer), "state_input": parts["qkv"], "state_output": parts["output"]}
        shape, width = config.layers[layer], config.mlp_width(layer)
        gate_up, down = config.tensors.gate_up, config.tensors.down
        if shape.routing is not None and not shape.has_dense_beside:
            gate_up, down = self.mixtures.names.shared_gate_up, self.mixtures.names.shared_down
        if width and shape.has_mlp:
            parts["gate_up"] = self._name_parts(
                "gate_up", layer, gate_up, [width] * (1 + shape.is_gated), config.hidden
            )
            parts["down"] = self._name_parts("down", layer, (down,), [config.hidden], width)
        if config.altup is not None:
            rank, name = config.altup.laurel_rank, "laurel.linear_{}".format
            parts["laurel_left"] = self._name_parts("laurel_left", layer, (name("left"),), [rank], config.hidden)
            parts["laurel_right"] = self._name_parts("laurel_right", layer, (name("right"),), [config.hidden], rank)
        if shape.layer_input is not None:
            names = config.tensors
            parts["input_gate"] = self._name_parts(
                "input_gate", layer, (names.input_gate,), [config.inputs_width], config.hidden
            )
            parts["input_up"] = self._name_parts(
                "input_up", layer, (names.input_up,), [config.hidden], config.inputs_width
            )
        return parts

    def _attention_parts(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer's attention. ``latent_up`` is packed as two weights of each head."""
        config, latent, shape = self.config, self.config.latent, self.config.layers[layer]
        sizes, names = config.head_sizes(layer), config.tensors.qkv
        heads = config.query_heads(layer)
        q, kv = heads * sizes.dim, sizes.kv_heads * sizes.dim
        if latent is None:
            queries = [q, heads if shape.has_head_gates else q] if shape.has_output_gate else [q]
            if len(config.tensors.qkv) < len(queries) + 2:
                queries = [sum(queries)]
            outs = [*queries, kv, sizes.kv_heads * config.value_dim(layer)]
            attended = heads * config.value_dim(layer)
            if not shape.stores_kv or shape.has_keys_as_values:
                outs = outs[: 2 if shape.stores_kv else 1]
                names = names[: len(outs)]
            return {
                "qkv": self._name_parts("qkv", layer, names, outs, config.hidden),
                "output": self._name_parts("output", layer, (config.tensors.output,), [config.hidden], attended),
            }
        assert config.tensors.latent_up is not None
        values, ups = config.heads * latent.value_dim, config.heads * (latent.plain_dim + latent.value_dim)
        outs = [latent.query_rank or q, *[config.heads] * shape.has_head_gates, latent.stored_dim]
        parts = {
            "qkv": self._name_parts("qkv", layer, config.tensors.qkv, outs, config.hidden),
            "output": self._name_parts("output", layer, (config.tensors.output,), [config.hidden], values),
            "latent_up": self._name_parts("latent_up", layer, (config.tensors.latent_up,), [ups], latent.rank),
        }
        if config.tensors.query_up:
            parts["query_up"] = self._name_parts("query_up", layer, (config.tensors.query_up,), [q], latent.query_rank)
        return parts

    def _name_parts(
        self, site: str, layer: int, names: tuple[str, ...], outs: list[int], into: int
    ) -> list[LinearSpec]:
        """Return linear layers with ``outs`` outputs, or one with all of them if the checkpoint stores them merged."""
        config = self.config
        groups, part_order = None, tuple[int, ...]()
        if site == "qkv" and config.qkv_shards:
            groups, part_order = (config.qkv_shards, (into // config.qkv_shards,) * 3), (0, 2, 1)
        elif site == "qkv" and config.has_grouped_qkv:
            groups = (
                config.kv_heads,
                (config.heads // config.kv_heads * config.head_dim, config.head_dim, config.head_dim),
            )
        outs = outs if len(names) == len(outs) else [sum(outs)]
        parts = [
            LinearSpec(
                self.layer_name(layer, name),
                out,
                into,
                site in config.biases,
                groups,
                config.has_transposed_linears,
                part_order,
            )
            for name, out in zip(names, outs, strict=True)
        ]
        if site == "qkv" and config.layers[layer].has_output_gate and len(parts) == 3 and config.latent is None:
            parts[0] = replace(parts[0], groups=(config.heads, (config.head_dim, config.head_dim)))
        return parts

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""
        return f"{self.config.tensors.layer}{layer}.{name}"

    def unread_keys(self) -> tuple[str, ...]:
        """Return how the names of tensors begin that make keys and values of layers which read those of others, and of
        norms after the MLPs of layers without a mixture where only mixtures have them.

        Published files have some, though no code reads them.
        """
        names = *self.config.tensors.qkv[1:], self.config.tensors.key_norm
        readers = [i for i, shape in enumerate(self.config.layers) if shape.kv_layer is not None]
        unread = [self.layer_name(layer, f"{name}.") for layer in readers for name in names if name]
        if norm := self.config.tensors.mixture_after_norm:
            dense = [i for i, shape in enumerate(self.config.layers) if shape.routing is None]
            unread += [self.layer_name(layer, f"{norm}.") for layer in dense]
        return tuple(unread)

    def linear_sites(self) -> dict[str, LinearSite]:
        """Return where each linear layer of the checkpoint is computed."""
        sites: dict[str, LinearSite] = {}
        for layer in range(self.config.layer_count):
            for key, parts in self.linear_parts(layer).items():
                site = linear_site(key, layer, self.config.layer_count)
                if site is None:
                    continue
                first = 0
                for linear in parts:
                    sites[linear.name] = LinearSite(site, first, linear.out_features, linear.in_features, linear.order)
                    first += linear.out_features
        return sites

    def layer_norms(self, layer: int) -> dict[str, tuple[str, int]]:
        """Return the norms of a layer: name in the checkpoint and width, by field of ``TensorNames``."""
        config = self.config
        shape, sizes = config.layers[layer], config.head_sizes(layer)
        whole = shape.has_whole_qk_norm or config.has_headwise_qk_norm
        widths = {
            **dict.fromkeys(LAYER_NORMS, config.hidden),
            "query_norm": sizes.dim * (config.heads if whole else 1),
            "key_norm": sizes.dim * (sizes.kv_heads if whole else 1),
        }
        if not shape.has_attention:
            del widths["query_norm"]
        if not shape.stores_kv:
            del widths["key_norm"]
        if not config.layers[layer].has_mixer:
            del widths["attention_norm"], widths["attention_after_norm"]
        if not config.layers[layer].has_mlp:
            del widths["mlp_norm"], widths["mlp_after_norm"]
        if config.latent is not None and shape.has_attention:
            widths |= {"query_latent_norm": config.latent.query_rank, "latent_norm": config.latent.rank}
        names = {field: getattr(config.tensors, field) for field in widths}
        if not shape.has_attention:
            names |= self.states.norm_names
        if shape.routing is not None and config.tensors.mixture_after_norm:
            names["mlp_after_norm"] = config.tensors.mixture_after_norm
        if config.norms_only_rotated_heads and config.layers[layer].rope is None:
            names |= {"query_norm": None, "key_norm": None}
        return {
            field: (self.layer_name(layer, name) if name else "", widths[field])
            for field, name in names.items()
            if name is not None
        }

    def norm_tensors(self, name: str) -> list[str]:
        """Return the names of the tensors of one norm; none if it has no weights."""
        return ([name + ".weight"] + [name + ".bias"] * self.config.have_norms_bias) if name else []

    def layer_tensors(self, layer: int) -> list[str]:
        """Return all tensor names of a layer."""
        names = list(chain.from_iterable(self.norm_tensors(name) for name, _ in self.layer_norms(layer).values()))
        for parts in self.linear_parts(layer).values():
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
        names += self.indexers.layer_tensors(layer)
        return names + self.mixtures.layer_tensors(layer) + self.altup.layer_tensors(layer)

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros. Some writers add one to each layer that they quantize."""
        if not name.endswith(".bias") or name.removesuffix("bias") + "qweight" not in self.checkpoint:
            return False
        return not self.checkpoint.view_tensor(name, *self.checkpoint.tensor_shape(name)).any()

    @property
    def total_parameters(self) -> int:
        """The number of elements in all weights of the model as defined, however they are stored."""
        config, numbers = self.config, 1 + self.config.have_norms_bias  # numbers of a norm for each of its outputs
        total = config.hidden * numbers * bool(config.tensors.norm)
        total += config.vocab * (config.hidden * (1 if config.tied else 2) + self.head.bias)
        if config.tensors.positions:
            total += (config.max_len + config.position_offset) * config.hidden
        if config.tensors.embedding_norm:
            total += config.hidden * numbers
        if config.inputs_count:
            total += config.inputs_width + sum(
                linear.out_features * linear.in_features for linear in self.input_linears()
            )
        total += sum(linear.out_features * linear.in_features for linear in chain(*self.altup.stream_linears()))
        for layer in range(config.layer_count):
            widths = dict(self.layer_norms(layer).values())  # some are used twice
            total += numbers * sum(width for name, width in widths.items() if name)
            linears = chain.from_iterable(self.linear_parts(layer).values())
            total += sum(linear.out_features * (linear.in_features + linear.bias) for linear in linears)
            total += self.mixtures.layer_parameters(layer) + config.heads * bool(self._sinks_name(layer))
            total += self.altup.layer_parameters(layer) + self.indexers.layer_parameters(layer)
            total += 2 * bool(config.tensors.activation_factors)  # the third is no parameter
            total += sum(map(math.prod, self.states.layer_tensors(layer).values()))
        return total

    def linear_tensors(self, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        if linear is self.head and self.config.tied:
            linear = self.embedding
        return self.quantization.stored_tensor_names(self.checkpoint, linear)

    def read_linear(self, linear: LinearSpec, outputs: torch.Tensor | None = None) -> LinearWeight:
        """Read a linear layer's weight, quantized if requested, or only some ``outputs`` (int64 indices) of it."""
        weight: LinearWeight
        if linear is self.head and self.config.tied:
            table = self.quantization.read_embedding(self.checkpoint, self.embedding)
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
            for linear in chain.from_iterable(self.linear_parts(layer).values()):
                self.quantization.check_stored_weight(self.checkpoint, linear)
                if linear.bias:
                    view(linear.name + ".bias", linear.out_features)
            self.mixtures.check_shapes(layer)
            self.states.check_shapes(layer)
            self.altup.check_shapes(layer)
            self.indexers.check_shapes(layer)
            self.read_sinks(layer)
            self.read_output_scale(layer)
            self.read_activation_factors(layer)
            for name, size in (*self.layer_norms(layer).values(), (config.tensors.norm, config.hidden)):
                for tensor in self.norm_tensors(name):
                    self.view_norm(tensor, size)
        if not config.tied:
            self.quantization.check_stored_weight(self.checkpoint, self.head)
        if self.head.bias:
            view(self.head.name + ".bias", config.vocab)
        self.quantization.check_stored_weight(self.checkpoint, self.embedding)
        self.embedding_parts()

    def embedding_tensors(self) -> list[str]:
        """Return the names of the tensors of ``embedding_parts``."""
        names = self.config.tensors
        tensors = [names.positions + ".weight"] if names.positions else []
        tensors += self.norm_tensors(names.embedding_norm or "")
        if self.config.inputs_count:
            tensors += self.norm_tensors(names.input_norm)
            tensors += chain.from_iterable(map(self.linear_tensors, self.input_linears()))
        tensors += chain.from_iterable(map(self.linear_tensors, chain(*self.altup.stream_linears())))
        return tensors + media_vocabulary_tensors(self)

    def input_linears(self) -> tuple[LinearSpec, LinearSpec]:
        """Return the table of inputs of layers, and the linear layer that makes them of embeddings."""
        config, width = self.config, self.config.inputs_count * self.config.inputs_width
        assert config.tensors.layer_inputs is not None
        table = LinearSpec(config.tensors.layer_inputs, config.inputs_vocab, width)
        return table, LinearSpec(config.tensors.input_projection, width, config.hidden)

    def layer_inputs(self) -> LayerInputs | None:
        """Read what computes the inputs of layers; None without these. Raises LoadError.

        The norm follows a factor of 1 / sqrt(hidden), which its eps has instead.
        """
        config = self.config
        if not config.inputs_count:
            return None
        table, projection = self.input_linears()
        norm = self.read_norm(config.tensors.input_norm, config.inputs_width)
        return LayerInputs(
            self._open_table(table),
            self._pack_merged_linears([projection]),
            replace(norm, eps=norm.eps * config.hidden),
        )

    def embedding_parts(self) -> EmbeddingParts:
        """Read or compute the embeddings of positions, and read the norm of embeddings. Raises LoadError."""
        config, positions, norm = self.config, None, None
        rows, first = config.max_len + config.position_offset, config.position_offset
        if config.sinusoids is not None:
            refuse_large_weights(config.sinusoids.table_work_bytes(rows), torch.device("cpu"))
            positions = config.sinusoids.make_table(rows)[first:].to(self.device, self.dtype)
        if config.tensors.positions:
            positions = self.copy_tensor(config.tensors.positions + ".weight", rows, config.hidden)[first:]
        if config.tensors.embedding_norm is not None:
            norm = self.read_norm(config.tensors.embedding_norm)
        streams, media_rows = self.altup.pack_streams(), read_media_rows(self)
        return EmbeddingParts(positions, norm, self.layer_inputs(), streams, media_rows)

    def view_norm(self, tensor: str, width: int) -> torch.Tensor:
        """Return the weights or biases of a norm as they are stored, [width]. Raises LoadError."""
        shape = self.checkpoint.tensor_shape(tensor)
        is_matrix = len(shape) == 2 and math.prod(shape) == width  # a row for each head
        return self.checkpoint.view_tensor(tensor, *(shape if is_matrix else (width,))).flatten()

    def read_norm(self, name: str, width: int | None = None, offset: float | None = None) -> native.Norm:
        """Return a norm of ``width`` numbers, by default of hidden states, in float32 on the network's device.

        ``offset``: as ``norm_offset`` of the config, which is the default.
        """
        offset = self.config.norm_offset if offset is None else offset

        def read(tensor: str, offset: float) -> torch.Tensor:
            stored = self.view_norm(tensor, width or self.config.hidden)
            return stored.to(device=self.device, dtype=torch.float32, copy=True).add_(offset)

        if not name:
            ones = torch.ones(width or self.config.hidden, device=self.device)
            return native.Norm(ones, self.config.eps, None, self.config.are_norms_centered)
        weight, *biases = self.norm_tensors(name)
        bias = read(biases[0], 0.0) if biases else None
        return native.Norm(read(weight, offset), self.config.eps, bias, self.config.are_norms_centered)

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

    def embedding_table(self, head: native.PackedWeight) -> torch.Tensor | StoredEmbedding:
        """Return the embedding [vocab, hidden].

        A tied head that kept its layout is the embedding itself. A table in the network's dtype stays in the mapped
        file, because few rows are ever read, and so does one of few bits; otherwise it is copied.
        """
        shape = self.config.vocab, self.config.hidden
        weight, is_onednn = head.weight, isinstance(head, TorchPacked) and head.onednn
        if self.config.tied and not is_onednn and (weight.shape, weight.dtype) == (shape, self.dtype):
            return weight
        return self._open_table(self.embedding)

    def _open_table(self, table: LinearSpec) -> torch.Tensor | StoredEmbedding:
        """Return a table whose rows are read when they are needed. Raises LoadError."""
        shape = table.out_features, table.in_features
        stored = self.quantization.read_embedding(self.checkpoint, table)
        if not isinstance(stored, PlainWeight) and self.device.type != "cuda":
            return StoredEmbedding(stored, self.dtype, self.device)
        if not isinstance(stored, PlainWeight):
            return stored.decode_into(torch.empty(shape, dtype=self.dtype)).to(self.device)
        return (
            stored.values
            if self.device.type == "cpu" and stored.values.dtype == self.dtype
            else self.copy_tensor(table.name + ".weight", *shape)
        )

    def pack_head(self) -> native.PackedWeight:
        """Pack the head and release its file pages. Raises LoadError."""
        weight = self.read_linear(self.head)
        bias = self.copy_tensor(self.head.name + ".bias", self.head.out_features) if self.head.bias else None
        with refuse_unpackable("The head"):
            head = type(weight).pack_merged([weight], bias, self.dtype, self.device)
        self.checkpoint.release_pages(*self.linear_tensors(self.embedding), *self.linear_tensors(self.head))
        return head

    def pack_layer(self, index: int) -> DecoderLayer:
        """Pack one layer and release its file pages. Raises LoadError."""
        linears = self.linear_parts(index)
        packed = self._pack_latent_up(*linears.pop("latent_up", []))
        with refuse_unpackable(f"Layer {index}"):
            packed |= {key: self._pack_merged_linears(parts) for key, parts in linears.items()}
        norms = {field: self.read_norm(*place) for field, place in self.layer_norms(index).items()}
        norms |= {field: replace(norm, eps=LATENT_EPS) for field, norm in norms.items() if field in LATENT_NORMS}
        if (eps := self.config.after_norm_eps) is not None:
            norms |= {field: replace(norm, eps=eps) for field, norm in norms.items() if field in AFTER_NORMS}
        head_norm = self._merge_head_norms(index, norms.pop("query_norm", None), norms.pop("key_norm", None))
        members: dict[str, Any] = {
            **dict.fromkeys(("qkv", "output", "gate_up", "down")),
            **packed,
            **norms,
            "head_norm": head_norm,
            "output_scale": self.read_output_scale(index),
            "activation_factors": self.read_activation_factors(index),
        }
        members |= {"sinks": self.read_sinks(index), "mixture": self.mixtures.pack_layer(index)}
        members |= {"state": self.states.read_layer(index), "altup": self.altup.pack_layer(index)}
        members["indexer"] = self.indexers.pack_layer(index)
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

    def _merge_head_norms(
        self, layer: int, queries: native.Norm | None, keys: native.Norm | None
    ) -> native.Norm | None:
        """Merge the norms of a layer's queries and keys, if it has these, into one with a row for each head."""
        if queries is None:
            return None
        sizes = self.config.head_sizes(layer)
        norms = [(self.config.query_heads(layer), queries)] + ([] if keys is None else [(sizes.kv_heads, keys)])

        def merge(rows: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
            return torch.cat([numbers.view(-1, sizes.dim).expand(count, -1) for count, numbers in rows])

        biases = [(count, norm.bias) for count, norm in norms if norm.bias is not None]
        weight = merge([(count, norm.weight) for count, norm in norms])
        return replace(queries, weight=weight, bias=merge(biases) if biases else None)

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
