"""The image encoder of MiniCPM-V 4.6 and 4.7 in projector files: SigLIP, in whose midst four patches become one."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from functools import partial
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

MERGER_BLOCKS = "wa_layer_indexes"  # the block that the merger follows, in a list
SLICES = 9  # most of an image, as published
MERGER = "v.vit_merger.ln1.weight"


def _merger_block(file: ProjectorFile) -> int:
    """Return the number of the block that the merger in the encoder follows. Raises GgufError."""
    listed, blocks = file.read_field(MERGER_BLOCKS), file.block_count()
    if not isinstance(listed, list) or len(listed) != 1 or type(listed[0]) is not int or not 0 <= listed[0] < blocks:
        raise GgufError(
            f"{file.name} gives {file.prefix}{MERGER_BLOCKS} as {reprlib.repr(listed)}; it is one of {blocks} blocks"
        )
    return int(listed[0])


def _minicpm_encoder(version: str, file: ProjectorFile) -> dict[str, Any]:
    file.tensor_shape(MERGER)  # files for less reduced images lack it, and Transformers' code has no such encoder
    patch = file.read_count("patch_size")
    return {
        "insert_layer_id": _merger_block(file),
        "vision_config": {
            "model_type": f"minicpmv{version}_vision",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.position_side() * patch,
            "patch_size": patch,
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
        },
    }


def _minicpm_processor(version: str, file: ProjectorFile) -> dict[str, Any]:
    sizes = {
        "scale_resolution": file.read_count("image_size"),
        "patch_size": file.read_count("patch_size"),
        "max_slice_nums": file.read_count("max_slice_nums", SLICES),
        **file.colour_scale(),
    }
    return {
        "processor_class": f"MiniCPMV{version}Processor",
        "image_processor": {"image_processor_type": "MiniCPMV4_6ImageProcessor", **sizes},
        "video_processor": {"video_processor_type": "MiniCPMV4_6VideoProcessor", **sizes},
    }


MINICPM_V_4_6 = Projector(
    same_text("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", "qwen3_5_text"),
    {
        "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
        "v.position_embd": "model.vision_tower.embeddings.position_embedding",
        "v.post_ln": "model.vision_tower.post_layernorm",
        "v.vit_merger.ln1": "model.vision_tower.vit_merger.layer_norm1",
        "v.vit_merger.attn_q": "model.vision_tower.vit_merger.self_attn.q_proj",
        "v.vit_merger.attn_k": "model.vision_tower.vit_merger.self_attn.k_proj",
        "v.vit_merger.attn_v": "model.vision_tower.vit_merger.self_attn.v_proj",
        "v.vit_merger.attn_out": "model.vision_tower.vit_merger.self_attn.out_proj",
        "v.vit_merger.ds_ln": "model.vision_tower.vit_merger.pre_norm",
        "v.vit_merger.ds_ffn_up": "model.vision_tower.vit_merger.linear_1",
        "v.vit_merger.ds_ffn_down": "model.vision_tower.vit_merger.linear_2",
        "mm.input_norm": "model.merger.mlp.0.pre_norm",
        "mm.up": "model.merger.mlp.0.linear_1",
        "mm.down": "model.merger.mlp.0.linear_2",
    },
    "model.vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    {"image_token_id": "image_token", "video_token_id": "video_token"},
    partial(_minicpm_encoder, "4_6"),
    partial(_minicpm_processor, "4_6"),
)
MINICPM_V_4_7 = replace(
    MINICPM_V_4_6,
    whole_models=same_text("minicpmv4_7", "MiniCPMV4_7ForConditionalGeneration", "qwen3_5_text", "qwen3_5_moe_text"),
    ids=MINICPM_V_4_6.ids
    | {
        "image_start_id": "image_start_token",
        "image_end_id": "image_end_token",
        "slice_start_id": "slice_start_token",
        "slice_end_id": "slice_end_token",
    },
    read_encoder=partial(_minicpm_encoder, "4_7"),
    read_processor=partial(_minicpm_processor, "4_7"),
    plain_ids={"newline_id": "Ċ"},
)
