"""Further mixtures of experts in GGUF files: AFMoE (Trinity), EXAONE MoE, Ling 2 and PhiMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.architecture import DEEPSEEK_MIXTURE_NAMES, SIGMOID, Architecture, complete_windows
from parley.gguf.header import GgufModel

PHIMOE_SCALE = 1.243163121016122  # of the rotary embedding of Phi-3.5-MoE; files have that of Phi-3's formula


def complete_phimoe(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the bias of the head, and the scale of a rotary embedding for long contexts."""
    config["lm_head_bias"] = "output.bias" in model.tensors
    if config["rope_scaling"]["rope_type"] == "longrope":
        config["rope_scaling"] |= {"short_mscale": PHIMOE_SCALE, "long_mscale": PHIMOE_SCALE}


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
PHIMOE = Architecture("phimoe", "PhimoeForCausalLM", complete=complete_phimoe)
MIXTURE_ARCHITECTURES = {
    "afmoe": replace(AFMOE, mixture=AFMOE),
    "bailingmoe2": replace(LING_2, mixture=LING_2),
    "exaone-moe": replace(EXAONE_MOE, mixture=EXAONE_MOE),
    "phimoe": replace(PHIMOE, mixture=PHIMOE),
}
