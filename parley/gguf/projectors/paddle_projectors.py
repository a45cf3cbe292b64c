"""PaddleOCR-VL's image encoder in projector files."""

from __future__ import annotations

from typing import Any

from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

MERGE_SIZE = 2  # patches per embedding in rows and columns
PADDLE_PIXELS = (147384, 2822400)  # the fewest and the most of an image, as published
HEAD_PARTS = 4  # of heads: pairs of numbers that rotate by row, and by column


def _paddle_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "vision_config": {
            "model_type": "paddleocr_vl_vision",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(HEAD_PARTS),
            "patch_size": file.read_count("patch_size"),
            "image_size": file.position_side() * file.read_count("patch_size"),
            "spatial_merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
        }
    }


def _paddle_processor(file: ProjectorFile) -> dict[str, Any]:
    return {
        "processor_class": "PaddleOCRVLProcessor",
        "image_processor": {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": file.read_pixel_limits(PADDLE_PIXELS),
            "patch_size": file.read_count("patch_size"),
            "merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
            **file.colour_scale(),
        },
    }


PADDLE_OCR = Projector(
    same_text("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text"),
    {
        "v.patch_embd": "visual.vision_model.embeddings.patch_embedding",
        "v.position_embd": "visual.vision_model.embeddings.position_embedding",
        "v.post_ln": "visual.vision_model.post_layernorm",
        "mm.input_norm": "mlp_AR.pre_norm",
        "mm.1": "mlp_AR.linear_1",
        "mm.2": "mlp_AR.linear_2",
    },
    "visual.vision_model.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    {"image_token": "<|IMAGE_PLACEHOLDER|>", "image_bos": "<|IMAGE_START|>", "image_eos": "<|IMAGE_END|>"},
    {"image_token_id": "image_token"},
    _paddle_encoder,
    _paddle_processor,
)
