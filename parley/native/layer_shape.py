"""The computation of a decoder layer as data. ``layer.py`` has its weights.

The config reader writes this description; the numeric check's reference, the torch form and ``layers.cpp`` read it.
Each variation between model families is a field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.state_shape import StateShape

# Numbered as in activations.h. relu2 is the square of ReLU; clamped_swiglu also changes its factor; xielu (arXiv
# 2411.13010) has factors of each layer.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu", "xielu")
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of clamped_swiglu


@dataclass(frozen=True)
class Routing:
    """How a router chooses ``experts_per_token`` of ``experts`` for each row.

    Scores are the softmax of a row's logits, or their ``sigmoid``. With ``groups`` of adjacent experts, the
    ``chosen_groups`` whose ``group_best`` best experts have the largest sum are chosen first. The weights of the chosen
    experts are their scores, divided by their sum if ``normalized``, times ``scale``. ``shared``: whether the mixture
    has an MLP that computes each row: 0 none, 1 with weight 1, 2 with the sigmoid of one more logit. ``weighs_inputs``:
    weights multiply the inputs of the chosen experts instead of their outputs (Llama 4). ``chooses_by_logits``: the
    bias of the choice is added to logits, not to scores (Kolibri).

    ``sqrt_softplus``: scores are the square roots of the softplus of logits (DeepSeek V4). ``is_hashed``: a table says
    for each token which experts it has, and scores only weigh them.

    With a ``margin`` of 0 or more the router is a sparse mixer (arXiv 2409.12136, as it infers): experts are chosen one
    after another, the largest logit m first, and an expert's weight is its share of a softmax over those left whose
    logits x are close to it, (m - x) <= margin * max(|x|, m).
    """

    experts: int
    experts_per_token: int
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    sigmoid: bool = False
    normalized: bool = False
    shared: int = 0
    weighs_inputs: bool = False
    chooses_by_logits: bool = False
    scale: float = 1.0
    margin: float = -1.0
    sqrt_softplus: bool = False
    is_hashed: bool = False


@dataclass(frozen=True)
class LatentShape:
    """The sizes of multi-head latent attention (MLA, arXiv 2405.04434, section 2.1).

    Keys and values of all heads come from one latent of a token, a normed vector of ``rank`` numbers. A head's query
    and key have ``plain_dim`` numbers without rotation, and then ``rotary_dim`` rotated ones; all heads share the
    rotated numbers of a key. Values have ``value_dim``. Queries come from a normed latent of ``query_rank`` numbers; 0:
    from the layer's input.

    In the order of the fields, configs call these sizes kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim
    and q_lora_rank.
    """

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int = 0

    @property
    def head_dim(self) -> int:
        """The size of a head's query."""
        return self.plain_dim + self.rotary_dim

    @property
    def stored_dim(self) -> int:
        """The number of values that the KV cache holds of a token: the latent, and the rotated numbers of the key."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True)
class IndexerShape:
    """How an indexer chooses the ``top_k`` tokens that a token attends to, itself included (arXiv 2512.02556, section
    2.1, the "lightning indexer" of DeepSeek Sparse Attention). A token that sees at most ``top_k`` tokens attends to
    all of them.

    Each token has one key of ``dim`` numbers, a centered norm of a linear function of the layer's input. A query has
    ``heads`` vectors of this size, a linear function of the normed latent of queries, and a weight for each head, a
    linear function of the layer's input. The score of a token is the sum of weight * max(0, query * key) over heads;
    the highest scores are chosen, and of equal ones those of earlier tokens. Positive factors of all scores are left
    out. The first ``rotary_dim`` numbers of queries and keys, or the last ones if ``is_last_rotated``, are rotated by
    the angles of attention, in pairs of adjacent numbers if ``is_interleaved``. ``key_eps``: of the norm of keys.
    Configs call the first three fields index_n_heads, index_head_dim and index_topk.
    """

    heads: int
    dim: int
    top_k: int
    rotary_dim: int
    is_interleaved: bool
    is_last_rotated: bool = False
    key_eps: float = 1e-6

    @property
    def max_unchosen(self) -> int:
        """The most tokens that a token may see and still attends to all of them."""
        return self.top_k


@dataclass(frozen=True)
class BlockIndexerShape:
    """How an indexer chooses the ``top_k`` blocks of ``block_size`` adjacent tokens that a token attends to
    (MiniMax-M3, modeling_minimax_m3_vl.py). Blocks begin at multiples of their size. A token that sees at most
    ``top_k`` blocks attends to all tokens that it sees.

    Each token has one key of ``dim`` numbers, the norm of a linear function of the layer's input. A query has ``heads``
    vectors of this size, made alike, one for each key/value head of attention, which chooses for itself. The score of a
    block is the largest product of the vector with a key of the block that the token sees. The ``local_blocks`` last
    blocks that the token sees are always chosen, and then the highest scores; of equal ones those of earlier blocks.
    The first ``rotary_dim`` numbers of queries and keys are rotated as those of attention. Configs call the first five
    fields index_n_heads, index_head_dim, index_topk_blocks, index_block_size and index_local_blocks.
    """

    heads: int
    dim: int
    top_k: int
    block_size: int
    local_blocks: int
    rotary_dim: int
    is_interleaved: bool = False

    @property
    def max_unchosen(self) -> int:
        """The most tokens that a token may see and still attends to all of them."""
        return self.top_k * self.block_size


@dataclass(frozen=True)
class CompressionShape:
    """The sizes of attention to a window of tokens and to compressed entries (DeepSeek V4, modeling_deepseek_v4.py).

    All heads share the key of a token, and it is its value, too: a norm of a linear function of the layer's input,
    whose last ``rotary_dim`` numbers are rotated. Queries come from a normed latent of ``query_rank`` numbers, and each
    head's query is normed without weights. What a head attended is rotated back by its token's angle. The heads are
    ``output_groups`` groups of adjacent heads; a linear layer of each makes ``output_rank`` numbers of its heads, which
    are the input of the output layer.

    Layers with entries (``EntryShape``) that are chosen have an indexer: its keys are entries of ``index_dim`` numbers,
    made as those of attention, and its queries are linear functions of the latent of queries, with ``index_heads``
    vectors each. The score of an entry is that of ``IndexerShape``, and the ``top_k`` best are chosen.
    """

    query_rank: int
    rotary_dim: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_dim: int
    top_k: int


@dataclass(frozen=True)
class EntryShape:
    """The compressed entries of a layer: each ``tokens`` adjacent tokens, from multiples of ``tokens`` on, make one,
    and a token attends to those whose last token it sees.

    Each number of an entry is a sum of that of its tokens' rows, weighed by the softmax of their gates; both are linear
    functions of the layer's input, and a bias of each place is added to gates. The sum is normed, and rotated by the
    angle of the first token. With ``is_chosen``, an entry also has the tokens of the one before, of which it reads
    another half of the rows and gates, and an indexer chooses entries.
    """

    tokens: int
    is_chosen: bool

    def page_entries(self, page_size: int) -> int:
        """The number of entries whose last token may be in the same page of ``page_size`` tokens."""
        return max(1, page_size // self.tokens)


@dataclass(frozen=True)
class AltUpShape:
    """The residual streams of a model with alternating updates (AltUp, arXiv 2301.13310), in the form of Gemma 3n.

    Each token has ``streams`` rows of the hidden size. The embedding is the first; a linear layer makes each of the
    others of it, and gives it the size of the embedding. A layer first predicts all streams, and computes attention and
    the MLP on the ``active`` one:

        predicted[i] = stream[i] + sum of prediction[i, j] * stream[j] over j
        x = attention_norm(predicted[active])
        residual = (predicted[active] + attention_after_norm(attention(x)) + laurel(x)) / sqrt(2)
        activated = residual + mlp_after_norm(mlp(mlp_norm(residual)))

    laurel(x) = x + laurel_norm(laurel_right(laurel_left(x))) has ``laurel_rank`` numbers inside (LAuReL, arXiv
    2411.07501). The layer then corrects its predictions, and all streams but the first get its input of layers:

        stream[i] = predicted[i] + (1 + correction[i]) * (activated - predicted[active])
        stream[1:] += input_after_norm(input_up(activation(input_gate(output_scale * stream[active])) * layer_input))

    The coefficients depend on m = tanh(router(altup_norm(row)) / hidden) with one number for each stream: prediction
    is a linear function of that of ``stream[active]``, correction of that of ``activated``. ``has_output_scale``:
    whether layers have an ``output_scale`` [hidden], else it is 1. Lastly, linear layers turn the streams but the first
    into rows with the size of the first, and the mean of all is the hidden state before the last norm.
    """

    streams: int
    active: int
    laurel_rank: int
    has_output_scale: bool = True


@dataclass(frozen=True)
class HyperShape:
    """The residual streams of a model with hyper-connections (arXiv 2409.19606), in the forms of Hy4, where no stream
    is mixed into another one (modeling_hy_v4.py), and of DeepSeek V4, where all are (modeling_deepseek_v4.py).

    Each token has N = ``streams`` rows of the hidden size, at first its embedding. With m = weight(y), a linear
    function of all streams of a token one after another, divided by the root of their mean square plus the eps of
    norms, and with weights of their own for attention and for the MLP:

        read[i] = sigmoid(scale[0] * m[i] + base[i]) + eps
        write[i] = magnitude * sigmoid(scale[1] * m[N + i] + base[N + i]) + write_eps
        stream[i] += write[i] * attention(attention_norm(sum of read[j] * stream[j] over j))

    and the same with the MLP and its norm. Lastly, such a sum is the hidden state before the last norm. Configs call
    the first three fields hc_mult, hc_magnitude and hc_eps.

    With ``sinkhorn_steps``, the sum of mix[j, i] * stream[j] over j replaces stream[i] before that sum. mix is the
    softmax of each row of scale[2] * m[2 N + N j + i] + base[2 N + N j + i], plus eps; then its columns, and after that
    in each further step its rows and columns in turn, are divided by their sums plus eps (Sinkhorn-Knopp).
    """

    streams: int
    magnitude: float
    eps: float
    write_eps: float
    sinkhorn_steps: int = 0

    @property
    def side_sizes(self) -> tuple[int, ...]:
        """The numbers that a layer's connection has to read, to write, and to mix."""
        n = self.streams
        return (n, n, n * n) if self.sinkhorn_steps else (n, n)


@dataclass(frozen=True)
class HeadSizes:
    """The heads that a layer's keys and values have, and the numbers of each head."""

    kv_heads: int
    dim: int


@dataclass(frozen=True)
class GateLimits:
    """The limits of what enters the activation of an MLP: gates are at most ``gate``, ups within -``up`` .. ``up``."""

    gate: float
    up: float


@dataclass(frozen=True)
class LayerShape:
    """The computation of one decoder layer, apart from its sizes and weights. The defaults are those of Llama.

        residual += residual_scale * attention_after_norm(attention(attention_norm(residual)))
        residual += residual_scale * mlp_after_norm(mlp(mlp_norm(residual)))

    A norm that is None in the layer's weights (``DecoderLayer``) is skipped. Before each sum, the residual is
    multiplied by ``attention_residual_factor`` or ``mlp_residual_factor``. With ``has_normed_residual``, the sums add
    to attention_norm(residual) and mlp_norm(residual) instead of the residual.

    The MLP is down(activation(gate(x)) * up(x)). With ``has_parallel_dense_mlp`` there are a dense MLP and a mixture of
    experts, each with norms of its own:

        mlp(mlp_norm(residual)) = dense_after_norm(dense(mlp_norm(residual)))
            + experts_after_norm(mixture(experts_norm(residual)))

    With a ``layer_input``, numbers of each token that the model computes for this layer alone (per-layer embeddings),
    there is a third step: residual += input_after_norm(input_up(activation(input_gate(residual)) * layer_input)).
    Finally, the residual is multiplied by the layer's ``output_scale``.

    In a hybrid layer, attention and the kernel of its state read the same rows; the outputs of the state, times
    ``state_scale``, are added to the residual first. If the weights have sinks, each head has one more score, which
    gets its share of the softmax but has no value.
    """

    # Attention
    score_scale: float  # multiplies scores
    window: int | None = None  # number of tokens that a token attends to, itself included; None: all
    rope: int | None = 0  # number of the rotary embedding of queries and keys (``DecoderConfig.ropes``); None: none
    softcap: float | None = None  # c: scores become c * tanh(score / c)
    chunk: int | None = None  # positions of a chunk: a token attends only to tokens of its own chunk
    # One for each head: the slope times the distance to a key is subtracted from its score (ALiBi, arXiv 2108.12409)
    slopes: tuple[float, ...] = ()
    qkv_limit: float | None = None  # queries, keys and values are limited to -qkv_limit .. qkv_limit
    has_whole_qk_norm: bool = False  # the norms of queries and keys are over all heads of a token, not over each head
    is_qk_norm_late: bool = False  # these norms follow the rotation
    has_scaled_queries: bool = False  # a factor that depends on a token's position multiplies its queries
    heads: int | None = None  # of queries, if they are not those of the model
    head_sizes: HeadSizes | None = None  # if they are not those of the model
    kv_layer: int | None = None  # the layer whose keys and values this one reads; None: it has its own
    has_sinks: bool = True  # whether the layer uses sinks, in models with sinks
    # Dimension of a head's value, if it is less than that of a key. Pages have zeros after it.
    value_dim: int | None = None
    value_scale: float = 1.0  # multiplies values
    has_normed_values: bool = False  # each head's value gets an RMS norm without weights
    has_keys_as_values: bool = False  # values are the keys before their norm
    has_indexer: bool = False  # an indexer chooses the tokens that the layer attends to
    # The layer attends to the tokens that an indexer chose: its own, or the last one before it
    reads_chosen: bool = False
    entries: EntryShape | None = None  # which the layer attends to besides its window, in models that have them
    sees_later_media: bool = True  # tokens of images attend to later ones of the same image, if the model does that

    # The MLP
    # One of ACTIVATIONS. clamped_swiglu (GPT-OSS) limits the gate g to at most SWIGLU_LIMIT, and up to -SWIGLU_LIMIT ..
    # SWIGLU_LIMIT: g * sigmoid(SWIGLU_ALPHA * g) * (up + 1)
    activation: str = "silu"
    is_gated: bool = True  # False: the MLP is down(activation(up(x)))
    is_parallel: bool = False  # attention and the MLP both read the residual before the layer
    residual_scale: float = 1.0
    attention_residual_factor: float = 1.0
    mlp_residual_factor: float = 1.0
    has_normed_residual: bool = False
    routing: Routing | None = None  # the MLP is a mixture of such MLPs
    routes_early: bool = False  # the mixture's router reads the residual before the layer
    has_parallel_dense_mlp: bool = False  # a dense MLP is added to the mixture of experts
    mlp_width: int | None = None  # its inner size, if that is not the model's
    layer_input: int | None = None  # the index of the layer's part of the per-layer inputs; None: it has none

    # An output gate, states
    # Attention is multiplied by the sigmoid of a gate, which follows the queries in the outputs of ``qkv``
    has_output_gate: bool = False
    has_head_gates: bool = False  # the gate has one number for each head
    has_softplus_gates: bool = False  # the softplus of the gate is used instead of its sigmoid
    # ``query_up`` reads the normed latent of queries and then the latent itself, and gives each head's query and then
    # the gate of its output (A.X-K2)
    has_latent_gates: bool = False
    # The norm y before attention, or before the MLP, becomes y * sigmoid(up(silu(down(y)))) (A.X-K2)
    has_gated_attention_norm: bool = False
    has_gated_mlp_norm: bool = False
    state: StateShape | None = None  # a layer with a state of this kind replaces attention: no keys and values
    has_mixer: bool = True  # False: neither attention nor a state
    has_linear_mixer: bool = False  # a linear layer without a bias replaces attention, as the layer's ``output``
    has_mlp: bool = True
    # Cross-attention to images and an MLP, in rows that see any (``CrossAttentionWeights``). Such a layer has neither
    # a mixer nor an MLP besides.
    has_cross_attention: bool = False
    is_hybrid: bool = False  # attention and a state
    state_scale: float = 1.0
    mlp_scale: float | None = None  # replaces ``residual_scale`` for the MLP
    gate_scale: float = 1.0  # multiplies the gates before their activation
    # The mean of a token's gates plus this multiple of their standard deviation is subtracted from each gate, and
    # negative results become 0; None: gates are not changed
    gate_deviations: float | None = None
    mlp_limits: GateLimits | None = None  # of the MLP, or of the expert that computes each row
    expert_limits: GateLimits | None = None  # of chosen experts

    @property
    def has_attention(self) -> bool:
        """Whether the layer reads keys and values."""
        return self.has_mixer and not self.has_linear_mixer and (self.state is None or self.is_hybrid)

    @property
    def stores_kv(self) -> bool:
        """Whether the layer writes keys and values to pages of its own."""
        return self.has_attention and self.kv_layer is None


@dataclass(frozen=True)
class Norm:
    """A norm of rows: x / sqrt(mean(x²) + eps) * weight + bias. ``is_centered``: x is x - mean(x), as in LayerNorm.

    ``weight`` and ``bias`` are float32 [width] for every dtype of the model.
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    is_centered: bool = False
