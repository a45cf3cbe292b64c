"""Laguna: numbers of heads and rotary embeddings that differ by layer, and gates with softplus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.decoder_tensors import NORMED_HEADS
from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, SLIDING, DecoderFamily
from parley.model.networks.mixtures import LAGUNA_MIXTURE
from parley.model.networks.rope import RopeConfig, Unfusable, read_rope, rope_parameters, wrong_value

LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def laguna_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of the layers by their type. Raises Unfusable."""
    parameters = rope_parameters(fields) or LAGUNA_ROPES
    by_type = {name: parameters[name] for name in LAGUNA_ROPES if isinstance(parameters.get(name), dict)}
    layer_types = fields["layer_types"] if isinstance(fields["layer_types"], list) else []
    if not by_type or any(name in layer_types for name in LAGUNA_ROPES.keys() - by_type.keys()):
        raise Unfusable("its config does not give a rotary embedding for each type of its layers")
    return {
        name: read_rope({**fields, "partial_rotary_factor": 1.0}, own, fields["head_dim"])
        for name, own in by_type.items()
    }


def laguna_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the heads and gates of each layer. Raises Unfusable."""
    heads, kv_heads = fields["num_attention_heads_per_layer"], fields["num_key_value_heads"]
    if heads is None:
        heads = [fields["num_attention_heads"]] * len(layer_types)
    is_list = isinstance(heads, list) and len(heads) == len(layer_types)
    if not is_list or not all(type(count) is int and count > 0 and count % kv_heads == 0 for count in heads):
        raise wrong_value("num_attention_heads_per_layer", heads)
    return [{"heads": count, "has_softplus_gates": True} for count in heads]


def laguna_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Laguna: its gates have a number for each head, or for each number of a head."""
    return replace(LAGUNA, has_head_gates=config.get("gating", True) in (True, "per-head"))


LAGUNA = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "layer_types": None,
        "attention_bias": False,
        "num_attention_heads_per_layer": None,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mlp_layer_types": None,
        "routed_scaling_factor": 1.0,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
    },
    renamed={"num_local_experts": "num_experts", "moe_routed_scaling_factor": "routed_scaling_factor"},
    required={
        "attention_bias": False,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
    },
    tensors=replace(
        NORMED_HEADS,
        qkv=("self_attn.q_proj", "self_attn.g_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    ropes=laguna_ropes,
    has_output_gate=True,
    layer_variations=laguna_variations,
    mixture=LAGUNA_MIXTURE,
    variant=laguna_variant,
)
