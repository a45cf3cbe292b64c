"""What llama.cpp's converter writes of Step 3.5, from a config as it is published."""

from __future__ import annotations

import math
from typing import Any

import gguf
import torch


def add_step(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add what layers have of their own. Return fields of the config as the file has them."""
    other, windows = config["attention_other_setting"], [name == "sliding_attention" for name in config["layer_types"]]
    full_base, windowed_base = config["rope_theta"][:2]
    writer.add_sliding_window_pattern(windows)
    writer.add_rope_freq_base_swa(windowed_base)
    writer.add_expert_used_count(config["moe_top_k"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_expert_weight"])
    writer.add_leading_dense_block_count(int(config["moe_layers_enum"].split(",")[0]))
    writer.add_swiglu_clamp_exp([float(limit) for limit in config["swiglu_limits"]])
    writer.add_swiglu_clamp_shexp([float(limit) for limit in config["swiglu_limits_shared"]])
    if config["rope_scaling"]:
        writer.add_tensor("rope_freqs.weight", rope_factors(config, full_base).numpy())
    heads = {False: config["num_attention_heads"], True: other["num_attention_heads"]}
    groups = {False: config["num_attention_groups"], True: other["num_attention_groups"]}
    return {
        "num_attention_heads": [heads[is_windowed] for is_windowed in windows],
        "num_key_value_heads": [groups[is_windowed] for is_windowed in windows],
        "rope_parameters": {"rope_theta": full_base},
    }


def rope_factors(config: dict[str, Any], base: float) -> torch.Tensor:
    """Return the divisors of frequencies for the rotated half of a head, and 1 for the rest."""
    rope, rotary = config["rope_scaling"], config["head_dim"] // 2
    shortest = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    longest = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    factors = []
    for i in range(0, rotary, 2):
        wavelength = 2 * math.pi * base ** (i / rotary)
        smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wavelength < shortest else rope["factor"] if wavelength > longest else blended)
    return torch.tensor(factors + [1.0] * (config["head_dim"] // 2 - len(factors)))
