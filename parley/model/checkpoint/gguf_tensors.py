"""The tensors of a GGUF file by the names and in the layouts of Hugging Face format."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from parley.gguf import architectures
from parley.gguf.architectures import LAYER_TENSOR, Architecture
from parley.gguf.header import GgufError, GgufModel, GgufTensor
from parley.gguf.model_config import model_config, used_tensors
from parley.model.checkpoint.tensor_entry import TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # others are blocks of bytes
# The two halves of DeepSeek's layer that makes keys and values of latents; files from 2025 on have them apart
SPLIT_LATENT_UP = re.compile(r"(blk\.\d+\.attn_)[kv]_b\.weight")


def read_gguf_entries(model: GgufModel) -> dict[str, TensorEntry]:
    """Return the tensors of the model by their names in Hugging Face format. Raises GgufError."""
    architecture, config = architectures.find_architecture(model), model_config(model)
    entries: dict[str, TensorEntry] = {}
    for tensor in used_tensors(model):
        if split := SPLIT_LATENT_UP.fullmatch(tensor.name):
            whole = split[1] + "kv_b.weight"
            if whole not in model.tensors:  # some files have all three
                entries[architectures.tensor_name(architecture, whole)] = _join_latent_up(model, split[1])
            continue
        entries[architectures.tensor_name(architecture, tensor.name)] = _make_entry(tensor, architecture, config)
    return entries


def _make_entry(tensor: GgufTensor, architecture: Architecture, config: dict[str, Any]) -> TensorEntry:
    dtype = DTYPES.get(tensor.blocks.name)
    has_offset = architecture.norm_offset and tensor.name.endswith("_norm.weight")
    return TensorEntry(
        tensor.file,
        dtype or torch.uint8,
        architectures.tensor_shape(tensor),
        tensor.start,
        tensor.end,
        None if dtype else tensor.blocks,
        _interleaved_heads(tensor, config) if architecture.interleaved else 0,
        partial(_subtract, architecture.norm_offset) if has_offset else None,
    )


def _interleaved_heads(tensor: GgufTensor, config: dict[str, Any]) -> int:
    """Return the number of heads of queries or keys, 0 for other tensors."""
    match, heads = LAYER_TENSOR.fullmatch(tensor.name), config["num_attention_heads"]
    counts: dict[str, int] = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    return counts.get(match[2], 0) if match else 0


def _subtract(offset: float, numbers: torch.Tensor) -> torch.Tensor:
    return numbers - offset


def _join_latent_up(model: GgufModel, prefix: str) -> TensorEntry:
    """Return DeepSeek's kv_b_proj [heads * (keys + values), rank] of k_b [heads, rank, keys] and v_b [heads, values,
    rank]. Raises GgufError if one is missing or they do not belong together."""
    keys, values = (model.tensors.get(f"{prefix}{kind}_b.weight") for kind in "kv")
    if keys is None or values is None:
        raise GgufError(f"{model.paths[0].name} has only one of the tensors {prefix}k_b and {prefix}v_b")
    heads, rank = keys.shape[0], keys.shape[1] if len(keys.shape) == 3 else 0
    if len(values.shape) != 3 or (values.shape[0], values.shape[2]) != (heads, rank):
        shapes = f"{list(keys.shape)} and {list(values.shape)}"
        raise GgufError(f"{model.paths[0].name} has the tensors {prefix}k_b and {prefix}v_b of shapes {shapes}")
    shape = heads * (keys.shape[2] + values.shape[1]), rank
    size = keys.end - keys.start + values.end - values.start
    parts = tuple(_plain_entry(each) for each in (keys, values))
    return TensorEntry(keys.file, torch.float32, shape, 0, size, parts=parts, join=_join_heads)


def _plain_entry(tensor: GgufTensor) -> TensorEntry:
    dtype = DTYPES.get(tensor.blocks.name)
    blocks = None if dtype else tensor.blocks
    return TensorEntry(tensor.file, dtype or torch.uint8, tensor.shape, tensor.start, tensor.end, blocks)


def _join_heads(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat((keys.mT, values), 1).flatten(0, 1)
