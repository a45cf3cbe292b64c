"""The decoders with RMS norms, Gemma aside: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import QueryScaling
from parley.model.networks.decoder_tensors import NORMED_HEADS, TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    FULL,
    MLP_BIASES,
    SLIDING,
    DecoderFamily,
    all_sliding,
    full_in_turn,
    listed_rotated,
    rotated_beside_windows,
    sliding_after_full,
)
from parley.model.networks.rope import Unfusable, rename_longrope, resolve_alpha, rope_parameters

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


def ministral3_scaling(fields: dict[str, Any]) -> QueryScaling | None:
    """Return how Ministral 3 scales queries: by fields of its rotary embedding. Raises Unfusable."""
    parameters = rope_parameters(fields)
    if not parameters.get("llama_4_scaling_beta") or not parameters.get("original_max_position_embeddings"):
        return None
    length = read_size(parameters, "original_max_position_embeddings")
    return QueryScaling(length, read_number(parameters, "llama_4_scaling_beta"))


MINISTRAL3 = replace(
    MISTRAL,
    fields={
        **MISTRAL.fields,
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    query_scaling=ministral3_scaling,
)
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
        "partial_rotary_factor": None,
    },
    tensors=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    layer_types=all_sliding,
    resolve_rope=rename_longrope,
)
BITNET = DecoderFamily(
    COMMON_FIELDS
    | {
        "hidden_act": "relu2",
        "vocab_size": 128256,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 30,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_bias": False,
    },
    biases=ATTENTION_BIASES,
    tensors=TensorNames(attended_norm="self_attn.attn_sub_norm", active_norm="mlp.ffn_sub_norm"),
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
    scales_media=True,
)


def clova_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of HyperCLOVA X: with norms after attention and MLP, or without."""
    if config.get("use_post_norm", True):
        return HYPERCLOVAX
    return replace(HYPERCLOVAX, tensors=TensorNames())


HYPERCLOVAX = DecoderFamily(
    {**LLAMA.fields}
    | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": None, "logit_scale": 1.0},
    renamed={"logits_scaling": "logit_scale"},
    scales_media=True,
    biases=LLAMA.biases,
    tensors=TensorNames(attention_after_norm="post_norm1", mlp_after_norm="post_norm2"),
    variant=clova_variant,
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
EXAONE4 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    tensors=OLMO2.tensors,
    layer_types=full_in_turn,
    rotated=rotated_beside_windows,
)


def full_first(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first of each four sees the whole context."""
    return [SLIDING if i % 4 else FULL for i in range(count)]


CWM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "mlp_bias": False,
        "sliding_window": 8192,
        "layer_types": None,
    },
    biases=MLP_BIASES,
    layer_types=full_first,
)


def rotated_by_base(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: those whose base in ``layer_rope_theta`` is not 0."""
    bases = fields["layer_rope_theta"]
    return [True] * len(layer_types) if bases is None else [bool(base) for base in bases]


def common_base(fields: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, with the base that ``layer_rope_theta`` gives. Raises Unfusable
    if it gives several."""
    bases = [base for base in fields["layer_rope_theta"] or () if base]
    if len(set(bases)) > 1:
        raise Unfusable("the bases of its rotary embedding differ between layers")
    return {**parameters, "rope_theta": bases[0]} if bases else parameters


GRANITE_SWA = replace(
    GRANITE,
    fields={
        **GRANITE.fields,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_types": None,
        "layer_rope_theta": None,
    },
    tensors=TensorNames(sinks="self_attn.sinks"),
    layer_types=full_first,
    rotated=rotated_by_base,
    resolve_rope=common_base,
)
HELIUM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    biases={"qkv": "attention_bias", **MLP_BIASES},
    is_rope_interleaved=True,
)
INTERNLM3 = replace(
    LLAMA,
    fields={
        **LLAMA.fields,
        "vocab_size": 128512,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUEST_CODER = replace(
    LLAMA,
    fields={
        **LLAMA.fields,
        "vocab_size": 76800,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "use_sliding_window": False,
    },
    required={"clip_qkv": None, "use_sliding_window": False},
)
HUNYUAN = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 290943,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    biases=ATTENTION_BIASES,
    tensors=TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    is_qk_norm_late=True,
    resolve_rope=resolve_alpha,
)
# Swiss AI's
APERTUS = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "attention_bias": False,
    },
    required={"hidden_act": "xielu"},
    biases=ATTENTION_BIASES,
    tensors=replace(
        NORMED_HEADS,
        gate_up=("mlp.up_proj",),
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        activation_factors="mlp.act_fn",
    ),
    activation="xielu",
    is_gated=False,
)
# Its norms have no weights.
NANOCHAT = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
        "attention_bias": False,
    },
    biases=ATTENTION_BIASES,
    tensors=TensorNames(
        embedding_norm="",
        norm="",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        attention_norm="",
        mlp_norm="",
        query_norm="",
        key_norm="",
    ),
    is_qk_norm_late=True,
    is_rope_reversed=True,
    is_gated=False,
)
