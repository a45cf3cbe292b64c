"""The decoders with RMS norms, Gemma aside: one row each."""

from __future__ import annotations

from dataclasses import replace

from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    MLP_BIASES,
    NORMED_HEADS,
    DecoderFamily,
    TensorNames,
    all_sliding,
    full_in_turn,
    listed_rotated,
    sliding_after_full,
)

LLAMA = DecoderFamily(
    COMMON_FIELDS | {"attention_bias": False, "mlp_bias": False}, biases=ATTENTION_BIASES | MLP_BIASES
)
MISTRAL = DecoderFamily(
    COMMON_FIELDS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    layer_types=all_sliding,
)
MINISTRAL = replace(MISTRAL, fields={**MISTRAL.fields, "layer_types": None})
QWEN2 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": None,
        "max_position_embeddings": 32768,
    },
    biases={"qkv": True},
    layer_types=sliding_after_full,
)
QWEN3 = replace(
    QWEN2,
    fields={**QWEN2.fields, "head_dim": 128, "attention_bias": False},
    biases=ATTENTION_BIASES,
    tensors=NORMED_HEADS,
)
QWEN2_VL = replace(
    QWEN2,
    fields={
        **QWEN2.fields,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    mrope=(False, (16, 24, 24)),
)
QWEN3_VL = replace(
    QWEN3,
    fields={**QWEN3.fields, "rope_theta": 5e5, "max_position_embeddings": 128000},
    mrope=(True, (24, 20, 20)),
)
PHI3 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    tensors=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    layer_types=all_sliding,
)
GRANITE = replace(
    LLAMA,
    fields={
        **LLAMA.fields,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)
OLMO2 = DecoderFamily(
    COMMON_FIELDS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
    biases=ATTENTION_BIASES,
    tensors=replace(
        NORMED_HEADS,
        attention_norm=None,
        attention_after_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_after_norm="post_feedforward_layernorm",
    ),
    has_whole_qk_norm=True,
)
OLMO3 = replace(
    OLMO2,
    fields={
        **OLMO2.fields,
        "rope_theta": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    layer_types=full_in_turn,
    local_theta="rope_theta",  # sliding layers have the same base, but are not scaled
)
SMOLLM3 = replace(
    LLAMA,
    fields={
        **LLAMA.fields,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    required={"use_sliding_window": False},
    rotated=listed_rotated,
)
GLM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    biases={"qkv": "attention_bias"},
    tensors=TensorNames(gate_up=("mlp.gate_up_proj",)),
    is_rope_interleaved=True,
)
GLM4 = replace(
    GLM,
    tensors=replace(GLM.tensors, attention_after_norm="post_self_attn_layernorm", mlp_after_norm="post_mlp_layernorm"),
)
ERNIE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down"), "use_bias"),
    is_rope_interleaved=True,
)
ARCEE = DecoderFamily(
    COMMON_FIELDS
    | {
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    biases=ATTENTION_BIASES | MLP_BIASES,
    tensors=TensorNames(gate_up=("mlp.up_proj",)),
    is_gated=False,
)
SEED_OSS = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    biases={"qkv": "attention_bias", "output": "attention_out_bias", **MLP_BIASES},
)
