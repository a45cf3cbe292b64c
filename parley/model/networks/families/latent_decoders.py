"""The decoders with multi-head latent attention (MLA, arXiv 2405.04434): one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, DecoderFamily
from parley.model.networks.families.rms_norm_decoders import ministral3_scaling
from parley.model.networks.indexers import IndexerFamily, listed_indexers
from parley.model.networks.mixtures import (
    AXK1_MIXTURE,
    DEEPSEEK_V2_MIXTURE,
    GLM4_LITE_MIXTURE,
    GLM4_MIXTURE,
    MISTRAL4_MIXTURE,
)

LATENT_TENSORS = TensorNames(
    qkv=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    query_latent_norm="self_attn.q_a_layernorm",
    latent_norm="self_attn.kv_a_layernorm",
    query_up="self_attn.q_b_proj",
    latent_up="self_attn.kv_b_proj",
)
LATENT_FIELDS: dict[str, Any] = COMMON_FIELDS | {
    "num_key_value_heads": None,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def deepseek_v2_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of DeepSeek-V2: only some of its routers choose groups of experts first."""
    if config.get("topk_method") == "group_limited_greedy":
        return replace(DEEPSEEK_V2, fields={**DEEPSEEK_V2.fields, "n_group": None, "topk_group": None})
    return replace(DEEPSEEK_V2, required={**DEEPSEEK_V2.required, "topk_method": "greedy"})


DEEPSEEK_V2 = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 102400,
        "mlp_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
    renamed={"n_routed_experts": "num_experts"},
    required={"attention_bias": False, "mlp_bias": False},
    tensors=LATENT_TENSORS,
    is_rope_interleaved=True,
    mixture=DEEPSEEK_V2_MIXTURE,
    variant=deepseek_v2_variant,
)
DEEPSEEK_V3 = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    renamed={
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    required={"attention_bias": False},
    tensors=LATENT_TENSORS,
    is_rope_interleaved="rope_interleave",
    mixture=GLM4_MIXTURE,
    extra_layers="num_nextn_predict_layers",
)
INDEXER_FIELDS: dict[str, Any] = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    fields={
        **{name: default for name, default in DEEPSEEK_V3.fields.items() if name != "rope_interleave"},
        **INDEXER_FIELDS,
        "max_position_embeddings": 163840,
        "mlp_bias": False,
        "mlp_layer_types": None,
        "indexer_rope_interleave": False,
    },
    required={"attention_bias": False, "mlp_bias": False, "indexer_rope_interleave": False},
    is_rope_interleaved=True,
    mixture=AXK1_MIXTURE,
    indexer=IndexerFamily(),
)
# GLM-5
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    fields={
        **DEEPSEEK_V32.fields,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "indexer_types": None,
        "index_topk_pattern": None,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
        "indexer_rope_interleave": True,
    },
    required={**DEEPSEEK_V32.required, "indexer_rope_interleave": True},
    indexer=IndexerFamily(is_interleaved=True, has_indexer=listed_indexers),
)
# GLM-4.7-Flash
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    fields={
        **DEEPSEEK_V3.fields,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "partial_rotary_factor": None,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": None,
    },
    mixture=GLM4_LITE_MIXTURE,
)
AXK1 = replace(
    DEEPSEEK_V3,
    fields={
        **DEEPSEEK_V3.fields,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 32768,
        "num_experts": 192,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "mlp_layer_types": None,
        "num_nextn_predict_layers": 0,
    },
    required={"attention_bias": False, "moe_layer_freq": 1},
    tensors=replace(LATENT_TENSORS, mixture_after_norm="post_mlp_layernorm"),
    mixture=AXK1_MIXTURE,
)
# A.X-K2, whose published files call the layers of gates W_down and W_up, and q_gate_proj q_b_proj
AXK2 = replace(
    DEEPSEEK_V32,
    fields={
        **DEEPSEEK_V32.fields,
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 131072,
        "kv_lora_rank": 128,
        "q_lora_rank": 384,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "num_experts": 128,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "index_n_heads": 16,
        "gated_norm_rank": 16,
    },
    # Its routers could choose experts of other groups in place of experts with scores below 0.
    required={**DEEPSEEK_V32.required, "moe_layer_freq": 1, "n_group": 1},
    tensors=replace(
        LATENT_TENSORS,
        query_up="self_attn.q_gate_proj",
        attention_norm="input_layernorm.norm",
        mixture_norm="post_attention_layernorm.norm",
        attention_norm_gate=("input_layernorm.mlp.fc1", "input_layernorm.mlp.fc2"),
        mixture_norm_gate=("post_attention_layernorm.mlp.fc1", "post_attention_layernorm.mlp.fc2"),
        published={
            "self_attn.q_b_proj": "self_attn.q_gate_proj",
            "input_layernorm.W_down": "input_layernorm.mlp.fc1",
            "input_layernorm.W_up": "input_layernorm.mlp.fc2",
            "post_attention_layernorm.W_down": "post_attention_layernorm.mlp.fc1",
            "post_attention_layernorm.W_up": "post_attention_layernorm.mlp.fc2",
        },
    ),
    has_latent_gates=True,
)
MISTRAL4 = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 131072,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "rope_interleave": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    },
    renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"},
    required={"attention_bias": False},
    tensors=LATENT_TENSORS,
    is_rope_interleaved="rope_interleave",
    query_scaling=ministral3_scaling,
    mixture=MISTRAL4_MIXTURE,
)
YOUTU = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_interleave": True,
    },
    required={"attention_bias": False},
    tensors=LATENT_TENSORS,
    is_rope_interleaved="rope_interleave",
)

# PLM (arXiv 2503.12167), which is published with code of its own
PLM = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "relu2",
        "q_lora_rank": None,
    },
    required={"attention_bias": False, "q_lora_rank": None},
    tensors=replace(LATENT_TENSORS, gate_up=("mlp.up_proj",)),
    is_gated=False,
    is_rope_interleaved=True,
)


def minicpm3_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of MiniCPM3, whose scales depend on its sizes."""
    values = {**MINICPM3.fields, **config}
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    fields = dict(MINICPM3.fields)
    if all(type(size) is int and size > 0 for size in (layers, hidden)):
        depth, base = values["scale_depth"], values["dim_model_base"]
        fields["residual_multiplier"] = 1.0 if depth is None else depth / layers**0.5
        fields["logits_scaling"] = 1.0 if base is None else hidden / base
    return replace(MINICPM3, fields=fields)


MINICPM3 = DecoderFamily(
    LATENT_FIELDS
    | {
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    renamed={"scale_emb": "embedding_multiplier"},
    required={"attention_bias": False, "mlp_bias": False},
    tensors=LATENT_TENSORS,
    variant=minicpm3_variant,
)
