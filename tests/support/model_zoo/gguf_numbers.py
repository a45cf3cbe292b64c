"""Writes a GGUF file and, in Hugging Face format, the numbers that its blocks mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.model_zoo.quantized_files import change_config
from support.model_zoo.zoo_folder import write_plain

PLAIN_KINDS = ("F32", "F16", "BF16")
# The types that llama.cpp gives the weights of a mixture of types
MIXTURE_TYPES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
LARGER = ("v_proj", "down_", "lm_head", "embed_tokens")  # parts of the names of those that get the second
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # whole blocks of every type
SCALE_PLACES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return random blocks uint8 [rows, bytes], with scales that make numbers as large as those of weights."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = 122 + raw[..., 0] % 3
        return raw.reshape(rows, -1)
    places = SCALE_PLACES.get(kind.name, (0,))
    spread = gguf.quants.dequantize(_with_scales(raw, places, 1.0).reshape(rows, -1), kind).std()
    return _with_scales(raw, places, 1.2 * columns**-0.5 / spread).reshape(rows, -1)


def _with_scales(raw: np.ndarray, places: tuple[int, ...], scale: float) -> np.ndarray:
    """Return a copy of blocks whose float16 scales are between half of ``scale`` and ``scale``."""
    copy = raw.copy()
    for place in places:
        share = 0.5 + raw[..., place] / 512
        copy[..., place : place + 2] = (share * scale).astype(np.float16)[..., None].view(np.uint8)
    return copy


def write_gguf_pair(home: Path, model_type: str, fields: Mapping[str, Any], kind: str) -> tuple[Path, Path]:
    """Return the file, whose linear weights are of ``kind``, and the folder."""
    fields = {**WIDE, **fields}
    if "num_experts_per_tok" in fields:
        folder = write_plain(home / "plain", model_type, fields, is_published=False)
        tensors = gguf_files.split_experts(load_file(folder / "model.safetensors"))
    else:
        folder = gguf_files.write_folder(home / "plain", model_type, **fields)
        # Wider than there, so that tokens differ clearly
        tensors = {
            name: tensor * 1.5 if tensor.dim() > 1 else tensor + (name == "model.norm.weight")
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
    usual, larger = MIXTURE_TYPES.get(kind, (kind, kind))
    numbers, packed = dict(tensors), {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 1 or ".mlp.gate." in name or "shared_expert_gate" in name or kind in PLAIN_KINDS:
            continue
        *outer, columns = tensor.shape
        type_ = gguf.GGMLQuantizationType[larger if any(part in name for part in LARGER) else usual]
        try:
            blocks = gguf.quants.quantize(tensor.float().numpy(), type_)
        except NotImplementedError:  # the package only reads this type
            blocks = random_blocks(type_, math.prod(outer), columns, seed).reshape(*outer, -1)
        packed[name] = blocks, type_
        numbers[name] = torch.from_numpy(gguf.quants.dequantize(blocks, type_))
    save_file(gguf_files.join_experts(tensors), folder / "model.safetensors", {"format": "pt"})
    path = gguf_files.write_gguf(home / "model.gguf", folder, kind, packed=packed)
    plain = {name: tensor.float() for name, tensor in gguf_files.join_experts(numbers).items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, dtype="float32")
    return path, folder
