"""The weights of one decoder layer. Plain data; ``model/networks/decoder.py`` computes with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parley.native.experts import Mixture
from parley.native.layer_shape import Norm
from parley.native.packed import PackedWeight


@dataclass(frozen=True)
class StateWeights:
    """The weights of a layer with a state, apart from its linear layers; all in float32, for a model of any dtype.

    ``convolution`` [kernel, channels], the current token's last, and its bias [channels]. ``decay`` [heads]: the
    negative rate of a state's decay, and ``step_bias`` [heads], added to its step. ``norm``: of each head's
    output, with the weights of all heads. ``skip`` [heads]: the share of values in Mamba's outputs.

    In Kimi Delta Attention, ``step_bias`` is [inner]. In Mamba 1, each channel is a head, and ``decay`` is [state_dim,
    inner]; ``parameter_norms`` are those of its steps' numbers, B and C, if they have any.
    """

    convolution: torch.Tensor
    convolution_bias: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    step_bias: torch.Tensor | None = None
    norm: Norm | None = None
    skip: torch.Tensor | None = None
    parameter_norms: tuple[Norm, ...] = ()


@dataclass(frozen=True)
class IndexerWeights:
    """The weights of an indexer; ``IndexerShape`` or ``BlockIndexerShape`` defines them. ``queries`` reads the normed
    latent of queries, or with ``BlockIndexerShape`` the layer's input; ``key`` and ``head_weights`` read that input.
    Only indexers of blocks have a ``query_norm``, and only others have ``head_weights``."""

    queries: PackedWeight
    key: PackedWeight
    key_norm: Norm
    head_weights: PackedWeight | None = None
    query_norm: Norm | None = None


@dataclass(frozen=True)
class CompressorWeights:
    """The weights that make compressed entries (``EntryShape``). ``rows`` computes the rows of a token and then their
    gates; ``bias`` of gates, float32 [tokens, gates of a token]; ``norm`` of entries."""

    rows: PackedWeight
    bias: torch.Tensor
    norm: Norm


@dataclass(frozen=True)
class EntryIndexerWeights:
    """The weights that choose entries (``CompressionShape``). ``queries`` reads the normed latent of queries,
    ``head_weights`` the layer's input, and ``keys`` makes entries of the keys."""

    queries: PackedWeight
    head_weights: PackedWeight
    keys: CompressorWeights


@dataclass(frozen=True)
class AltUpWeights:
    """The weights of a layer with alternating updates of N streams, besides its LAuReL; ``AltUpShape`` defines them.

    ``router``: [N, hidden]. float32: ``prediction`` [N * N, N], of which row i * N + j gives the share of stream j in
    the prediction of stream i; ``correction`` [N, N]; ``output_scale`` [hidden], or None.
    """

    router: PackedWeight
    prediction: torch.Tensor
    correction: torch.Tensor
    output_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class HyperWeights:
    """The weights of a hyper-connection; ``HyperShape`` defines them. ``weight`` [outputs, N * hidden] has the outputs
    of ``side_sizes``, or N after the last layer. ``scale`` and ``base``, float32 [outputs]: of each output."""

    weight: PackedWeight
    scale: torch.Tensor
    base: torch.Tensor


@dataclass(frozen=True)
class CrossAttentionWeights:
    """The weights of a layer with cross-attention (Llama 3.2 Vision), which reads embeddings of images:

        residual += attention_gate * output(attention(query_norm(query(norm(residual))), keys, values))
        residual += mlp_gate * down(silu(gate(x)) * up(x)), x = mlp_norm(residual)

    ``keys_values`` computes the keys and then the values of an embedding; ``key_norm`` is that of each head's key.
    """

    query: PackedWeight
    keys_values: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    norm: Norm
    query_norm: Norm
    key_norm: Norm
    mlp_norm: Norm
    attention_gate: float
    mlp_gate: float


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer. Weights that the layer does not have, according to its ``LayerShape``, are None.

    * Attention: ``qkv`` computes queries, keys and values in one product. ``head_norm``: the RMS norm of queries and
      keys, [heads + kv_heads, dim], or of queries alone in a layer that reads the keys of another. ``sinks`` and
      ``slopes``: float32 [heads].
    * MLP: ``gate_up`` computes the outputs of gate and then of up, or of up alone. In a layer with a ``mixture`` of
      experts, ``gate_up`` and ``down`` are those of the shared expert, or None. ``experts_norm``, ``dense_after_norm``
      and ``experts_after_norm`` belong to a mixture with a parallel dense MLP. ``activation_factors``: of the
      activation xielu, the factors of x² above 0, of e^x - 1 - x below, and of x.
    * Multi-head latent attention: ``qkv`` computes the latent of queries, or queries, and then the latent of keys and
      values with the shared numbers of keys. ``query_up`` computes queries from their latent; None: ``qkv`` does.
      ``key_up`` [rank, plain_dim] makes a query that is multiplied by latents, and ``value_up`` [value_dim, rank] makes
      a value of a sum of latents. Both have a weight for each head, one after another.
    * Attention to compressed entries: ``qkv`` computes the latent of queries and then the key, ``latent_norm`` is that
      of keys, and ``value_up`` has a weight for each group of heads. ``compressor`` and ``entry_indexer``.
    * Layers with a ``state``: ``qkv`` computes the inputs of the kernel, and ``state_gates`` its numbers per head, if
      it has any. In Mamba 1, ``state_parameters`` reads the convolved channels, and ``state_step`` computes the steps
      of the channels. In Kimi Delta Attention, ``state_step`` computes decays, and ``state_gates`` the gates of
      outputs, from the last numbers of ``qkv``. In a hybrid layer, the state has ``state_input`` and ``state_output``.
    * Per-layer inputs: ``input_gate``, ``input_up`` and ``input_after_norm``.
    * Norms before the last linear layers (BitNet, arXiv 2402.17764): ``attended_norm`` of the rows that ``output``
      reads, and ``active_norm`` of those that ``down`` reads.
    * Gated norms: ``attention_norm_down`` and ``attention_norm_up``, ``mlp_norm_down`` and ``mlp_norm_up``.
    * Cross-attention: ``cross``.
    * Hyper-connections: ``attention_hyper`` and ``mlp_hyper``.
    * Alternating updates: ``altup``, ``altup_norm``, and the weights of ``laurel``.
    """

    qkv: PackedWeight | None
    output: PackedWeight | None
    gate_up: PackedWeight | None
    down: PackedWeight | None
    attention_norm: Norm | None = None
    attention_after_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_after_norm: Norm | None = None
    head_norm: Norm | None = None
    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    query_latent_norm: Norm | None = None
    latent_norm: Norm | None = None
    query_up: PackedWeight | None = None
    key_up: PackedWeight | None = None
    value_up: PackedWeight | None = None
    indexer: IndexerWeights | None = None
    compressor: CompressorWeights | None = None
    entry_indexer: EntryIndexerWeights | None = None
    mixture: Mixture | None = None
    state: StateWeights | None = None
    state_gates: PackedWeight | None = None
    state_parameters: PackedWeight | None = None
    state_step: PackedWeight | None = None
    state_input: PackedWeight | None = None
    state_output: PackedWeight | None = None
    experts_norm: Norm | None = None
    dense_after_norm: Norm | None = None
    experts_after_norm: Norm | None = None
    input_gate: PackedWeight | None = None
    input_up: PackedWeight | None = None
    input_after_norm: Norm | None = None
    output_scale: float = 1.0
    cross: CrossAttentionWeights | None = None
    attention_hyper: HyperWeights | None = None
    mlp_hyper: HyperWeights | None = None
    altup: AltUpWeights | None = None
    altup_norm: Norm | None = None
    laurel_left: PackedWeight | None = None
    laurel_right: PackedWeight | None = None
    laurel_norm: Norm | None = None
    attended_norm: Norm | None = None
    active_norm: Norm | None = None
    attention_norm_down: PackedWeight | None = None
    attention_norm_up: PackedWeight | None = None
    mlp_norm_down: PackedWeight | None = None
    mlp_norm_up: PackedWeight | None = None
    activation_factors: list[float] = field(default_factory=list)
