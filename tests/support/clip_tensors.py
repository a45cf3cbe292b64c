"""Writes LLaVA's encoder of images as llama.cpp's first converter does it (convert_image_encoder_to_gguf.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from support import gguf_files

# What the converter replaces in the names of CLIP's tensors. It gives the two layers of MLPs each other's names.
REPLACED = {
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "vision_tower.": "v.",
    "encoder.layers": "blk",
    "embeddings.": "",
    "_proj": "",
    "self_attn.": "attn_",
    "layer_norm": "ln",
    "mlp.fc1": "ffn_down",
    "mlp.fc2": "ffn_up",
    "embedding": "embd",
    "layrnorm": "ln",
    "image_newline": "model.image_newline",
}


def write_clip(path: Path, folder: Path, tensors: dict[str, torch.Tensor], *, names_kind: bool = True) -> Path:
    """Write the encoder of a LLaVA folder. ``names_kind``: early files do not say that it is an MLP."""
    config = json.loads((folder / "config.json").read_text())
    vision: dict[str, Any] = config["vision_config"]
    image = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (("has_vision_encoder", True), ("has_text_encoder", False), ("has_llava_projector", True)):
        writer.add_bool(f"clip.{key}", value)
    if names_kind:
        writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", vision["hidden_act"] == "gelu")
    layers = vision["num_hidden_layers"] + 1 + config["vision_feature_layer"]
    for key, value in {
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "projection_dim": 768,  # CLIP's own, which is not the size of the embeddings
        "attention.head_count": vision["num_attention_heads"],
        "block_count": layers,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
    writer.add_array("clip.vision.image_mean", image["image_mean"])
    writer.add_array("clip.vision.image_std", image["image_std"])
    if sizes := config.get("image_grid_pinpoints"):
        writer.add_array("clip.vision.image_grid_pinpoints", [side for size in sizes for side in size])
    for name, tensor in tensors.items():
        match = re.search(r"layers\.(\d+)\.", name)
        if "post_layernorm" in name or (match and int(match[1]) >= layers):
            continue
        for known, written in REPLACED.items():
            name = name.replace(known, written)
        gguf_files.add_tensor(writer, name, tensor.float().contiguous().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path
