"""What llama.cpp's converter writes of Command A+, Hy3, Kolibri 1, Laguna, Mellum 2, MiniMax-M3, Mistral 4 and
MiMo-V2.5.

The gguf package does not know all of them; it names the tensors of others that are alike.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch

STAND_INS = {
    "deepseek32": "glm-dsa",
    "cohere2moe": "dots1",
    "hy_v3": "dots1",
    "laguna": "dots1",
    "mellum": "dots1",
    "minimax-m3": "dots1",
    "kolibri1": "dots1",
    "kolibri": "dots1",
    "flex-olmo": "olmo2",
    "granite_swa": "granitehybrid",
}

# Of the indexers of MiniMax-M3
BLOCK_COUNTS = {
    "index_topk_blocks": "top_k",
    "index_block_size": "block_size",
    "index_local_blocks": "local_blocks",
}
OTHER_NAMES = {
    r"moe\.router\.expert_bias\.bias": "exp_probs_b.bias",
    r"post_attn_norm\.weight": "post_attention_norm.weight",
    r"post_ffn_norm\.weight": "post_ffw_norm.weight",
    r"mlp\.gate\.weight": "ffn_gate_inp.weight",
    **{rf"mlp\.experts\.{part}_proj\.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    r"block_sparse_moe\.router\.weight": "ffn_gate_inp.weight",
    r"block_sparse_moe\.experts\.gate_up_proj\.weight": "ffn_gate_up_exps.weight",
    r"block_sparse_moe\.experts\.down_proj\.weight": "ffn_down_exps.weight",
    r"self_attn\.sinks\.weight": "attn_sinks.weight",
    r"self_attn\.g_proj\.weight": "attn_gate.weight",
    r"mlp\.experts\.e_score_correction\.bias": "exp_probs_b.bias",
    **{
        rf"self_attn\.indexer\.{part}\.weight": f"indexer.{part}.weight"
        for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    },
}


def add_recent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add what an architecture has of its own. Return fields of the config as the file has them."""
    if writer.arch == "mistral4":
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
        return {}
    if writer.arch == "hy_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
        return {}
    if writer.arch == "cohere2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] * config["num_shared_experts"])
        writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
        return {"moe_intermediate_size": config["intermediate_size"]}
    if writer.arch == "laguna":
        return add_laguna(writer, config)
    if config["model_type"] == "kolibri1":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_shared_count(1)
        writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
        return {"intermediate_size": config["moe_intermediate_size"]}
    if writer.arch == "minimax-m3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        for field, key in BLOCK_COUNTS.items():
            writer.add_uint32(f"minimax-m3.attention.indexer.{key}", config[field])
        inner = config["intermediate_size"]
        return {"intermediate_size": config["dense_intermediate_size"], "moe_intermediate_size": inner}
    if writer.arch == "granite_swa":
        writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
        writer.add_array("granite_swa.attention.rope_pattern", [base > 0 for base in config["layer_rope_theta"]])
        return {"rope_parameters": {"rope_theta": max(config["layer_rope_theta"])}}
    if writer.arch != "mellum":
        return {}
    ropes = config["rope_parameters"]
    writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    return {"rope_parameters": ropes["full_attention"]}


def add_laguna(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add the heads and rotary embeddings of layers. Return fields of the config as the file has them."""
    ropes = config["rope_parameters"]
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
    if "sliding_attention" in ropes:
        share = ropes["sliding_attention"].get("partial_rotary_factor", 1.0)
        writer.add_uint32("laguna.rope.dimension_count_swa", int(config["head_dim"] * share))
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    return {
        "rope_parameters": ropes["full_attention"],
        "num_attention_heads": config.get("num_attention_heads_per_layer") or config["num_attention_heads"],
    }


def recent_name(name: str) -> str | None:
    """Return a file's name of a tensor that the package does not know in its architecture."""
    for pattern, written in OTHER_NAMES.items():
        if match := re.fullmatch(rf"model\.layers\.(\d+)\.{pattern}", name):
            return f"blk.{match[1]}.{written}"
    packed = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.(weight|bias)", name)
    return f"blk.{packed[1]}.attn_qkv.{packed[2]}" if packed else None


def join_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the gates and ups of all experts as one, under the name of the file."""
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_gate_exps.weight"):
            ups = tensors[name.replace("_gate_exps", "_up_exps")]
            joined[name.replace("_gate_exps", "_gate_up_exps")] = torch.cat((tensor, ups), 1)
        elif not name.endswith("_up_exps.weight"):
            joined[name] = tensor
    return joined


def split_gates(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with gates and ups apart, as MiniMax-M3 was published, and names of all experts' with a suffix."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem.endswith("gate_up_proj"):
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2, -2), strict=True):
                split[f"{stem.removesuffix('gate_up_proj')}{part}.weight"] = rows
        else:
            split[stem + ".weight" * (name != stem or stem.endswith(".down_proj"))] = tensor
    return split
