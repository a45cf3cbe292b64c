"""The names of a decoder's tensors in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorNames:
    """The names of a model's tensors in its checkpoint; those of a layer follow ``layer`` and its number.

    ``qkv`` and ``gate_up`` list the linear layers to be merged; ``merged_gate_up`` is one layer in place of the latter,
    in files that have it. Norms and ``sinks`` that are None do not exist; a norm
    without weights has an empty name. ``positions``: the embeddings of positions, which are added to those of tokens;
    ``embedding_norm``: the norm of the sum.
    ``query_up`` and ``latent_up`` are the linear layers that make queries, and keys and values, of their latents in
    models with multi-head latent attention.
    ``mixture_after_norm`` is ``mlp_after_norm`` of layers with a mixture; files may also have it for other layers,
    where it is unused.
    ``mixture_norm`` is ``mlp_norm`` of layers with a mixture. ``attention_norm_gate`` and ``mixture_norm_gate`` are the
    two linear layers of the gate of ``attention_norm``, and of that norm.
    ``published`` maps names of modules in published files to Transformers' names, which are used here.
    ``activation_factors`` is the module with the parameters of the xIELU activation.
    ``layer_inputs`` is the table of per-layer embeddings of tokens, used besides those that ``input_projection``
    computes from the tokens' usual embeddings (their norm: ``input_norm``); empty: there are only the latter. The next
    three belong to each layer. ``output_scale`` is the tensor with the scale of a layer's output. ``altup_norm`` and
    ``laurel_norm`` are norms of ``AltUpShape``, the last two norms of ``DecoderLayer``.
    """

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    embedding_norm: str | None = None
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    merged_gate_up: str | None = None
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attention_after_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_after_norm: str | None = None
    mixture_after_norm: str | None = None
    mixture_norm: str | None = None
    attention_norm_gate: tuple[str, str] | None = None
    mixture_norm_gate: tuple[str, str] | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    sinks: str | None = None
    query_latent_norm: str | None = None
    latent_norm: str | None = None
    query_up: str | None = None
    latent_up: str | None = None
    experts_norm: str | None = None
    dense_after_norm: str | None = None
    experts_after_norm: str | None = None
    layer_inputs: str | None = None
    input_projection: str = "model.per_layer_model_projection"
    input_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_up: str = "per_layer_projection"
    input_after_norm: str | None = None
    output_scale: str | None = None
    activation_factors: str | None = None
    altup_norm: str | None = None
    laurel_norm: str | None = None
    attended_norm: str | None = None
    active_norm: str | None = None
    published: Mapping[str, str] = field(default_factory=dict)


LLAMA_TENSORS = TensorNames()
NORMED_HEADS = TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
