"""MiMo-V2-Flash: windows with sinks and more key heads, values that are shorter than keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, SLIDING, DecoderFamily
from parley.model.networks.mixtures import MIMO_MIXTURE
from parley.model.networks.rope import RopeConfig, Unfusable, read_rope, rope_parameters, wrong_value
from parley.native.layer_shape import HeadSizes

MIMO_ROPES = {FULL: {"rope_theta": 5e6}, SLIDING: {"rope_theta": 1e4}}


def mimo_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first and each sixth see the whole context."""
    return [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]


def mimo_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of the layers by their type. Raises Unfusable."""
    parameters = rope_parameters(fields) or MIMO_ROPES
    if not all(isinstance(parameters.get(name), dict) for name in MIMO_ROPES):
        raise Unfusable("its config does not give a rotary embedding for each type of its layers")
    whole = {**fields, "partial_rotary_factor": 0.334}
    return {name: read_rope(whole, parameters[name], read_size(fields, "head_dim")) for name in MIMO_ROPES}


def mimo_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the heads, sinks and values of each layer. Raises Unfusable."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    dim, value_dim = fields["head_dim"], read_size(fields, "v_head_dim")
    scale = 1.0 if fields["attention_value_scale"] is None else read_number(fields, "attention_value_scale")
    if value_dim > dim:
        raise wrong_value("v_head_dim", value_dim)
    if heads % (2 * kv_heads):
        raise Unfusable(f"{heads} heads over {2 * kv_heads} key/value heads do not divide")
    values = {"value_dim": value_dim, "value_scale": scale}
    windowed = {"head_sizes": HeadSizes(2 * kv_heads, dim)}
    return [values | (windowed if name == SLIDING else {"has_sinks": False}) for name in layer_types]


def mimo_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of MiMo, which may give the window without the token itself."""
    before = config.get("sliding_window_size")
    if type(before) is not int:
        return MIMO_V2_FLASH
    return replace(
        MIMO_V2_FLASH,
        fields={**MIMO_V2_FLASH.fields, "sliding_window": before + 1},
        renamed={**MIMO_V2_FLASH.renamed, "sliding_window": ""},
    )


MIMO_V2_FLASH = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 152576,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 129,
        "layer_types": None,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
    },
    renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"},
    biases={"qkv": "attention_bias"},
    tensors=TensorNames(sinks="self_attn.attention_sink_bias"),
    layer_types=mimo_layers,
    ropes=mimo_ropes,
    layer_variations=mimo_variations,
    mixture=MIMO_MIXTURE,
    variant=mimo_variant,
)
