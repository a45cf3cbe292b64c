"""The image encoder of Gemma 3 in projector files."""

from __future__ import annotations

from typing import Any

from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

GEMMA_3_SCALE = 4  # patches per embedding in rows and columns
GEMMA_3_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def _gemma_3_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "mm_tokens_per_image": file.embedding_side(GEMMA_3_SCALE) ** 2,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.read_count("image_size"),
            "patch_size": file.read_count("patch_size"),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
            "vision_use_head": False,
        },
    }


def _gemma_3_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("image_size")
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}
    return {
        "processor_class": "Gemma3Processor",
        "image_seq_length": file.embedding_side(GEMMA_3_SCALE) ** 2,
        "image_processor": image | file.colour_scale(),
    }


GEMMA_3 = Projector(
    {"gemma3_text": WholeModel("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text")},
    {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    "vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    GEMMA_3_MARKS,
    {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
    _gemma_3_encoder,
    _gemma_3_processor,
    norms=("mm.soft_emb_norm.weight",),
)
