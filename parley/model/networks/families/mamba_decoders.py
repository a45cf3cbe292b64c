"""The decoders with Mamba 2 layers: one row each. ``state_layers.py`` says how these layers are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    FULL,
    MIXTURE,
    MLP,
    MLP_BIASES,
    DecoderFamily,
    none_rotated,
)
from parley.model.networks.families.mixture_decoders import GRANITE_MOE_SHARED
from parley.model.networks.mixtures import NEMOTRON_MIXTURE
from parley.model.networks.rope import wrong_value
from parley.model.networks.state_layers import MAMBA2_STATES, MIXER_STATES, read_mamba2
from parley.native.state_shape import Mamba2Shape

MAMBA_FIELDS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}


def all_mamba(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: all keep a state."""
    return [MAMBA2_STATES.layer_type] * count


def full_at_attention_indices(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: those in ``attn_layer_indices`` see the whole context, others are Mamba."""
    indices = fields["attn_layer_indices"] or ()
    return [FULL if i in indices else MAMBA2_STATES.layer_type for i in range(count)]


def rotated_by_name(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: attention has if ``position_embedding_type`` is rope."""
    return [fields["position_embedding_type"] == "rope" and layer_type == FULL for layer_type in layer_types]


def granite_hybrid_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Granite 4. Without experts, the shared one is the MLP of each layer."""
    if config.get("num_local_experts", 8):
        return GRANITE_HYBRID
    tensors = GRANITE_HYBRID.tensors
    if (config.get("quantization_config") or {}).get("quant_method") != "gguf":  # whose files have the usual layers
        tensors = replace(tensors, gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    renamed = {"shared_intermediate_size": "intermediate_size", "intermediate_size": "expert_intermediate_size"}
    fields = {**GRANITE_HYBRID.fields, "intermediate_size": 1024}
    return replace(GRANITE_HYBRID, fields=fields, renamed=renamed, tensors=tensors, mixture=None)


GRANITE_HYBRID = replace(
    GRANITE_MOE_SHARED,
    fields={
        **GRANITE_MOE_SHARED.fields,
        **MAMBA_FIELDS,
        "shared_expert_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    },
    layer_types=all_mamba,
    rotated=rotated_by_name,
    variant=granite_hybrid_variant,
    state=MAMBA2_STATES,
)
BAMBA = DecoderFamily(
    COMMON_FIELDS
    | MAMBA_FIELDS
    | {
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.5,
        "attn_layer_indices": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    required={"partial_rotary_factor": 0.5},
    biases=ATTENTION_BIASES | MLP_BIASES,
    tensors=TensorNames(
        norm="model.final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
    ),
    layer_types=full_at_attention_indices,
    state=MAMBA2_STATES,
)


def read_multipliers(fields: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Return a config's list of ``count`` factors, 1 each if there is none. Raises Unfusable."""
    values = fields[name]
    if values is None:
        return [1.0] * count
    if (
        not isinstance(values, list | tuple)
        or len(values) != count
        or not all(is_factor(multiplier) for multiplier in values)
    ):
        raise wrong_value(name, values)
    return [float(multiplier) for multiplier in values]


def is_factor(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def falcon_h1_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the factors of Falcon-H1's layers. Linear layers pass on factors of their inputs."""
    for name in ("key", "attention_in", "attention_out", "ssm_out"):
        if not is_factor(fields[f"{name}_multiplier"]):
            raise wrong_value(f"{name}_multiplier", fields[f"{name}_multiplier"])
    gate, down = read_multipliers(fields, "mlp_multipliers", 2)
    entering = fields["attention_in_multiplier"]
    return {
        "score_scale": entering * entering * fields["key_multiplier"],
        "residual_scale": entering * fields["attention_out_multiplier"],
        "state_scale": fields["ssm_out_multiplier"],
        "mlp_scale": down,
        "gate_scale": gate,
    }


def read_falcon_h1_state(fields: Mapping[str, Any]) -> Mamba2Shape:
    """Return the sizes and factors of Falcon-H1's Mamba 2 layers. Raises Unfusable."""
    if not is_factor(fields["ssm_in_multiplier"]):
        raise wrong_value("ssm_in_multiplier", fields["ssm_in_multiplier"])
    factors = [
        fields["ssm_in_multiplier"] * multiplier for multiplier in read_multipliers(fields, "ssm_multipliers", 5)
    ]
    return replace(
        read_mamba2(fields),
        is_gate_first=not fields["mamba_norm_before_gate"],
        gate_scale=factors[0],
        input_scales=(factors[1], factors[2], factors[3]),
        step_scale=factors[4],
    )


def falcon_h1_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Falcon-H1, whose Mamba 2 layers may have a norm."""
    if config.get("mamba_rms_norm"):
        return FALCON_H1
    names, *other_names = (replace(layout, norm=None) for layout in (FALCON_H1_STATES.names, *FALCON_H1_STATES.others))
    return replace(FALCON_H1, state=replace(FALCON_H1_STATES, names=names, others=tuple(other_names)))


FALCON_H1_STATES = replace(MAMBA2_STATES, read_shape=read_falcon_h1_state)
FALCON_H1 = DecoderFamily(
    COMMON_FIELDS
    | MAMBA_FIELDS
    | {
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_multipliers": None,
        "ssm_multipliers": None,
        "embedding_multiplier": 1.0,
        "logit_scale": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    renamed={"lm_head_multiplier": "logit_scale"},
    required={"projectors_bias": False, "attention_bias": False, "mamba_proj_bias": False},
    biases=MLP_BIASES,
    tensors=BAMBA.tensors,
    is_hybrid=True,
    layer_factors=falcon_h1_factors,
    variant=falcon_h1_variant,
    state=FALCON_H1_STATES,
)
# Both types have these, besides names of their own that other types use for attention.
MIXER_RENAMED = {
    "layer_norm_epsilon": "rms_norm_eps",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "mamba_proj_bias": "unused_proj_bias",
    "mamba_expand": "unused_expand",
}
MIXER_TENSORS = TensorNames(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    attention_norm="norm",
    mlp_norm="norm",
)
MAMBA2 = DecoderFamily(
    COMMON_FIELDS
    | MAMBA_FIELDS
    | {
        "vocab_size": 32768,
        "num_hidden_layers": 64,
        "num_attention_heads": 1,  # no layer has attention
        "rms_norm_eps": 1e-5,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
    },
    renamed=MIXER_RENAMED
    | {
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "state_size": "mamba_d_state",
        "expand": "mamba_expand",
    },
    tensors=MIXER_TENSORS,
    layer_types=all_mamba,
    rotated=none_rotated,
    has_single_parts=True,
    state=MIXER_STATES,
)


def nemotron_hybrid_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Nemotron-H. Its layers are listed, or are letters of a pattern."""
    types, pattern = config.get("layers_block_type") or config.get("layer_types"), config.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        types = [PATTERN_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(types, list):
        types = [MAMBA2_STATES.layer_type, MIXTURE, FULL, MLP]
    renamed = dict(NEMOTRON_HYBRID.renamed) | {
        "num_hidden_layers": "stated_hidden_layers",
        "layer_types": "stated_types",
    }
    fields = {**NEMOTRON_HYBRID.fields, "layer_types": types, "num_hidden_layers": len(types)}
    mixture = NEMOTRON_MIXTURE if MIXTURE in types else None
    return replace(NEMOTRON_HYBRID, fields=fields, renamed=renamed, mixture=mixture)


PATTERN_LETTERS = {"M": MAMBA2_STATES.layer_type, "*": FULL, "-": MLP, "E": MIXTURE}
NEMOTRON_HYBRID = DecoderFamily(
    COMMON_FIELDS
    | MAMBA_FIELDS
    | {
        "vocab_size": 131072,
        "intermediate_size": 21504,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "mamba_expand": None,
        "mlp_bias": False,
        "layer_types": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    renamed=MIXER_RENAMED
    | {
        "hidden_act": "unused_act",
        "mlp_hidden_act": "hidden_act",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "ssm_state_size": "mamba_d_state",
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    biases=MLP_BIASES,
    tensors=MIXER_TENSORS,
    rotated=none_rotated,
    is_gated=False,
    has_single_parts=True,
    variant=nemotron_hybrid_variant,
    state=MIXER_STATES,
)
