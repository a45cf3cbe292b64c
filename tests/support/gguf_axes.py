"""The layouts that llama.cpp's converter gives to language models whose positions have several axes."""

from __future__ import annotations

from typing import Any

import torch

PARTED_TYPES = ("glm4v_text", "glm_ocr_text")
AXES_ARCHITECTURES = {
    "qwen2_vl_text": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen2_5_omni_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "glm4v_moe_text": "glm4moe",
    "paddleocr_vl_text": "paddleocr",
}


def part_pairs(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors whose queries and keys have the first numbers of all pairs that turn, then the second."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turning = int(head_dim * config["rope_parameters"].get("partial_rotary_factor", 1.0))
    parted = dict(tensors)
    for name, tensor in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensor.view(-1, head_dim, *tensor.shape[1:])
            parts = heads[:, :turning:2], heads[:, 1:turning:2], heads[:, turning:]
            parted[name] = torch.cat(parts, 1).reshape(tensor.shape)
    return parted
