"""The decoders with mixtures of experts: one row each. ``mixtures.py`` says how their routers choose."""

from __future__ import annotations

from dataclasses import replace

from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    NORMED_HEADS,
    DecoderFamily,
    TensorNames,
    all_sliding,
    every_second_full,
)
from parley.model.networks.families.rms_norm_decoders import MISTRAL
from parley.model.networks.mixtures import GLM4_MIXTURE, GPT_OSS_MIXTURE, MIXTRAL_MIXTURE, QWEN2_MIXTURE, QWEN3_MIXTURE
from parley.native.layer_shape import SWIGLU_ALPHA, SWIGLU_LIMIT

MIXTRAL = replace(
    MISTRAL,
    fields={
        **MISTRAL.fields,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    renamed={"num_local_experts": "num_experts"},
    mixture=MIXTRAL_MIXTURE,
)
QWEN2_MOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    required={"use_sliding_window": False},
    biases={"qkv": "qkv_bias"},
    mixture=QWEN2_MIXTURE,
)
QWEN3_MOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    renamed={"num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    layer_types=all_sliding,
    mixture=QWEN3_MIXTURE,
)
GLM4_MOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    renamed={"n_routed_experts": "num_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    biases={"qkv": "attention_bias"},
    tensors=NORMED_HEADS,
    mixture=GLM4_MIXTURE,
    extra_layers="num_nextn_predict_layers",
)
GPT_OSS = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "layer_types": None,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": SWIGLU_LIMIT,
        "swiglu_alpha": SWIGLU_ALPHA,
    },
    renamed={"num_local_experts": "num_experts"},
    required={"swiglu_limit": SWIGLU_LIMIT, "swiglu_alpha": SWIGLU_ALPHA},
    biases=ATTENTION_BIASES,
    tensors=TensorNames(sinks="self_attn.sinks"),
    layer_types=every_second_full,
    activation="clamped_swiglu",
    mixture=GPT_OSS_MIXTURE,
)
