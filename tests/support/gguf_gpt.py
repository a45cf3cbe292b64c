"""Writes GPT-2 and decoders of its kind as GGUF files, with the names and layouts of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import gguf_files

ARCHITECTURES = {"gpt2": "gpt2", "gpt_bigcode": "starcoder", "gpt_neox": "gptneox", "phi": "phi2", "falcon": "falcon",
    "bloom": "bloom", "mpt": "mpt", "dbrx": "dbrx"}  # fmt: skip
SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
WIDTHS = {"gpt2": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size", "gpt_neox": "intermediate_size",
    "phi": "intermediate_size"}  # fmt: skip
GROUPED = ("gpt_neox", "bloom", "falcon")  # each head's queries, keys and values are together in the folder
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")


def convert_gpt(path: Path, folder: Path) -> Path:
    """Write a folder's decoder as one file of float32."""
    config = json.loads((folder / "config.json").read_text())
    for name, others in SYNONYMS.items():
        config |= dict.fromkeys([name], next((config[other] for other in others if other in config), config.get(name)))
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind])
    kv_heads = add_numbers(writer, config)
    gguf_files.add_tokenizer(writer, folder)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[ARCHITECTURES[kind]], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts.mlp." in name:
            name, tensor = name + ".weight", tensor.unflatten(0, (config["ffn_config"]["moe_num_experts"], -1))
            tensor = tensor.mT if name.endswith(".w2.weight") else tensor
        if kind == "gpt2" and TRANSPOSED.fullmatch(name):
            tensor = tensor.T
        if kind in GROUPED and "query_key_value" in name:
            tensor = order_heads(tensor, config["num_attention_heads"], kv_heads)
        written = names.get_name(name.removeprefix("transformer.") if kind == "bloom" else name, (".weight", ".bias"))
        assert written is not None, name
        gguf_files.add_tensor(writer, written, tensor.float().contiguous().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


def order_heads(tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Return queries, keys and values of all heads after one another."""
    groups = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return torch.cat([part.flatten(0, 2) for part in parts])


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> int:
    """Add the numbers of a config.json, and return how many heads of keys and values there are."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] if kind == "phi" else heads
    if kind == "dbrx":
        return add_dbrx(writer, config)
    if kind == "gpt_bigcode" and config["multi_query"]:
        kv_heads = 1
    if kind == "falcon":
        kv_heads = (
            config["num_kv_heads"] if config["new_decoder_architecture"] else 1 if config["multi_query"] else heads
        )
    writer.add_context_length(config.get("max_position_embeddings", 2048))
    writer.add_embedding_length(config["hidden_size"])
    width = config.get(WIDTHS.get(kind, ""))
    writer.add_feed_forward_length(width or 4 * config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    if kind in ("gpt_bigcode", "falcon", "bloom", "phi"):
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    if kind in ("gpt_neox", "phi"):
        share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(config["hidden_size"] // heads * share))
    if kind == "gpt_neox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if kind == "mpt":
        writer.add_max_alibi_bias(float(config["attn_config"]["alibi_bias_max"]))
        if limit := config["attn_config"]["clip_qkv"]:
            writer.add_clamp_kqv(float(limit))
    return kv_heads


def add_dbrx(writer: gguf.GGUFWriter, config: dict[str, Any]) -> int:
    """Add the numbers of a DBRX, and return how many heads of keys and values there are."""
    attention, mlp = config["attn_config"], config["ffn_config"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(mlp["ffn_hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(attention["kv_n_heads"])
    writer.add_rope_freq_base(attention["rope_theta"])
    writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_expert_count(mlp["moe_num_experts"])
    writer.add_expert_used_count(mlp["moe_top_k"])
    writer.add_layer_norm_eps(1e-5)
    return int(attention["kv_n_heads"])
