"""Writes encoders as GGUF files with the names and layouts of llama.cpp's converter (conversion/bert.py).

The names are those of the gguf package, so they do not come from the code that reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import gguf_files

ARCHITECTURES = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "distilbert": "bert",
    "nomic_bert": "nomic-bert",
    "jina_embeddings_v3": "jina-bert-v3",
    "modernbert": "modern-bert",
    "gemma3_text": "gemma-embedding",
    "eurobert": "eurobert",
}
DISTILBERT_NAMES = {"n_heads": "num_attention_heads", "n_layers": "num_hidden_layers", "dim": "hidden_size",
    "hidden_dim": "intermediate_size"}  # fmt: skip
# GPT-2's, which nomic-embed-text-v2 has
NOMIC_NAMES = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers", "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps"}  # fmt: skip
DROPPED = ("pooler.", "embeddings.position_ids")


def convert_encoder(
    path: Path,
    folder: Path,
    *,
    kind: str = "F32",
    tokenizer: dict[str, Any] | None = None,
    more_tensors: dict[str, torch.Tensor] | None = None,
    **metadata: Any,
) -> Path:
    """Write a folder's encoder as one file. ``kind``: of its linear weights. ``tokenizer``: metadata of another than
    the folder's byte-level one. ``more_tensors``: by the converter's names. ``metadata``: of the architecture, such as
    ``pooling_type``."""
    config = json.loads((folder / "config.json").read_text())
    config |= {new: config[old] for old, new in DISTILBERT_NAMES.items() if old in config}
    model_type = config["model_type"]
    if "moe_every_n_layers" in config:
        config |= {NOMIC_NAMES[name]: value for name, value in config.items() if name in NOMIC_NAMES}
    arch = ARCHITECTURES[model_type] + "-moe" * ("moe_every_n_layers" in config)
    writer = gguf.GGUFWriter(path, arch)
    add_numbers(writer, config)
    for key, value in metadata.items():
        add_value(writer, f"{arch}.{key}", value)
    if tokenizer is None:
        gguf_files.add_tokenizer(writer, folder)
    else:
        for key, value in tokenizer.items():
            if key != "general.architecture":
                add_value(writer, key, value)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config["num_hidden_layers"])
    for name, tensor in convert_tensors(config, load_file(folder / "model.safetensors") | (more_tensors or {})).items():
        written = names.get_name(name, (".weight", ".bias"))
        assert written is not None, name
        gguf_files.add_tensor(writer, written, tensor.float().contiguous().numpy(), kind)
    gguf_files.close_writer(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of the type that fits the value."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array}  # fmt: skip
    kinds[type(value)](key, value)


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of an encoder's config.json."""
    model_type = config["model_type"]
    skipped = config["pad_token_id"] + 1 if "roberta" in model_type else 0
    writer.add_context_length(config["max_position_embeddings"] - skipped)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_causal_attention(False)
    if model_type in ("gemma3_text", "eurobert"):
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_key_length(config["head_dim"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config.get("norm_eps") or 1e-12)
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention") or ropes
    if "moe_every_n_layers" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_top_k"])
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
        writer.add_rope_freq_base(config["rotary_emb_base"])
    if rope.get("rope_theta"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if model_type == "modernbert":
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)
    elif config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def convert_tensors(config: dict[str, Any], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by names that the gguf package knows, and in the layouts of files."""
    model_type, tensors = config["model_type"], {}
    for name, tensor in stored.items():
        name = name.removeprefix("roberta.").removeprefix("model.")
        if name.startswith(DROPPED):
            continue
        if name == "embeddings.position_embeddings.weight" and "roberta" in model_type:
            tensor = tensor[config["pad_token_id"] + 1 :]
        if name.endswith("mlp.experts.bias"):
            continue
        if ".mlp.experts.mlp." in name:
            tensor = tensor.view(config["num_experts"], config["n_inner"], -1)
            name, tensor = name + ".weight", tensor.mT if name.endswith("w2") else tensor
        if model_type in ("gemma3_text", "eurobert"):
            name = name if name.startswith("dense") else "model." + name
            tensor = tensor.float() + 1 if model_type == "gemma3_text" and name.endswith("norm.weight") else tensor
        tensors[name] = tensor
    return tensors
