"""The decoders with LayerNorms: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import BIASED_LAYER_NORMS, LAYER_NORMS, LinearLayout, NormForm
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    FULL,
    MLP_BIASES,
    SLIDING,
    DecoderFamily,
    alibi_slopes,
    all_sliding,
    full_in_turn,
    none_rotated,
    sliding_rotated,
)
from parley.model.networks.mixtures import COHERE2_MIXTURE, exaone_layers
from parley.model.networks.rope import wrong_value

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
    biases=ATTENTION_BIASES,
    tensors=TensorNames(mlp_norm="input_layernorm", query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    norms=NormForm(is_centered=True, has_headwise_qk=True),
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
    required={"use_qk_norm": False},
    layer_types=full_in_turn,
    rotated=sliding_rotated,
)


def cohere2_mixture_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last of each pattern sees the whole context. The dense layers at the
    start have a pattern of their own."""
    dense = min(fields["first_k_dense_replace"], count)
    parts = [("prefix_dense_sliding_window_pattern", dense), ("sliding_window_pattern", count - dense)]
    return [SLIDING if (i + 1) % read_size(fields, name) else FULL for name, number in parts for i in range(number)]


def sliding_or_dense_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: those with a window, and dense ones whose pattern is 1."""
    is_dense_rotated = fields["prefix_dense_sliding_window_pattern"] == 1
    return [
        layer_type == SLIDING or (is_dense_rotated and not exaone_layers(fields, i))
        for i, layer_type in enumerate(layer_types)
    ]


def cohere2_mixture_factors(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the fields of ``LayerShape`` for each layer: the mean of experts and shared experts halves both. Raises
    Unfusable."""
    strategy = fields["shared_expert_combination_strategy"]
    if strategy not in ("average", "sum"):
        raise wrong_value("shared_expert_combination_strategy", strategy)
    is_mean = strategy == "average" and bool(fields["n_shared_experts"])
    return [{"mlp_scale": 0.5} if is_mean and exaone_layers(fields, i) else {} for i in range(len(layer_types))]


def cohere2_mixture_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Cohere's mixtures: with LayerNorms or RMS norms, and its kind of scores."""
    family, mixture = COHERE2_MOE, COHERE2_MIXTURE
    if config.get("rms_norm_eps") is not None:
        norms = replace(family.norms, is_centered=False)
        family = replace(family, renamed={**family.renamed, "layer_norm_eps": ""}, norms=norms)
    scores = config.get("expert_selection_fn", "softmax")
    if scores == "sigmoid":
        mixture = replace(mixture, is_sigmoid=True, normalized=None)
    else:
        family = replace(family, required={**family.required, "expert_selection_fn": "softmax"})
    if config.get("prefix_dense_intermediate_size") is None:
        width = config.get("intermediate_size", family.fields["moe_intermediate_size"])
        renamed = {**family.renamed, "prefix_dense_intermediate_size": ""}
        family = replace(family, fields={**family.fields, "intermediate_size": width}, renamed=renamed)
    return replace(family, mixture=mixture)


# Command A+
COHERE2_MOE = replace(
    COHERE2,
    fields={
        **{name: value for name, value in COHERE2.fields.items() if name != "use_qk_norm"},
        "head_dim": 128,
        "intermediate_size": None,
        "moe_intermediate_size": 22528,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1,
        "mlp_layer_types": None,
    },
    renamed={
        **COHERE2.renamed,
        "intermediate_size": "moe_intermediate_size",
        "prefix_dense_intermediate_size": "intermediate_size",
        "num_shared_experts": "n_shared_experts",
    },
    required={},
    tensors=TensorNames(mlp_norm="input_layernorm"),
    layer_types=cohere2_mixture_layers,
    rotated=sliding_or_dense_rotated,
    layer_variations=cohere2_mixture_factors,
    mixture=COHERE2_MIXTURE,
    variant=cohere2_mixture_variant,
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
    norms=BIASED_LAYER_NORMS,
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
    norms=BIASED_LAYER_NORMS,
)


def phi_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Phi or Persimmon, which may have norms of queries and keys."""
    family = PERSIMMON if config["model_type"] == "persimmon" else PHI
    if {**family.fields, **config}["qk_layernorm"]:
        tensors = replace(family.tensors, query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm")
        return replace(family, tensors=tensors)
    return family


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
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down", "head"), True),
    tensors=TensorNames(
        norm="model.final_layernorm",
        output="self_attn.dense",
        gate_up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="input_layernorm",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    is_parallel=True,
    variant=phi_variant,
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
    norms=NormForm(is_centered=True, has_bias=True, offset=1.0),
    is_gated=False,
)
PERSIMMON = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 262144,
        "intermediate_size": 16384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "hidden_act": "relu2",
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    },
    renamed={"layer_norm_eps": "rms_norm_eps", **dict.fromkeys(("num_key_value_heads", "head_dim"), "")},  # not known
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down"), True),
    tensors=TensorNames(
        norm="model.final_layernorm",
        qkv=("self_attn.query_key_value",),
        output="self_attn.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    linear_layout=LinearLayout(has_grouped_qkv=True),
    variant=phi_variant,
)
GPT_NEOX = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    renamed={
        "layer_norm_eps": "rms_norm_eps",
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
        "num_key_value_heads": "",  # not known
    },
    biases=ATTENTION_BIASES | {"gate_up": True, "down": True},
    tensors=TensorNames(
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.",
        qkv=("attention.query_key_value",),
        output="attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    is_parallel="use_parallel_residual",
    linear_layout=LinearLayout(has_grouped_qkv=True),
)


def falcon_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of Falcon: the new architecture has groups of heads, and two norms or one."""
    family = FALCON
    if config.get("alibi"):
        family = replace(family, slopes=falcon_slopes, rotated=none_rotated)
    if config.get("new_decoder_architecture"):
        if config.get("num_ln_in_parallel_attn") in (None, 2):
            return replace(family, tensors=replace(family.tensors, attention_norm="ln_attn", mlp_norm="ln_mlp"))
        return family
    if not config.get("parallel_attn", True):
        family = replace(
            family, is_parallel=False, tensors=replace(family.tensors, mlp_norm="post_attention_layernorm")
        )
    kv_heads = 1 if config.get("multi_query", True) else "heads"
    return replace(
        family,
        fields={**family.fields, "num_key_value_heads": kv_heads},
        renamed={**family.renamed, "num_kv_heads": ""},  # not read there
    )


def falcon_slopes(fields: dict[str, Any]) -> tuple[float, ...]:
    """Return the slopes of Falcon's heads, which are scaled as scores are.

    Transformers rounds them, and their products with positions, to bfloat16.
    """
    heads = fields["num_attention_heads"]
    scale = (fields["hidden_size"] // heads) ** -0.5
    return tuple(scale * slope for slope in alibi_slopes(heads))


FALCON = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "intermediate_size": None,
        "num_attention_heads": 71,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bias": False,
    },
    renamed={
        "layer_norm_epsilon": "rms_norm_eps",
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_act", "head_dim"), ""),  # not known
    },
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down"), "bias"),
    tensors=TensorNames(
        embedding="transformer.word_embeddings",
        norm="transformer.ln_f",
        layer="transformer.h.",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        mlp_norm="input_layernorm",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    is_parallel=True,
    linear_layout=LinearLayout(has_grouped_qkv=True),
    variant=falcon_variant,
)


def olmo_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the limit of queries, keys and values, if there is one. Raises Unfusable."""
    return {} if fields["clip_qkv"] is None else {"qkv_limit": read_number(fields, "clip_qkv")}


OLMO = DecoderFamily(
    COMMON_FIELDS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False, "clip_qkv": None},
    renamed={"rms_norm_eps": ""},  # not known
    biases=ATTENTION_BIASES,
    tensors=TensorNames(norm="", attention_norm="", mlp_norm=""),
    norms=LAYER_NORMS,
    layer_factors=olmo_factors,
)
JAIS2 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    renamed={"layer_norm_eps": "rms_norm_eps", "rms_norm_eps": ""},
    biases=ATTENTION_BIASES | MLP_BIASES,
    tensors=TensorNames(gate_up=("mlp.up_proj",)),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
)
GPT_J = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50400,
        "intermediate_size": None,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "rotary_dim": 64,
    },
    renamed={
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        **dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim", "hidden_act", "rms_norm_eps"), ""),
        **dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling"), ""),  # not known
    },
    biases=dict.fromkeys(("gate_up", "down", "head"), True),
    tensors=TensorNames(
        embedding="transformer.wte",
        norm="transformer.ln_f",
        layer="transformer.h.",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        gate_up=("mlp.fc_in",),
        down="mlp.fc_out",
        attention_norm="ln_1",
        mlp_norm="ln_1",
    ),
    norms=BIASED_LAYER_NORMS,
    is_rope_interleaved=True,
    is_gated=False,
    is_parallel=True,
)
CODEGEN = replace(
    GPT_J, tensors=replace(GPT_J.tensors, qkv=("attn.qkv_proj",)), linear_layout=LinearLayout(qkv_shards=4)
)
