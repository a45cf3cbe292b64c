"""The model types that run on the fused decoder: one row each says how it differs from Llama.

``config.py`` reads a config by its row. Fields are named as in Llama's config; a row knows the fields that Transformers
reads for its type, with Transformers' defaults, and all others are ignored, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parley.model.networks.mixtures import (
    GLM4_MIXTURE,
    MIXTRAL_MIXTURE,
    QWEN2_MIXTURE,
    QWEN3_MIXTURE,
    MixtureFamily,
)

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class TensorNames:
    """The names of a model's tensors in its checkpoint; those of a layer follow ``layer`` and its number.

    ``qkv`` and ``gate_up`` list the linear layers to be merged. A norm that is None does not exist.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    attention_after_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_after_norm: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None


LLAMA_TENSORS = TensorNames()


def all_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: all see the whole context."""
    return [FULL] * count


def all_sliding(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: all have the window, if there is one."""
    return [SLIDING] * count


def sliding_after_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first ``max_window_layers`` see the whole context."""
    first = fields["max_window_layers"]
    return [SLIDING if fields["sliding_window"] and i >= first else FULL for i in range(count)]


def full_in_turn(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last of each ``sliding_window_pattern`` sees the whole context."""
    return [SLIDING if (i + 1) % fields["sliding_window_pattern"] else FULL for i in range(count)]


def every_second_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the second, fourth and so on see the whole context."""
    return [FULL if i % 2 else SLIDING for i in range(count)]


def all_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: all do."""
    return [True] * len(layer_types)


def listed_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding, by ``no_rope_layers`` (SmolLM3: 1 for those that have)."""
    listed = fields["no_rope_layers"]
    interval = fields["no_rope_layer_interval"]
    return [bool(each) for each in listed or ((i + 1) % interval for i in range(len(layer_types)))]


def sliding_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: those with a window do (Cohere 2)."""
    return [layer_type == SLIDING for layer_type in layer_types]


@dataclass(frozen=True)
class DecoderFamily:
    """How the decoders of one model type differ from Llama.

    ``fields``: those that the type knows, with their defaults. ``renamed``: its own names of fields, to Llama's.
    ``required``: fields that must have this value, or the model has no fused decoder. ``biases``: for each group of
    linear layers (qkv, output, gate_up, down, head) with a bias, the field that says so, or True.
    ``layer_types``: of layers if the config does not list them. ``mrope``: whether the axes of M-RoPE are interleaved,
    and its section if the config has none.

    ``norm_offset`` is added to the weights of all norms. ``are_norms_centered``: they are LayerNorms, not RMS norms.
    ``has_embedding_scale``: embeddings are multiplied by the square root of their size. ``local_theta``: the field with
    the base of the rotary embedding of sliding layers, if that differs. ``is_rope_interleaved``: as in ``RopeConfig``.
    ``rotated``: which layers have a rotary embedding. The others are fields of ``LayerShape``.
    ``mixture``: how the layers with a mixture of experts choose them. ``extra_layers``: the field with the number of
    layers after the last that predict further tokens, and are not used.
    """

    fields: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str | bool] = field(default_factory=dict)
    tensors: TensorNames = LLAMA_TENSORS
    layer_types: Callable[[dict[str, Any], int], list[str]] = all_full
    mrope: tuple[bool, tuple[int, ...]] | None = None
    norm_offset: float = 0.0
    are_norms_centered: bool = False
    have_norms_bias: bool = False
    has_embedding_scale: bool = False
    local_theta: str | None = None
    is_rope_interleaved: bool = False
    rotated: Callable[[dict[str, Any], list[str]], list[bool]] = all_rotated
    has_whole_qk_norm: bool = False
    is_gated: bool = True
    is_parallel: bool = False
    mixture: MixtureFamily | None = None
    extra_layers: str | None = None


# "heads": same as heads.
COMMON_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "num_key_value_heads": "heads",
    "head_dim": None,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
ATTENTION_BIASES: dict[str, str | bool] = {"qkv": "attention_bias", "output": "attention_bias"}
MLP_BIASES: dict[str, str | bool] = {"gate_up": "mlp_bias", "down": "mlp_bias"}
NORMED_HEADS = TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
GEMMA_TENSORS = TensorNames(
    attention_after_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after_norm="post_feedforward_layernorm",
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
    norm_offset=1.0,
    has_embedding_scale=True,
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
COHERE = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    },
    renamed={"layer_norm_eps": "rms_norm_eps"},
    required={"use_qk_norm": False},
    biases=ATTENTION_BIASES,
    tensors=TensorNames(mlp_norm="input_layernorm"),
    are_norms_centered=True,
    is_rope_interleaved=True,
    is_parallel=True,
)
COHERE2 = replace(
    COHERE,
    fields={
        **COHERE.fields,
        "rope_theta": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    layer_types=full_in_turn,
    rotated=sliding_rotated,
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
STARCODER2 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
    },
    renamed={"norm_epsilon": "rms_norm_eps"},
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down"), "use_bias"),
    tensors=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    layer_types=all_sliding,
    are_norms_centered=True,
    have_norms_bias=True,
    is_gated=False,
)
STABLELM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    renamed={"layer_norm_eps": "rms_norm_eps"},
    required={"qk_layernorm": False, "use_parallel_residual": False},
    biases={"qkv": "use_qkv_bias"},
    are_norms_centered=True,
    have_norms_bias=True,
)
PHI = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    renamed={"layer_norm_eps": "rms_norm_eps"},
    required={"qk_layernorm": False},
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down", "head"), True),
    tensors=TensorNames(
        norm="model.final_layernorm",
        output="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="input_layernorm",
    ),
    are_norms_centered=True,
    have_norms_bias=True,
    is_gated=False,
    is_parallel=True,
)
NEMOTRON = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    renamed={"norm_eps": "rms_norm_eps"},
    biases=ATTENTION_BIASES | MLP_BIASES,
    tensors=TensorNames(gate_up=("mlp.up_proj",)),
    norm_offset=1.0,
    are_norms_centered=True,
    have_norms_bias=True,
    is_gated=False,
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
MINISTRAL = replace(MISTRAL, fields={**MISTRAL.fields, "layer_types": None})
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

FAMILIES: dict[str, DecoderFamily] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_text": QWEN3_VL,
    "glm4_moe": GLM4_MOE,
    "phi3": PHI3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "smollm3": SMOLLM3,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "glm": GLM,
    "glm4": GLM4,
    "ernie4_5": ERNIE,
    "starcoder2": STARCODER2,
    "stablelm": STABLELM,
    "phi": PHI,
    "nemotron": NEMOTRON,
    "arcee": ARCEE,
    "seed_oss": SEED_OSS,
    "ministral": MINISTRAL,
}
FUSABLE_TYPES = frozenset(FAMILIES)
