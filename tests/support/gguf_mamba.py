"""Writes Mamba 1 and 2, Falcon Mamba and Jamba as GGUF files, with llama.cpp's names and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import gguf_files
from support.gguf_conversion import stack_experts
from support.gguf_hybrids import mamba_tensor

ARCHITECTURES = {"mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba"}


def convert_mamba(path: Path, folder: Path) -> Path:
    """Write a folder's decoder as one file of float32."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    add_numbers(writer, config)
    gguf_files.add_tokenizer(writer, folder)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[ARCHITECTURES[kind]], config["num_hidden_layers"])
    for name, tensor in stack_experts(load_file(folder / "model.safetensors")).items():
        name, tensor = convert_tensor(config, name, tensor)
        if name.endswith("experts.gate_up_proj"):
            parts = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
            halves = [(name.replace("gate_up_proj", f"{part}_proj.weight"), half) for part, half in parts]
        else:
            halves = [(name + ".weight" * name.endswith("experts.down_proj"), tensor)]
        for half_name, half in halves:
            written = names.get_name(half_name.replace("feed_forward.experts", "mlp.experts"), (".weight", ".bias"))
            assert written is not None, half_name
            gguf_files.add_tensor(writer, written, half.float().contiguous().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


def convert_tensor(config: dict[str, Any], name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return a tensor in the layout of files, by a name that the gguf package knows."""
    if config["model_type"] == "mamba2":
        name, tensor = mamba_tensor(name, tensor, config["n_groups"])
        return name.replace(".mixer.dt.bias", ".mixer.dt_proj.bias"), tensor
    if name.endswith("A_log"):
        return name, -tensor.float().exp()
    return name, tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of a config.json."""
    kind, hidden = config["model_type"], config["hidden_size"]
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    if kind == "jamba":
        add_jamba(writer, config)
        return
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if kind == "mamba2":
        writer.add_ssm_inner_size(config["expand"] * hidden)
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
    else:
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(kind == "falcon_mamba")


def add_jamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of a config.json of Jamba."""
    period, offset, heads = (config[name] for name in ("attn_layer_period", "attn_layer_offset", "num_key_value_heads"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([heads * (layer % period == offset) for layer in range(config["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    rank = config["mamba_dt_rank"]
    writer.add_ssm_time_step_rank(-(-config["hidden_size"] // 16) if rank == "auto" else rank)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
