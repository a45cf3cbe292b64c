"""The decoders without a rotary embedding, which add embeddings of positions or have ALiBi: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number
from parley.model.networks.decoder_config import BIASED_LAYER_NORMS, LAYER_NORMS, PLAIN_LINEARS, LinearLayout
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import (
    COMMON_FIELDS,
    FULL,
    SLIDING,
    DecoderFamily,
    alibi_slopes,
    none_rotated,
)
from parley.model.networks.families.layer_norm_decoders import FALCON
from parley.model.networks.rope import wrong_value

ALL_BIASES: dict[str, str | bool] = dict.fromkeys(("qkv", "output", "gate_up", "down"), True)
UNKNOWN_SIZES = dict.fromkeys(("num_key_value_heads", "intermediate_size", "head_dim"), "")
GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
GPT2 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "hidden_size": 768,
        "intermediate_size": None,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    renamed=UNKNOWN_SIZES | GPT2_NAMES | {"hidden_act": ""},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    biases=ALL_BIASES,
    tensors=TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        layer="transformer.h.",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        attention_norm="ln_1",
        mlp_norm="ln_2",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    rotated=none_rotated,
    linear_layout=LinearLayout(is_transposed=True),
)


def big_code_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of GPT-BigCode: all heads share keys and values, or each has its own."""
    if config.get("multi_query", True):
        return GPT_BIGCODE
    fields = {**GPT_BIGCODE.fields, "num_key_value_heads": "heads"}
    return replace(GPT_BIGCODE, fields=fields, linear_layout=LinearLayout(has_grouped_qkv=True))


def listed_windows(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of layers by ``attention_types`` of GPT-Neo: [names of layers, how often] in a row.

    Raises Unfusable.
    """
    try:
        names = [name for group, times in fields["attention_types"] for name in group * times]
        return [{"global": FULL, "local": SLIDING}[name] for name in names]
    except (TypeError, ValueError, KeyError):
        raise wrong_value("attention_types", fields["attention_types"]) from None


GPT_NEO = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50257,
        "hidden_size": 2048,
        "intermediate_size": None,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_types": [[["global", "local"], 12]],
        "sliding_window": 256,
    },
    renamed={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "window_size": "sliding_window",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        **dict.fromkeys(("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "sliding_window"), ""),
    },
    biases=dict.fromkeys(("output", "gate_up", "down"), True),
    tensors=replace(
        GPT2.tensors,
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        output="attn.attention.out_proj",
    ),
    layer_types=listed_windows,
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    rotated=none_rotated,
    layer_factors=lambda fields: {"score_scale": (fields["hidden_size"] / fields["num_attention_heads"]) ** 0.5},
)
GPT_BIGCODE = replace(
    GPT2,
    fields={
        **GPT2.fields,
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 1,
    },
    linear_layout=PLAIN_LINEARS,
    variant=big_code_variant,
)
OPT = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50272,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "enable_bias": True,
    },
    renamed={
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_act", "head_dim", "rms_norm_eps"), ""),
    },
    required={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    biases=dict.fromkeys(("qkv", "output", "gate_up", "down"), "enable_bias"),
    tensors=TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    rotated=none_rotated,
    position_offset=2,
)
BLOOM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 250880,
        "hidden_size": 64,
        "intermediate_size": None,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
    },
    renamed={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
        **UNKNOWN_SIZES,
    },
    required={"apply_residual_connection_post_layernorm": False},
    biases=ALL_BIASES,
    tensors=replace(
        FALCON.tensors,
        embedding_norm="transformer.word_embeddings_layernorm",
        mlp_norm="post_attention_layernorm",
    ),
    activation="gelu_tanh",
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    linear_layout=LinearLayout(has_grouped_qkv=True),
    rotated=none_rotated,
    slopes=lambda fields: alibi_slopes(fields["num_attention_heads"]),
)


def _mpt_attention(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the part of MPT's config about attention. Raises Unfusable."""
    attention = fields["attn_config"] or {}
    if not isinstance(attention, dict):
        raise wrong_value("attn_config", attention)
    return attention


def mpt_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the limit of MPT's queries, keys and values, if there is one. Raises Unfusable."""
    attention = _mpt_attention(fields)
    return {"qkv_limit": read_number(attention, "clip_qkv")} if attention.get("clip_qkv") else {}


def mpt_slopes(fields: dict[str, Any]) -> tuple[float, ...]:
    """Return the slopes of MPT's heads. Raises Unfusable if its attention has more variations."""
    attention = _mpt_attention(fields)
    unknown = {"attn_type": "multihead_attention", "softmax_scale": None, "qk_ln": False}
    for name, value in unknown.items():
        if attention.get(name, value) != value:
            raise wrong_value(f"attn_config.{name}", attention[name])
    return alibi_slopes(fields["num_attention_heads"], read_number({"alibi_bias_max": 8} | attention, "alibi_bias_max"))


MPT = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 50368,
        "hidden_size": 2048,
        "intermediate_size": None,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attn_config": None,
    },
    renamed={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
        **UNKNOWN_SIZES,
    },
    tensors=TensorNames(
        embedding="transformer.wte",
        norm="transformer.norm_f",
        layer="transformer.blocks.",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        gate_up=("ffn.up_proj",),
        down="ffn.down_proj",
        attention_norm="norm_1",
        mlp_norm="norm_2",
    ),
    norms=LAYER_NORMS,
    layer_factors=mpt_factors,
    is_gated=False,
    rotated=none_rotated,
    slopes=mpt_slopes,
)
XGLM = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 256008,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_embedding": True,
        "add_cross_attention": False,
        "pad_token_id": 1,
    },
    renamed={
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_act", "head_dim", "rms_norm_eps"), ""),
    },
    required={"add_cross_attention": False},
    biases=ALL_BIASES,
    tensors=replace(
        OPT.tensors,
        embedding="model.embed_tokens",
        positions=None,
        norm="model.layer_norm",
        layer="model.layers.",
    ),
    norms=BIASED_LAYER_NORMS,
    is_gated=False,
    has_embedding_scale="scale_embedding",
    rotated=none_rotated,
    position_offset=2,
    has_sinusoidal_positions=True,
)
