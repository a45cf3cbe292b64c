"""What llama.cpp's converter writes of MiMo-V2-Flash, whose layers with a window have more heads, and of Ling."""

from __future__ import annotations

from typing import Any

import gguf


def add_mimo(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add what layers of MiMo have of their own. Return fields of the config as the file has them."""
    windows = [layer_type == "sliding_attention" for layer_type in config["layer_types"]]
    ropes, heads = config["rope_parameters"], config["num_key_value_heads"]
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_sliding_window_pattern([int(has_window) for has_window in windows])
    writer.add_float32(f"{writer.arch}.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    return {
        "head_dim": None,
        "sliding_window": config["sliding_window"] - 1,  # as the published config has it, without the token itself
        "num_key_value_heads": [2 * heads if has_window else heads for has_window in windows],
        "rope_parameters": ropes["full_attention"],
    }


def add_ling(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add the numbers of a Ling, whose config is that of Granite. Return fields of the config as the file has them."""
    width = config["intermediate_size"]
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_shared_count(config["shared_intermediate_size"] // width)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.0)
    writer.add_leading_dense_block_count(0)
    return {"intermediate_size": 5 * width}  # of layers without experts, which the published models do not have
