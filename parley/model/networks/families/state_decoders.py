"""The decoders with layers that keep a state: one row each. ``state_layers.py`` says how these layers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number
from parley.model.networks.decoder_config import NormForm
from parley.model.networks.decoder_tensors import NORMED_HEADS, TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    FULL,
    SLIDING,
    DecoderFamily,
    read_whole_rope,
)
from parley.model.networks.families.mixture_decoders import MIXTRAL
from parley.model.networks.families.rms_norm_decoders import OLMO2
from parley.model.networks.mixtures import LFM2_MIXTURE, QWEN2_MIXTURE, QWEN3_5_MIXTURE
from parley.model.networks.rope import RopeConfig, Unfusable
from parley.model.networks.state_layers import (
    LFM2_STATES,
    LIGHTNING_STATES,
    OLMO_STATES,
    QWEN3_5_STATES,
    QWEN3_NEXT_STATES,
)
from parley.native.state_shape import Mamba2Shape


def full_at_interval(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last of each ``full_attention_interval`` sees the whole context."""
    interval = fields["full_attention_interval"]
    return [QWEN3_NEXT_STATES.layer_type if (i + 1) % interval else FULL for i in range(count)]


def full_at_indices(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: those in ``full_attn_idxs`` see the whole context, by default all."""
    indices = fields["full_attn_idxs"]
    return [FULL if indices is None or i in indices else LFM2_STATES.layer_type for i in range(count)]


DELTA_FIELDS: dict[str, Any] = COMMON_FIELDS | {
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_NEXT = DecoderFamily(
    DELTA_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    norms=NormForm(offset=1.0),
    has_output_gate=True,
    layer_types=full_at_interval,
    mixture=QWEN2_MIXTURE,
    state=QWEN3_NEXT_STATES,
)
QWEN3_5 = DecoderFamily(
    DELTA_FIELDS
    | {
        "vocab_size": 248320,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    norms=NormForm(offset=1.0),
    has_output_gate=True,
    layer_types=full_at_interval,
    mrope=(True, (11, 11, 10)),
    state=QWEN3_5_STATES,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    fields={
        **QWEN3_5.fields,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    mixture=QWEN3_5_MIXTURE,
)


def minimax_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first, third and so on see the whole context."""
    return [LIGHTNING_STATES.layer_type if i % 2 else FULL for i in range(count)]


def minimax_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the factors of each layer's sums, and the factor of its heads' decay rates, which falls with the layer's
    index. Raises Unfusable."""
    shape, last = LIGHTNING_STATES.read_shape(fields), len(layer_types) - 1
    assert isinstance(shape, Mamba2Shape)
    factors = {name: read_number(fields, f"{name}_factor") for name in MINIMAX_FACTORS}
    if any(value == 0 for value in factors.values()):
        raise Unfusable("its residual stream, or a part of its sums, is multiplied by 0")
    variations: list[dict[str, Any]] = []
    for i, layer_type in enumerate(layer_types):
        is_linear = layer_type == LIGHTNING_STATES.layer_type
        kind, share = "linear_attn" if is_linear else "full_attn", 1 - i / (last + 1e-5) + 1e-5
        variations.append(
            {
                "attention_residual_factor": factors[f"{kind}_alpha"],
                "residual_scale": factors[f"{kind}_beta"],
                "mlp_residual_factor": factors["mlp_alpha"],
                "mlp_scale": factors["mlp_beta"],
                "has_normed_residual": True,
                **({"state": replace(shape, rate_share=share)} if is_linear else {}),
            }
        )
    return variations


MINIMAX_FACTORS = [f"{kind}_{name}" for kind in ("full_attn", "linear_attn", "mlp") for name in ("alpha", "beta")]
# MiniMax-Text-01 and MiniMax-M1
MINIMAX = replace(
    MIXTRAL,
    fields={
        **MIXTRAL.fields,
        "max_position_embeddings": 131072,
        "layer_types": None,
        **{f"{name}_factor": 1.0 for name in MINIMAX_FACTORS},
    },
    required={"sliding_window": None},
    layer_types=minimax_layers,
    layer_variations=minimax_variations,
    state=LIGHTNING_STATES,
)
LFM2_TENSORS = TensorNames(
    norm="model.embedding_norm",
    output="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
)
LFM2_FIELDS: dict[str, Any] = COMMON_FIELDS | {
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "layer_types": None,
    "full_attn_idxs": None,
    "conv_bias": False,
    "conv_L_cache": 3,
}


def lfm2_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of LFM2, whose MLPs may have two thirds of the config's size, rounded."""
    values = {**LFM2.fields, **config}
    width, unit = values.get("block_ff_dim", values["intermediate_size"]), values["block_multiple_of"]
    factor = values["block_ffn_dim_multiplier"]
    if type(width) is not int or type(unit) is not int or unit < 1 or not isinstance(factor, int | float | None):
        return LFM2
    if values["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        width = width if factor is None else -(-int(factor * width) // unit) * unit
    return replace(LFM2, fields={**LFM2.fields, "intermediate_size": width}, renamed={**LFM2.renamed, **LFM2_WIDTHS})


# The sizes that ``lfm2_variant`` has read.
LFM2_WIDTHS = {"intermediate_size": "stated_intermediate_size", "block_ff_dim": "stated_block_ff_dim"}
LFM2_RENAMED = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
LFM2 = DecoderFamily(
    LFM2_FIELDS
    | {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    renamed={**LFM2_RENAMED, "block_ff_dim": "intermediate_size"},
    tensors=LFM2_TENSORS,
    activation="silu",
    layer_types=full_at_indices,
    variant=lfm2_variant,
    state=LFM2_STATES,
)
LFM2_MOE = DecoderFamily(
    LFM2_FIELDS
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "first_k_dense_replace": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    renamed={**LFM2_RENAMED, "num_dense_layers": "first_k_dense_replace"},
    required={"use_expert_bias": True},
    tensors=LFM2_TENSORS,
    activation="silu",
    layer_types=full_at_indices,
    mixture=LFM2_MIXTURE,
    state=LFM2_STATES,
)


def every_fourth_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: each fourth sees the whole context, or of fewer than four the last."""
    return [FULL if i % 4 == 3 or i == count - 1 < 3 else OLMO_STATES.layer_type for i in range(count)]


def rotated_with_base(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: all, unless ``rope_parameters`` gives its base as null."""
    parameters = fields["rope_parameters"] or {}
    has_base = "rope_theta" not in parameters or parameters["rope_theta"] is not None
    return [has_base] * len(layer_types)


OLMO_HYBRID = replace(
    OLMO2,
    fields={
        **OLMO2.fields,
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "layer_types": None,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    tensors=replace(
        OLMO2.tensors,
        published={
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
        },
    ),
    layer_types=every_fourth_full,
    rotated=rotated_with_base,
    state=OLMO_STATES,
)
LFM3_ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def lfm3_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: convolutions in turn with attention, which has a window each second time,
    except the first."""
    other_types = {2: FULL, 0: SLIDING}
    return [other_types.get(i % 4, LFM2_STATES.layer_type) if i else LFM2_STATES.layer_type for i in range(count)]


def lfm3_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of LFM3's layers by their type. Raises Unfusable."""
    parameters = fields["rope_parameters"] or LFM3_ROPES
    if not all(isinstance(parameters.get(name), dict) for name in LFM3_ROPES):
        raise Unfusable("its config does not give a rotary embedding for each type of its layers")
    return {name: read_whole_rope(parameters[name], fields["head_dim"]) for name in LFM3_ROPES}


def lfm3_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of LFM3: norms after attention and MLP, and gates of heads, are options."""
    family, tensors = LFM3, LFM3.tensors
    if not config.get("use_sandwich_norm", True):
        tensors = replace(tensors, attention_after_norm=None, mlp_after_norm=None)
    if not config.get("use_attention_gate", True):
        tensors = replace(tensors, qkv=LFM2_TENSORS.qkv)
        family = replace(family, has_output_gate=False, has_head_gates=False)
    return replace(family, tensors=tensors)


LFM3 = DecoderFamily(
    LFM2_FIELDS
    | {
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "attention_bias": False,
    },
    renamed={"norm_eps": "rms_norm_eps"},
    biases=ATTENTION_BIASES,
    tensors=replace(
        LFM2_TENSORS,
        qkv=("self_attn.q_proj", "self_attn.g_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        attention_after_norm="post_operator_norm",
        mlp_after_norm="post_ffn_norm",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        published={"self_attn.gate_proj": "self_attn.g_proj"},
    ),
    activation="silu",
    layer_types=lfm3_layers,
    ropes=lfm3_ropes,
    has_output_gate=True,
    has_head_gates=True,
    variant=lfm3_variant,
    state=LFM2_STATES,
)
