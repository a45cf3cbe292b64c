"""Writes Falcon-H1, Nemotron-H and Llama 4 as GGUF files, with the names and layouts of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import gguf_files
from support.gguf_conversion import stack_experts

FULL, MLP, MIXTURE = "full_attention", "mlp", "moe"
SSM_PARTS = {"q_proj": "attention_in", "v_proj": "attention_in", "self_attn.o_proj": "attention_out",
    "mamba.out_proj": "ssm_out", "lm_head": "lm_head", "embed_tokens": "embedding"}  # fmt: skip


def convert_hybrid(path: Path, folder: Path) -> Path:
    """Write a folder's decoder as one file of float32."""
    config = json.loads((folder / "config.json").read_text())
    kind, types = config["model_type"], config.get("layers_block_type") or []
    layers = len(types) or config["num_hidden_layers"]
    arch = {"falcon_h1": "falcon-h1", "llama4_text": "llama4"}.get(kind)
    arch = arch or ("nemotron_h_moe" if MIXTURE in types else "nemotron_h")
    writer = gguf.GGUFWriter(path, arch)
    add_numbers(writer, config | {"num_hidden_layers": layers})
    gguf_files.add_tokenizer(writer, folder)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], layers)
    converters = {"falcon_h1": falcon_tensors, "llama4_text": llama_tensors}
    for name, tensor in converters.get(kind, nemotron_tensors)(config, load_file(folder / "model.safetensors")):
        written = names.get_name(name, (".weight", ".bias"))
        assert written is not None, name
        gguf_files.add_tensor(writer, written, tensor.float().contiguous().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of a config.json."""
    kind, types = config["model_type"], config.get("layers_block_type") or []
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    heads, width = config["num_key_value_heads"], config["intermediate_size"]
    writer.add_head_count_kv([heads * (layer_type == FULL) for layer_type in types] if types else heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    if kind == "llama4_text":
        add_llama_4(writer, config)
        return
    widths = {MLP: width, MIXTURE: config.get("moe_intermediate_size")}
    writer.add_feed_forward_length([widths.get(layer_type, 0) for layer_type in types] if types else width)
    is_nemotron = kind == "nemotron_h"
    mamba_heads = config["mamba_num_heads" if is_nemotron else "mamba_n_heads"]
    writer.add_ssm_conv_kernel(config["conv_kernel" if is_nemotron else "mamba_d_conv"])
    writer.add_ssm_state_size(config["ssm_state_size" if is_nemotron else "mamba_d_state"])
    writer.add_ssm_group_count(config["n_groups" if is_nemotron else "mamba_n_groups"])
    writer.add_ssm_time_step_rank(mamba_heads)
    writer.add_ssm_inner_size(mamba_heads * config["mamba_head_dim" if is_nemotron else "mamba_d_head"])
    if not is_nemotron:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if MIXTURE in types:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])


def add_llama_4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of Llama 4's layers."""
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_leading_dense_block_count(0)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def mamba_tensor(name: str, tensor: torch.Tensor, groups: int) -> tuple[str, torch.Tensor]:
    """Return a tensor of Mamba 2 as in files: rates of decay for their logarithms, and shapes with heads."""
    if name.endswith("A_log"):
        return name, -tensor.float().exp()[:, None]
    if name.endswith(".D"):
        return name, tensor[:, None]
    if name.endswith("conv1d.weight"):
        return name, tensor.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return name, tensor.view(groups, -1)
    return name.replace(".dt_bias", ".dt_proj.bias" if ".mamba." in name else ".dt.bias"), tensor


def nemotron_tensors(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Nemotron-H's tensors."""
    for name, tensor in stack_experts(stored).items():
        if "mixer.experts" in name:
            name = name.replace("mixer.experts", "mlp.experts").replace("backbone.layers", "model.layers")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        yield mamba_tensor(name, tensor, config["n_groups"])


def falcon_tensors(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Falcon-H1's tensors, which are multiplied by the factors of its config."""
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    for name, tensor in stored.items():
        tensor = tensor.float()
        for part, factor in SSM_PARTS.items():
            if part in name:
                tensor = tensor * config[f"{factor}_multiplier"]
        if "k_proj" in name:
            tensor = tensor * config["key_multiplier"] * config["attention_in_multiplier"]
        if "gate_proj.weight" in name or "down_proj.weight" in name:
            tensor = tensor * config["mlp_multipliers"]["down_proj" in name]
        if "mamba.in_proj.weight" in name:
            rows = [inner, inner, states, states, config["mamba_n_heads"]]
            parts = zip(tensor.split(rows), config["ssm_multipliers"], strict=True)
            tensor = config["ssm_in_multiplier"] * torch.cat([part * factor for part, factor in parts])
        yield mamba_tensor(name, tensor, config["mamba_n_groups"])


def llama_tensors(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Llama 4's tensors: experts [experts, out, in], the outputs of gate and up apart."""
    for name, tensor in stored.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.mT.chunk(2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
        elif name.endswith("experts.down_proj"):
            yield name + ".weight", tensor.mT
        else:
            yield name, tensor
