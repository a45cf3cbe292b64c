"""The config of a fused decoder, which ``config_reader.py`` reads from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from parley.model.networks.decoder_tensors import LLAMA_TENSORS, TensorNames
from parley.model.networks.mixtures import MixtureNames
from parley.model.networks.rope import RopeConfig
from parley.model.networks.sinusoids import Sinusoids
from parley.model.networks.state_layers import StateNames
from parley.native.compressor import entry_layers
from parley.native.layer_shape import (
    AltUpShape,
    BlockIndexerShape,
    CompressionShape,
    HeadSizes,
    HyperShape,
    IndexerShape,
    LatentShape,
    LayerShape,
)
from parley.native.layout import LayerKV


@dataclass(frozen=True)
class NormForm:
    """How a decoder's norms are computed, and what the checkpoint stores of them.

    * ``is_centered``: they are LayerNorms, not RMS norms.
    * ``offset``: added to stored weights.
    * ``last_offset``: the offset of the norm after the last layer, if it differs.
    * ``only_rotated_heads``: layers without a rotary embedding have no norms of queries and keys.
    * ``has_headwise_qk``: the norms of queries and keys have weights of their own for each head.
    """

    is_centered: bool = False
    has_bias: bool = False
    offset: float = 0.0
    last_offset: float | None = None
    only_rotated_heads: bool = False
    has_headwise_qk: bool = False


RMS_NORMS = NormForm()
LAYER_NORMS = NormForm(is_centered=True)
BIASED_LAYER_NORMS = NormForm(is_centered=True, has_bias=True)


@dataclass(frozen=True)
class LinearLayout:
    """How a checkpoint stores the linear layers of a decoder.

    ``has_grouped_qkv``: it merges queries, keys and values of each key/value head, not of all. ``qkv_shards``: the
    heads are divided into this number of equal parts, and it merges the queries, values and keys of each part, in this
    order; 0: it does not. ``is_transposed``: weights are stored [in, out].
    """

    has_grouped_qkv: bool = False
    qkv_shards: int = 0
    is_transposed: bool = False


PLAIN_LINEARS = LinearLayout()


@dataclass(frozen=True)
class MixtureShape:
    """The experts of layers with a mixture: their inner size, that of the shared expert, and the layouts of their
    tensors, of which a checkpoint has one.

    ``latent_size``: chosen experts read latents of that size, which a linear layer makes of their usual input, and
    another one makes the hidden size of their sum; 0: they have the hidden size."""

    expert_width: int = 0
    shared_width: int = 0
    layouts: tuple[MixtureNames, ...] = ()
    latent_size: int = 0


@dataclass(frozen=True)
class LayerInputShape:
    """The per-layer inputs: embeddings of each token that layers get besides the residual stream (Gemma 3n).

    * ``width``: numbers in a token's input of one layer.
    * ``count``: number of layers with per-layer inputs; 0: none has any.
    * ``vocab_size``: number of tokens that have per-layer inputs; others have those of token 0.
    * ``padding``: placeholders of media have the inputs of this token.
    """

    width: int = 0
    count: int = 0
    vocab_size: int = 0
    padding: int = 0


@dataclass(frozen=True)
class QueryScaling:
    """The factor of a token's queries by its position p: 1 + weight * log(1 + floor((p + shift) / length)).

    ``skips_rotated``: only of layers without a rotary embedding.
    """

    length: int
    weight: float
    shift: int = 0
    skips_rotated: bool = False


@dataclass(frozen=True)
class MediaVocabulary:
    """Tokens from ``first`` on that a media projector embeds: ``size`` rows of ``width``, and a norm with ``eps``.

    ``module``: the prefix of its tensors.
    """

    module: str
    first: int
    size: int
    width: int
    eps: float


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder and the options of its computation. ``layers``: the computation of each layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_len: int  # tokens of the longest context
    eps: float  # of all norms
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerShape, ...]
    tied: bool = False
    # Kinds of linear layers that have a bias: qkv, output, gate_up, down, head, convolution, or state (the linear
    # layers of layers with a state).
    biases: frozenset[str] = frozenset()
    tensors: TensorNames = LLAMA_TENSORS
    linear_layout: LinearLayout = PLAIN_LINEARS
    norms: NormForm = RMS_NORMS
    after_norm_eps: float | None = None  # of norms after attention and after the MLP, if it is not ``eps``
    embedding_scale: float = 1.0  # multiplies embeddings, rounded to the dtype of the model
    scales_media: bool = False  # those of media as well
    logit_scale: float = 1.0  # multiplies logits
    logit_softcap: float | None = None  # after that, c makes them c * tanh(logit / c)
    mixture: MixtureShape = MixtureShape()  # the experts of layers with a mixture of them
    extra_tokens: int = 0  # embeddings of tokens beyond the vocabulary, for which the head has no logits
    extra_layers: int = 0  # unused layers that follow the last one in the checkpoint
    position_offset: int = 0  # the row of the position embeddings that position 0 has
    sinusoids: Sinusoids | None = None  # how position embeddings are computed that the checkpoint does not store
    query_scaling: QueryScaling | None = None  # the factor of queries, for layers that scale them
    latent: LatentShape | None = None  # the sizes of multi-head latent attention, for models that have it
    # Chooses the tokens that layers attend to, in models that have it
    indexer: IndexerShape | BlockIndexerShape | None = None
    state_layouts: tuple[StateNames, ...] = ()  # the names of tensors in layers that keep a state: one of them
    layer_inputs: LayerInputShape = LayerInputShape()
    media_vocabularies: tuple[MediaVocabulary, ...] = ()  # the last tokens, if projectors of media embed them
    compression: CompressionShape | None = None  # the sizes of attention to compressed entries, for models that have it
    hyper: HyperShape | None = None  # the residual streams, for models with hyper-connections
    norm_gate_rank: int = 0  # the numbers between both linear layers of gates of norms
    altup: AltUpShape | None = None  # the residual streams, for models that have several

    def head_sizes(self, layer: int) -> HeadSizes:
        """Return the sizes of the heads of a layer's keys and values."""
        return self.layers[layer].head_sizes or HeadSizes(self.kv_heads, self.head_dim)

    def query_heads(self, layer: int) -> int:
        """Return the number of query heads of a layer."""
        return self.layers[layer].heads or self.heads

    def value_dim(self, layer: int) -> int:
        """Return the dimension of a head's value."""
        if self.latent is not None:
            return self.latent.value_dim
        return self.layers[layer].value_dim or self.head_sizes(layer).dim

    def mlp_width(self, layer: int) -> int:
        """Return the inner size of a layer's MLP, experts aside."""
        shape = self.layers[layer]
        if shape.routing is not None and not shape.has_parallel_dense_mlp:
            return self.mixture.shared_width
        return shape.mlp_width or self.intermediate_size

    def layer_kv(self, layer: int) -> LayerKV:
        """Return the KV cache of a layer with attention."""
        if self.latent is not None:
            return LayerKV(1, self.latent.stored_dim, self.latent.rank, has_latents=True)
        sizes = self.head_sizes(layer)
        return LayerKV(sizes.kv_heads, sizes.dim, sizes.dim, has_latents=self.compression is not None)

    def entry_kv(self, layer: int) -> list[LayerKV]:
        """Return the KV caches of a layer's compressed entries: those of attention, then those of the indexer's keys,
        each followed by that of the rows that they are made of."""
        shape, sizes = self.layers[layer].entries, self.compression
        if shape is None or sizes is None:
            return []
        dims = [self.head_dim, sizes.index_dim] if shape.is_chosen else [self.head_dim]
        return [stored for dim in dims for stored in entry_layers(shape, dim)]

    def entry_kv_index(self, layer: int) -> int:
        """Return the index of the first of ``entry_kv`` in ``kv_layers``."""
        return self.layer_count + sum(len(self.entry_kv(i)) for i in range(layer))

    @property
    def kv_layers(self) -> list[LayerKV]:
        """The KV cache of each layer that has one, after these the keys of each indexer or compressed entries, and then
        the KV caches of layers with cross-attention."""
        stored = [self.layer_kv(i) for i, shape in enumerate(self.layers) if shape.stores_kv]
        if self.indexer is not None:
            keys = LayerKV(1, self.indexer.dim, 0, has_latents=True)
            stored += [keys for shape in self.layers if shape.has_indexer]
        stored += [kv for i in range(self.layer_count) for kv in self.entry_kv(i)]
        return stored + [self.layer_kv(i) for i, shape in enumerate(self.layers) if shape.has_cross_attention]

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def state_sizes(self) -> list[int]:
        """The size of a sequence's state in each layer that keeps one, in numbers."""
        return [shape.state.size for shape in self.layers if shape.state is not None]

    @property
    def rope(self) -> RopeConfig:
        """The first rotary embedding; the only one with longrope and M-RoPE."""
        return self.ropes[0]
