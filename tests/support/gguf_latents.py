"""The layouts that llama.cpp's converter gives to decoders whose keys and values are made of latents."""

from __future__ import annotations

import re
from typing import Any

import gguf
import torch

LATENT_TYPES = {
    "plm": "plm",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "kimi_linear": "kimi-linear",
    "mistral4": "mistral4",
}
LATENT_ARCHITECTURES = ("deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "mistral4", "plm")
LATENT_SIGMOID = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_linear")
DENSE_LAYER = re.compile(r"\.block_sparse_moe\.(gate|up|down)_proj\.")  # as Transformers writes it
INDEXER_COUNTS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}


def add_latents(writer: gguf.GGUFWriter, config: dict[str, Any], splits_latents: bool) -> None:
    """Add the sizes of latents, as one head of keys and values if their layers are apart."""
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    lengths = config["qk_nope_head_dim"] + turning, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if (types := config.get("indexer_types")) is not None:
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in types])
    if splits_latents:
        writer.add_key_length_mla(lengths[0])
        writer.add_value_length_mla(lengths[1])
        lengths = rank + turning, rank
    writer.add_key_length(lengths[0])
    writer.add_value_length(lengths[1])


def split_latent_up(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the keys [heads, rank, keys] and values [heads, values, rank] of latents apart."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            split[name] = tensor
            continue
        heads = tensor.view(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        split |= {name.replace("kv_b", "k_b"): keys.mT, name.replace("kv_b", "v_b"): values}
    return split


def add_kimi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes of Kimi Delta Attention. Return fields of the config as the file has them."""
    delta = config["linear_attn_config"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(delta["head_dim"])
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "max_position_embeddings": config["model_max_length"],
        "num_key_value_heads": [int(layer in delta["full_attn_layers"]) for layer in layers],
        "num_experts_per_tok": config["num_experts_per_token"],
    }


def convert_kimi(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with Kimi Delta Attention as in files: rates of decay for their logarithms, convolutions with
    further dimensions of 1."""
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = DENSE_LAYER.sub(r".mlp.\1_proj.", name)
        if name.endswith("_conv1d.weight"):
            converted[name] = tensor.reshape(1, len(tensor), 1, -1)
        elif name.endswith(".dt_bias"):
            converted[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
        else:
            converted[name] = -tensor.float().exp() if name.endswith(".A_log") else tensor
    return converted
