"""Further mixtures of experts in GGUF files: AFMoE (Trinity), DeepSeekMoE, EXAONE MoE, Ling, Ling 2, MiMo-V2 and
PhiMoE."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    SIGMOID,
    Architecture,
    complete_windows,
    fields_of,
    read_size,
)
from parley.gguf.header import GgufError, GgufModel

PHIMOE_SCALE = 1.243163121016122  # of the rotary embedding of Phi-3.5-MoE; files have that of Phi-3's formula


def complete_phimoe(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the bias of the head, and the scale of a rotary embedding for long contexts."""
    config["lm_head_bias"] = "output.bias" in model.tensors
    if config["rope_scaling"]["rope_type"] == "longrope":
        config["rope_scaling"] |= {"short_mscale": PHIMOE_SCALE, "long_mscale": PHIMOE_SCALE}


def complete_ling(model: GgufModel, config: dict[str, Any]) -> None:
    """Give the sizes the names of Granite's mixtures with shared experts, which compute the same if their factors are
    1. Raises GgufError for other layers than those of the published models."""
    file, heads, hidden = model.paths[0].name, config["num_attention_heads"], config["hidden_size"]
    width, shared = read_size(model, "expert_feed_forward_length"), config.get("n_shared_experts", 0)
    usual = {"first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    keys = ("leading_dense_block_count", "expert_weights_norm", "expert_weights_scale")
    for key, (name, value) in zip(keys, usual.items(), strict=True):
        if config.get(name, value) != value:
            raise GgufError(f"{file} gives {key} as {reprlib.repr(config[name])}; only {value} is read here")
    head_dim = config.get("head_dim") or hidden // heads
    if head_dim * heads != hidden:
        raise GgufError(f"{file} gives attention.key_length as {head_dim}; {heads} heads must be {hidden} wide")
    config |= {
        "intermediate_size": width,
        "shared_intermediate_size": shared * width,
        "attention_multiplier": head_dim**-0.5,
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    }


def complete_mimo_2(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the rotary embeddings of layers with and without a window, and the options of each layer.

    Raises GgufError if those with a window do not have twice as many heads of keys.
    """
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    heads, types = fields.get("attention.head_count_kv"), config.get("layer_types", [])[:count]
    full = config.get("num_key_value_heads")
    expected = [2 * full if kind == "sliding_attention" else full for kind in types] if type(full) is int else []
    if not isinstance(heads, list) or len(expected) != count or heads[:count] != expected:
        raise GgufError(
            f"{file} gives attention.head_count_kv as {reprlib.repr(heads)}; each of {count} layers has a number, "
            "which is twice as large with a window"
        )
    share = {"partial_rotary_factor": config.pop("partial_rotary_factor", 1.0)}
    del config["rope_scaling"]
    config["rope_parameters"] = {
        "full_attention": share | {"rope_type": "default", "rope_theta": config.pop("rope_theta", 5e6)},
        "sliding_attention": share | {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq", 1e4)},
    }
    config["layer_types"] = types
    config["mlp_layer_types"] = [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors else "dense" for layer in range(count)
    ]


AFMOE = Architecture(
    "afmoe",
    "AfmoeForCausalLM",
    DEEPSEEK_MIXTURE_NAMES
    | {
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    fields={"mup_enabled": True},  # of all published models; llama.cpp computes nothing else
    gating=SIGMOID,
)
DEEPSEEK = Architecture("deepseek", "DeepseekForCausalLM", DEEPSEEK_MIXTURE_NAMES, interleaved=True)
# The language model of DeepSeek-OCR, whose queries and keys llama.cpp's converter leaves as they are
DEEPSEEK_OCR = replace(DEEPSEEK, interleaved=False)
EXAONE_MOE = Architecture(
    "exaone_moe", "ExaoneMoeForCausalLM", DEEPSEEK_MIXTURE_NAMES, gating=SIGMOID, complete=complete_windows
)
# Ling 2 and Ring 2 compute what GLM-4.5 computes
LING_2 = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    bias_layer="attn_qkv",
    gating=SIGMOID,
    has_packed_heads=True,
)
LING = Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", interleaved=True, complete=complete_ling)
MIMO_2 = Architecture(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    {
        "attn_sinks.weight": "self_attn.attention_sink_bias",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    keys={
        "attention.sliding_window": "sliding_window_size",  # without the token itself
        "attention.value_length": "v_head_dim",
        "attention.value_scale": "attention_value_scale",
    },
    bias_layer="attn_q",
    lists=("attention.head_count_kv",),
    gating=SIGMOID,
    complete=complete_mimo_2,
    has_packed_heads=True,
)
PHIMOE = Architecture("phimoe", "PhimoeForCausalLM", complete=complete_phimoe)
MIXTURE_ARCHITECTURES = {
    "afmoe": replace(AFMOE, mixture=AFMOE),
    "bailingmoe": replace(LING, mixture=LING),
    "bailingmoe2": replace(LING_2, mixture=LING_2),
    "deepseek": replace(DEEPSEEK, mixture=DEEPSEEK),
    "deepseek2-ocr": replace(DEEPSEEK_OCR, mixture=DEEPSEEK_OCR),
    "exaone-moe": replace(EXAONE_MOE, mixture=EXAONE_MOE),
    "mimo2": replace(MIMO_2, mixture=MIMO_2),
    "phimoe": replace(PHIMOE, mixture=PHIMOE),
}
