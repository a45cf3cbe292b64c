"""The decoders with Mamba 1 layers: one row each. ``state_layers.py`` says how these layers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, DecoderFamily, none_rotated
from parley.model.networks.families.mamba_decoders import MIXER_TENSORS, all_mamba
from parley.model.networks.mixtures import JAMBA_MIXTURE
from parley.model.networks.state_layers import FALCON_MAMBA_STATES, JAMBA_STATES, MAMBA1_STATES

MAMBA1_FIELDS: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
MAMBA1 = DecoderFamily(
    COMMON_FIELDS
    | MAMBA1_FIELDS
    | {
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_attention_heads": 1,  # no layer has attention
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "mamba_d_inner": None,
    },
    renamed={
        "intermediate_size": "mamba_d_inner",
        "layer_norm_epsilon": "rms_norm_eps",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "time_step_rank": "mamba_dt_rank",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    },
    tensors=MIXER_TENSORS,
    layer_types=all_mamba,
    rotated=none_rotated,
    has_single_parts=True,
    state=MAMBA1_STATES,
)
FALCON_MAMBA = replace(
    MAMBA1,
    fields={**MAMBA1.fields, "mixer_rms_eps": 1e-6},
    state=FALCON_MAMBA_STATES,
)


def full_in_periods(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: each ``attn_layer_period``-th from ``attn_layer_offset`` on sees the whole
    context, others are Mamba."""
    period = read_size(fields, "attn_layer_period")
    return [FULL if i % period == fields["attn_layer_offset"] else JAMBA_STATES.layer_type for i in range(count)]


def jamba_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Jamba. With one expert, all layers have a plain MLP."""
    experts = config.get("num_experts", config.get("num_local_experts", 16))
    return replace(JAMBA, mixture=None) if experts == 1 else JAMBA


JAMBA = DecoderFamily(
    COMMON_FIELDS
    | MAMBA1_FIELDS
    | {
        "vocab_size": 65536,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
    renamed={"num_local_experts": "num_experts"},
    tensors=TensorNames(
        norm="model.final_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        mlp_norm="pre_ff_layernorm",
    ),
    layer_types=full_in_periods,
    rotated=none_rotated,
    mixture=JAMBA_MIXTURE,
    variant=jamba_variant,
    state=JAMBA_STATES,
)
