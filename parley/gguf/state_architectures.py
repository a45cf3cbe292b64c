"""Architectures of GGUF files whose layers keep a state: Mamba 2, gated delta nets and short convolutions."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    GRANITE_KEYS,
    NORM_AFTER_ATTENTION,
    SIGMOID,
    Architecture,
    fields_of,
    read_size,
)
from parley.gguf.header import GgufError, GgufModel

MAMBA_NAMES = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}


def complete_granite_hybrid(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba 2 layers, and what the layers have.

    Raises GgufError if they are impossible, and for Bamba, which has the same architecture.
    """
    if fields_of(model).get("rope.scaling.finetuned"):
        raise GgufError(f"{model.paths[0].name} rotates queries and keys, which its architecture does not do here")
    inner, heads = read_size(model, "ssm.inner_size"), read_size(model, "ssm.time_step_rank")
    config["mamba_d_head"], remainder = divmod(inner, heads)
    config["mamba_expand"], other_rest = divmod(inner, config["hidden_size"])
    if remainder or other_rest:
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to {heads} heads, which do not divide them")
    config |= {
        "position_embedding_type": "nope",
        "num_local_experts": config.pop("num_experts", 0),
        "shared_intermediate_size": config.pop("shared_expert_intermediate_size", config["intermediate_size"]),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in model.tensors),
    }


GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {name: f"mamba.{target}" for name, target in MAMBA_NAMES.items()},
    interleaved=True,
    keys=GRANITE_KEYS | MAMBA_KEYS,
    complete=complete_granite_hybrid,
    state_type="linear_attention",
)
DELTA_LAYER_NAMES = NORM_AFTER_ATTENTION | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}


def complete_axes(model: GgufModel, config: dict[str, Any]) -> None:
    """Add how many pairs of dimensions each axis of positions turns. Raises GgufError."""
    if sections := fields_of(model).get("rope.dimension_sections"):
        if not isinstance(sections, list):
            raise GgufError(
                f"{model.paths[0].name} gives rope.dimension_sections as {reprlib.repr(sections)}; it is a list"
            )
        config["rope_scaling"]["mrope_section"] = sections[:3]


def complete_delta_nets(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the size of values, the types of layers, and the axes of positions. Raises GgufError."""
    inner, heads = read_size(model, "ssm.inner_size"), read_size(model, "ssm.time_step_rank")
    config["linear_value_head_dim"], remainder = divmod(inner, heads)
    if remainder or heads % read_size(model, "ssm.group_count"):
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to {heads} heads, which do not divide them")
    fields = fields_of(model)
    if isinstance(recurrent := fields.get("attention.recurrent_layers"), list):
        types = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]
        config["layer_types"] = types[: config["num_hidden_layers"]]
    complete_axes(model, config)


QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    DELTA_LAYER_NAMES,
    norm_offset=1.0,
    keys=DELTA_KEYS,
    complete=complete_delta_nets,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    has_axes=True,
    has_tiled_values=True,
)
QWEN3_5_MOE = replace(QWEN3_5, model_type="qwen3_5_moe_text", class_name="Qwen3_5MoeForCausalLM")
LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    fields={"block_auto_adjust_ff_dim": False},
    keys={"shortconv.l_cache": "conv_L_cache"},
    model_names={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    state_type="conv",
)
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    fields={"norm_topk_prob": True},
    gating=SIGMOID,
)


def read_mamba_heads(model: GgufModel) -> tuple[int, int, int]:
    """Return the numbers of all heads of Mamba 2, the count of heads, and the numbers of each. Raises GgufError."""
    inner, heads = read_size(model, "ssm.inner_size"), read_size(model, "ssm.time_step_rank")
    if inner % heads:
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to {heads} heads, which do not divide them")
    return inner, heads, inner // heads


def complete_falcon_h1(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba 2 layers. The converter multiplies weights by the factors of the config."""
    config["mamba_d_ssm"], _, config["mamba_d_head"] = read_mamba_heads(model)
    config |= {
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in model.tensors,
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in model.tensors,
    }


def complete_nemotron_hybrid(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba 2 layers, and the pattern of layers: M, attention *, MLP - or mixture E. Raises GgufError
    if the file does not say it of each layer."""
    file, count, letters = model.paths[0].name, config["num_hidden_layers"], []
    head_counts, widths = (fields_of(model).get(key) for key in ("attention.head_count_kv", "feed_forward_length"))
    if not isinstance(head_counts, list) or not isinstance(widths, list) or min(len(head_counts), len(widths)) < count:
        raise GgufError(f"{file} does not say of each layer what it is, so the model's shape is unknown")
    for layer, heads, width in zip(range(count), head_counts, widths, strict=False):
        is_mixture = f"blk.{layer}.ffn_gate_inp.weight" in model.tensors
        letters.append("E" if is_mixture else "*" if heads else "-" if width else "M")
    _, config["mamba_num_heads"], config["mamba_head_dim"] = read_mamba_heads(model)
    config |= {
        "hybrid_override_pattern": "".join(letters),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model.tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in model.tensors),
        "mlp_bias": any(name.endswith(".ffn_down.bias") for name in model.tensors),
    }


FALCON_H1 = Architecture(
    "falcon_h1",
    "FalconH1ForCausalLM",
    {name: f"mamba.{target}" for name, target in MAMBA_NAMES.items()}
    | {
        "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp's converter leaves the ending out
        "ffn_norm.weight": "pre_ff_layernorm.weight",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    model_names={"output_norm": "model.final_layernorm"},
    keys=MAMBA_KEYS,
    complete=complete_falcon_h1,
)
NEMOTRON_HYBRID = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    {name: f"mixer.{target}" for name, target in MAMBA_NAMES.items()}
    | {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.up_exps",
        "ffn_down_exps": "mixer.experts.down_exps",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    layer_prefix="backbone.layers.",
    model_names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    keys={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "moe_latent_size": "moe_latent_size",
    },
    lists=("attention.head_count_kv", "feed_forward_length"),
    gating=SIGMOID,
    complete=complete_nemotron_hybrid,
)
