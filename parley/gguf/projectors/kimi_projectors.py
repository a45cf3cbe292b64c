"""Kimi K2.5's image encoder (MoonViT) in projector files."""

from __future__ import annotations

from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import Projector, same_text
from parley.gguf.projectors.projector_file import POSITIONS, ProjectorFile

MERGE_SIZE = 2  # patches per embedding in rows and columns
AXIS_PARTS = 4  # of heads: pairs of numbers that rotate by column, and by row


def _kimi_encoder(file: ProjectorFile) -> dict[str, Any]:
    merge, positions = file.read_count("projector.scale_factor", MERGE_SIZE), file.tensor_shape(POSITIONS)
    if len(positions) != 3:
        raise GgufError(f"{file.name} has {POSITIONS} of the shape {positions}; it must have 3 axes")
    return {
        "projection_hidden_size": file.read_count("embedding_length"),
        "projection_layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-5),
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(AXIS_PARTS),
            "patch_size": file.read_count("patch_size"),
            "pos_emb_height": positions[0],
            "pos_emb_width": positions[1],
            "merge_kernel_size": [merge, merge],
        },
    }


def _kimi_processor(file: ProjectorFile) -> dict[str, Any]:
    patch = file.read_count("patch_size")
    sizes = {"patch_size": patch, "merge_size": file.read_count("projector.scale_factor", MERGE_SIZE)}
    image = {"image_processor_type": "Kimi_K25ImageProcessor", **sizes, **file.colour_scale()}
    if file.read_field("image_max_pixels") is not None:
        image["max_patches"] = file.read_count("image_max_pixels") // patch**2
    return {
        "processor_class": "Kimi_K25Processor",
        "image_processor": image,
        "video_processor": {"video_processor_type": "Kimi_K25VideoProcessor", **sizes, **file.colour_scale()},
    }


KIMI_K2_5 = Projector(
    same_text("kimi_k25", "Kimi_K25ForConditionalGeneration", "deepseek_v3"),
    {
        "v.patch_embd": "vision_tower.patch_embed.proj",
        "v.position_embd": "vision_tower.patch_embed.pos_emb",
        "v.post_ln": "vision_tower.encoder.final_layernorm",
        "mm.input_norm": "mm_projector.pre_norm",
        "mm.1": "mm_projector.proj.0",
        "mm.2": "mm_projector.proj.2",
    },
    "vision_tower.encoder.blocks.",
    {
        "ln1": "norm0",
        "ln2": "norm1",
        "attn_qkv": "wqkv",
        "attn_out": "wo",
        "ffn_up": "mlp.fc0",
        "ffn_down": "mlp.fc1",
    },
    {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
    {"image_token_id": "image_token"},
    _kimi_encoder,
    _kimi_processor,
    has_split_axes=True,
    stand_ins={"video_token": "image_token"},  # its id is after the last row of the embedding
)
