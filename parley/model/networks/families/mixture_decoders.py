"""The decoders with mixtures of experts: one row each. ``mixtures.py`` says how their routers choose."""

from __future__ import annotations

from dataclasses import replace

from parley.model.networks.decoder_tensors import NORMED_HEADS, TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    DecoderFamily,
    all_sliding,
    every_second_full,
    sliding_after_full,
)
from parley.model.networks.families.rms_norm_decoders import ERNIE, GRANITE, MISTRAL, OLMO2
from parley.model.networks.mixtures import (
    DEEPSEEK_V1_MIXTURE,
    ERNIE_MIXTURE,
    GLM4_MIXTURE,
    GPT_OSS_MIXTURE,
    GRANITE_MIXTURE,
    MINIMAX_MIXTURE,
    MIXTRAL_MIXTURE,
    OLMOE_MIXTURE,
    QWEN2_MIXTURE,
    QWEN3_MIXTURE,
    QWEN3_VL_MIXTURE,
)
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
GLM4_V_MOE = replace(
    GLM4_MOE,
    fields={
        **{
            name: value
            for name, value in GLM4_MOE.fields.items()
            if name not in ("use_qk_norm", "num_nextn_predict_layers")
        },
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
        "attention_bias": True,
    },
    renamed={"n_routed_experts": "num_experts"},
    tensors=TensorNames(),
    extra_layers=None,
    mrope=(False, (8, 12, 12)),
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
        "rope_parameters": {
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
OLMOE = replace(
    OLMO2,
    fields={
        **OLMO2.fields,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    renamed={"num_local_experts": "num_experts"},
    required={"clip_qkv": None},
    tensors=NORMED_HEADS,
    mixture=OLMOE_MIXTURE,
)
GRANITE_MOE = replace(
    GRANITE,
    fields={**GRANITE.fields, "num_experts": 8, "num_experts_per_tok": 2},
    renamed={"num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES,
    mixture=GRANITE_MIXTURE,
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    fields={**GRANITE_MOE.fields, "shared_expert_intermediate_size": 0},
    renamed={"num_local_experts": "num_experts", "shared_intermediate_size": "shared_expert_intermediate_size"},
)
MINIMAX_M2 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": None,
        "partial_rotary_factor": None,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    renamed={"num_local_experts": "num_experts"},
    tensors=NORMED_HEADS,
    has_whole_qk_norm=True,
    mixture=MINIMAX_MIXTURE,
)
DOTS1 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1408,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    layer_types=sliding_after_full,
    mixture=GLM4_MIXTURE,
)
# DeepSeekMoE, whose publishers' code Transformers does not have (arXiv 2401.06066)
DEEPSEEK = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 102400,
        "num_hidden_layers": 30,
        "attention_bias": False,
        "num_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "moe_layer_freq": 1,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    renamed={"n_routed_experts": "num_experts"},
    required={"moe_layer_freq": 1, "scoring_func": "softmax"},
    biases=ATTENTION_BIASES,
    mixture=DEEPSEEK_V1_MIXTURE,
)
ERNIE_MOE = replace(
    ERNIE,
    fields={
        **ERNIE.fields,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    renamed={
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    },
    required={"use_bias": False},
    mixture=ERNIE_MIXTURE,
)
QWEN3_VL_MOE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rope_theta": 5e5,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    renamed={"num_local_experts": "num_experts"},
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
    mrope=(True, (24, 20, 20)),
    mixture=QWEN3_VL_MIXTURE,
)
QWEN3_OMNI = replace(
    QWEN3_MOE,
    fields={
        **QWEN3_MOE.fields,
        "vocab_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "rope_theta": 1e6,
        "sliding_window": None,
        "norm_topk_prob": True,
    },
    mrope=QWEN3_VL_MOE.mrope,
)
