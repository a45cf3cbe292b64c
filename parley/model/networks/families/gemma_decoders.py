"""The decoders of Gemma: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import RMS_NORMS, NormForm
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    FULL,
    SLIDING,
    DecoderFamily,
    every_second_full,
    full_in_turn,
    read_whole_rope,
)
from parley.model.networks.families.rms_norm_decoders import common_base, rotated_by_base
from parley.model.networks.mixtures import GEMMA4_MIXTURE
from parley.model.networks.rope import RopeConfig, Unfusable
from parley.native.layer_shape import HeadSizes

GEMMA_TENSORS = TensorNames(
    attention_after_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after_norm="post_feedforward_layernorm",
)


def gemma_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of the first Gemma. Its files name gelu, but mean the tanh approximation."""
    return replace(GEMMA, activation="gelu_tanh") if config.get("hidden_act") == "gelu" else GEMMA


GEMMA = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    required={"use_bidirectional_attention": False},
    biases=ATTENTION_BIASES,
    norms=NormForm(offset=1.0),
    has_embedding_scale=True,
    variant=gemma_variant,
)
GEMMA2 = replace(
    GEMMA,
    fields={
        **GEMMA.fields,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    renamed={"hidden_activation": "hidden_act"},
    tensors=GEMMA_TENSORS,
    layer_types=every_second_full,
    variant=None,
)


def fourth_from_last_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last and each fourth before it see the whole context."""
    return [SLIDING if (count - 1 - i) % 4 else FULL for i in range(count)]


def rotated_but_fourth(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: as ``rotated_by_base``, or without bases those that
    ``fourth_from_last_full`` gives a window."""
    if fields["layer_rope_theta"] is None:
        return [layer_type == SLIDING for layer_type in fourth_from_last_full(fields, len(layer_types))]
    return rotated_by_base(fields, layer_types)


def muse_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the factor of scores of Muse Glimmer. Raises Unfusable."""
    return {"score_scale": read_number(fields, "qk_scale_factor")}


def muse_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Muse Glimmer: norms of queries and keys have weights in GGUF files only."""
    if (config.get("quantization_config") or {}).get("quant_method") != "gguf":
        return MUSE_GLIMMER
    names = replace(MUSE_GLIMMER.tensors, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    return replace(MUSE_GLIMMER, tensors=names)


MUSE_GLIMMER = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 202048,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "attention_bias": False,
        "sliding_window": 2048,
        "layer_types": None,
        "layer_rope_theta": None,
        "qk_scale_factor": 3.87,
        "logit_scale": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
    renamed={"hidden_activation": "hidden_act", "output_multiplier": "logit_scale"},
    required={"attention_bias": False},
    tensors=replace(
        GEMMA_TENSORS,
        embedding_norm="",
        qkv=("self_attn.q_proj", "self_attn.gate_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm="",
        key_norm="",
    ),
    norms=NormForm(offset=1.0, last_offset=0.0),
    layer_types=fourth_from_last_full,
    rotated=rotated_but_fourth,
    resolve_rope=common_base,
    has_output_gate=True,
    layer_factors=muse_factors,
    variant=muse_variant,
)
VAULT_GEMMA = replace(
    GEMMA2,
    required={},
    tensors=replace(GEMMA_TENSORS, attention_after_norm=None, mlp_after_norm=None),
)
GEMMA3 = replace(
    GEMMA2,
    fields={
        **GEMMA2.fields,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    # Transformers reads attn_logit_softcapping, but its attention ignores it.
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    tensors=replace(GEMMA_TENSORS, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    layer_types=full_in_turn,
    local_theta="rope_local_base_freq",
)


def gemma4_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Gemma 4: its mixtures and inputs of layers are options."""
    family, tensors = GEMMA4_TEXT, GEMMA4_TENSORS
    if not config.get("enable_moe_block"):
        family = replace(family, mixture=None)
        tensors = replace(tensors, experts_norm=None, dense_after_norm=None, experts_after_norm=None)
    default = family.fields["hidden_size_per_layer_input"]
    if config.get("vocab_size_per_layer_input") == 0:  # EmbeddingGemma 2 makes inputs of layers of embeddings alone
        tensors = replace(
            tensors,
            layer_inputs="",
            input_projection="model.ple.per_layer_model_projection",
            input_norm="model.ple.per_layer_projection_norm",
            input_gate="ple_block.per_layer_input_gate",
            input_up="ple_block.per_layer_projection",
            input_after_norm="ple_block.post_per_layer_input_norm",
        )
    elif config.get("hidden_size_per_layer_input", default) in (0, None):
        tensors = replace(tensors, layer_inputs=None, input_after_norm=None)
    return replace(family, tensors=tensors)


def gemma4_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of Gemma 4's layers by their type. Raises Unfusable."""
    parameters = fields["rope_parameters"] or GEMMA4_ROPES
    full = next((sizes for sizes in _own_sizes(fields).values()), None)
    dims = {
        FULL: full.dim if full is not None else read_size(fields, "head_dim"),
        SLIDING: read_size(fields, "head_dim"),
    }
    return {name: read_whole_rope(parameters[name], dim) for name, dim in dims.items()}


def shared_kv_layers(layer_types: list[str], sharing: int) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads, None if it has its own. Raises Unfusable.

    The last ``sharing`` layers read those of the last layer of their type that has its own.
    """
    storing = len(layer_types) - sharing
    latest = {layer_types[i]: i for i in range(storing)}
    if latest.keys() != set(layer_types):
        raise Unfusable(f"only its first {storing} layers have keys and values")
    return [None if i < storing else latest[layer_type] for i, layer_type in enumerate(layer_types)]


def gemma4_layers(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the fields of ``LayerShape`` for each layer of Gemma 4. Raises Unfusable.

    The last layers have no keys and values: they read those of the last layer of their type that has them.
    """
    if layer_types[-1] != FULL:
        raise Unfusable("its last layer has a window")
    own_sizes = _own_sizes(fields)
    if any(layer_types[layer] != FULL for layer in own_sizes) or len({*own_sizes.values()}) > 1:
        raise Unfusable("its layers of one type have heads of different sizes")
    if own_sizes and len(own_sizes) != layer_types.count(FULL):
        raise Unfusable("its layers of one type have heads of different sizes")
    kv_layers = shared_kv_layers(layer_types, fields["num_kv_shared_layers"] or 0)
    has_inputs, has_mixture = fields.get("hidden_size_per_layer_input"), bool(fields.get("enable_moe_block"))
    width = 2 * read_size(fields, "intermediate_size") if fields["use_double_wide_mlp"] else None
    return [
        {
            "score_scale": 1.0,
            "head_sizes": own_sizes.get(i),
            "kv_layer": kv_layers[i],
            "has_normed_values": kv_layers[i] is None,
            "has_keys_as_values": bool(fields["attention_k_eq_v"]) and layer_type == FULL and kv_layers[i] is None,
            "mlp_width": None if kv_layers[i] is None else width,
            "has_parallel_dense_mlp": has_mixture,
            "layer_input": i if has_inputs else None,
            "sees_later_media": layer_type == SLIDING or fields.get("vocab_size_per_layer_input") == 0,
        }
        for i, layer_type in enumerate(layer_types)
    ]


def _own_sizes(fields: dict[str, Any]) -> dict[int, HeadSizes]:
    """Return the heads of layers that differ from the model's, by number. Raises Unfusable."""
    common = {
        "head_dim": read_size(fields, "head_dim"),
        "num_key_value_heads": read_size(fields, "num_key_value_heads"),
    }
    # Newer files list the layers; the first ones have one size for all layers without a window.
    members_by_layer = fields["per_layer_config"]
    if members_by_layer is None:
        types = fields["layer_types"] or full_in_turn(fields, read_size(fields, "num_hidden_layers"))
        own = {"head_dim": fields["global_head_dim"]}
        if fields["attention_k_eq_v"] and fields["num_global_key_value_heads"] is not None:
            own["num_key_value_heads"] = fields["num_global_key_value_heads"]
        members_by_layer = {i: own for i, layer_type in enumerate(types) if layer_type == FULL}
    sizes = {}
    for layer, members in members_by_layer.items():
        if not set(members) <= set(common):
            raise Unfusable(f"its per_layer_config gives {', '.join(sorted(set(members) - set(common)))[:100]}")
        both = {**common, **members}
        sizes[int(layer)] = HeadSizes(read_size(both, "num_key_value_heads"), read_size(both, "head_dim"))
    heads = read_size(fields, "num_attention_heads")
    if any(heads % size.kv_heads or size.dim % 2 for size in sizes.values()):
        raise Unfusable(f"its {heads} heads do not divide over the key/value heads of all layers")
    return sizes


GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4_TENSORS = replace(
    GEMMA_TENSORS,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    experts_norm="pre_feedforward_layernorm_2",
    dense_after_norm="post_feedforward_layernorm_1",
    experts_after_norm="post_feedforward_layernorm_2",
    layer_inputs="model.embed_tokens_per_layer",
    input_after_norm="post_per_layer_input_norm",
    output_scale="layer_scalar",
)
GEMMA4_UNIFIED = replace(
    GEMMA,
    fields=COMMON_FIELDS
    | {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
    },
    renamed={"hidden_activation": "hidden_act"},
    required={"sliding_window_pattern": 6},
    tensors=replace(
        GEMMA4_TENSORS,
        experts_norm=None,
        dense_after_norm=None,
        experts_after_norm=None,
        layer_inputs=None,
        input_after_norm=None,
    ),
    layer_types=full_in_turn,
    ropes=gemma4_ropes,
    layer_variations=gemma4_layers,
    norms=RMS_NORMS,
    variant=None,
)
GEMMA4_TEXT = replace(
    GEMMA4_UNIFIED,
    fields={
        **GEMMA4_UNIFIED.fields,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "pad_token_id": 0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "enable_moe_block": False,
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
    },
    renamed={"hidden_activation": "hidden_act", "top_k_experts": "num_experts_per_tok"},
    mixture=GEMMA4_MIXTURE,
    variant=gemma4_variant,
)
