"""More decoders with mixtures of experts, whose layers differ from those in ``mixture_decoders.py``: one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import BIASED_LAYER_NORMS, NormForm, QueryScaling
from parley.model.networks.decoder_tensors import NORMED_HEADS, TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    CHUNKED,
    COMMON_FIELDS,
    FULL,
    SLIDING,
    DecoderFamily,
    all_sliding,
    full_in_turn,
    listed_rotated,
    rotated_beside_windows,
    sliding_rotated,
)
from parley.model.networks.families.mixture_decoders import GLM4_MOE, GRANITE_MOE_SHARED
from parley.model.networks.families.rms_norm_decoders import EXAONE4, GRANITE_SWA, HUNYUAN, OLMO2
from parley.model.networks.mixtures import (
    AFMOE_MIXTURE,
    EXAONE_MIXTURE,
    FLINT_MIXTURE,
    GLM4_MIXTURE,
    HUNYUAN_MIXTURE,
    HY3_MIXTURE,
    LLAMA4_MIXTURE,
    MELLUM_MIXTURE,
    OLMOE_MIXTURE,
    PHIMOE_MIXTURE,
)
from parley.model.networks.rope import resolve_mscale


def chunked_where_rotated(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: those with a rotary embedding attend within their chunk only (Llama 4)."""
    return [CHUNKED if rotated else FULL for rotated in listed_rotated(fields, [FULL] * count)]


def llama4_scaling(fields: dict[str, Any]) -> QueryScaling | None:
    """Return how Llama 4 scales the queries of layers without a rotary embedding. Raises Unfusable."""
    if not fields["attn_temperature_tuning"]:
        return None
    return QueryScaling(
        read_size(fields, "floor_scale"), read_number(fields, "attn_scale"), shift=1, skips_rotated=True
    )


LLAMA4 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "moe_intermediate_size": 8192,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_bias": False,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": None,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    renamed={
        "intermediate_size": "moe_intermediate_size",
        "intermediate_size_mlp": "intermediate_size",
        "num_local_experts": "num_experts",
        "n_shared_experts": "",  # not known
    },
    biases=ATTENTION_BIASES,
    tensors=TensorNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        query_norm="",
        key_norm="",
    ),
    layer_types=chunked_where_rotated,
    is_rope_interleaved=True,
    rotated=listed_rotated,
    norms=NormForm(only_rotated_heads=True),
    query_scaling=llama4_scaling,
    mixture=LLAMA4_MIXTURE,
)
PHIMOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 32064,
        "intermediate_size": 6400,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "attention_bias": False,
        "lm_head_bias": False,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    renamed={"num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES | {"head": "lm_head_bias"},
    layer_types=all_sliding,
    resolve_rope=resolve_mscale,
    norms=BIASED_LAYER_NORMS,
    mixture=PHIMOE_MIXTURE,
)
FLEX_OLMO = replace(
    OLMO2,
    fields={
        **OLMO2.fields,
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
    },
    renamed={"num_local_experts": "num_experts"},
    mixture=OLMOE_MIXTURE,
)
EXAONE_MOE = replace(
    EXAONE4,
    fields={
        **EXAONE4.fields,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    renamed={"num_shared_experts": "n_shared_experts"},
    tensors=NORMED_HEADS,
    rotated=rotated_beside_windows,
    mixture=EXAONE_MIXTURE,
)
SOLAR_OPEN = replace(
    GLM4_MOE,
    fields={
        **GLM4_MOE.fields,
        "vocab_size": 196608,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "head_dim": 128,
        "rope_theta": 1e6,
        "moe_intermediate_size": 1280,
        "partial_rotary_factor": None,
        "first_k_dense_replace": 0,
    },
    renamed={
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        **dict.fromkeys(("use_qk_norm", "first_k_dense_replace", "num_nextn_predict_layers"), ""),  # not known
    },
    mixture=GLM4_MIXTURE,
)
HUNYUAN_MOE = replace(
    HUNYUAN,
    fields={**HUNYUAN.fields, "num_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1},
    renamed={"moe_topk": "num_experts_per_tok", "num_local_experts": "num_experts", "n_shared_experts": ""},
    mixture=HUNYUAN_MIXTURE,
)
HY3 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "attention_bias": False,
        "mlp_bias": False,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.826,
        "mlp_layer_types": None,
        "num_nextn_predict_layers": 0,
    },
    renamed={
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    required={"mlp_bias": False},
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    mixture=HY3_MIXTURE,
    extra_layers="num_nextn_predict_layers",
)
AFMOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "layer_types": None,
        "attention_bias": False,
        "mup_enabled": False,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    },
    renamed={
        "global_attn_every_n_layers": "sliding_window_pattern",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "route_scale": "routed_scaling_factor",
        "num_local_experts": "num_experts",
    },
    required={"attention_bias": False},
    tensors=replace(
        NORMED_HEADS,
        qkv=("self_attn.q_proj", "self_attn.gate_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_after_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_after_norm="post_mlp_layernorm",
    ),
    layer_types=full_in_turn,
    rotated=sliding_rotated,
    has_embedding_scale="mup_enabled",
    scales_media=True,
    has_output_gate=True,
    mixture=AFMOE_MIXTURE,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    fields={
        **GRANITE_MOE_SHARED.fields,
        "sliding_window": 128,
        "layer_types": None,
        "layer_rope_theta": None,
    },
    tensors=GRANITE_SWA.tensors,
    layer_types=GRANITE_SWA.layer_types,
    rotated=GRANITE_SWA.rotated,
    resolve_rope=GRANITE_SWA.resolve_rope,
)
# Mellum 2
MELLUM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 1024,
        "layer_types": None,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
    },
    renamed={
        "num_local_experts": "num_experts",
        **dict.fromkeys(("rope_theta", "rope_local_base_freq"), ""),
    },  # the bases are in rope_parameters
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    local_theta="rope_local_base_freq",
    mixture=MELLUM_MIXTURE,
)


def flint_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first two, each fourth from the second on and the last see all."""
    return [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]


FLINT = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 150144,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "layer_types": None,
        "attention_bias": False,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    renamed={"num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES,
    tensors=replace(NORMED_HEADS, sinks="self_attn.softmax_offset"),
    layer_types=flint_layers,
    rotated=sliding_rotated,
    mixture=FLINT_MIXTURE,
)
