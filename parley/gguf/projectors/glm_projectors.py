"""The image encoders of GLM-4.1V to GLM-4.6V and GLM-OCR in projector files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.projectors.projector import Projector, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile
from parley.gguf.projectors.qwen_projectors import FRAMES, HEAD_PARTS, MERGE_SIZE, QWEN_BLOCK_NAMES

GLM_MARKS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
# The fewest and the most pixels of an image, and of all frames of a video, as published
GLM_PIXELS, GLM_VIDEO_PIXELS = (12544, 9633792), {"shortest_edge": 12544, "longest_edge": 47040000}


def _glm_vision(file: ProjectorFile) -> dict[str, Any]:
    """Return the config of an encoder with members that both kinds have."""
    return {
        "depth": file.block_count(),
        "hidden_size": file.read_count("embedding_length"),
        "num_heads": file.head_count(HEAD_PARTS),
        "patch_size": file.read_count("patch_size"),
        "spatial_merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
        "temporal_patch_size": FRAMES,
        "out_hidden_size": file.tensor_shape("mm.patch_merger.weight")[0],
        "rms_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-5),
    }


def _glm_4_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "vision_config": _glm_vision(file)
        | {
            "image_size": file.position_side() * file.read_count("patch_size"),
            "intermediate_size": file.tensor_shape("mm.up.weight")[
                0
            ],  # of the merger; MLPs of blocks have the outer size
            "attention_bias": file.has_tensor("v.blk.0.attn_qkv.bias"),
        }
    }


def _glm_ocr_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "vision_config": _glm_vision(file)
        | {
            "image_size": file.read_count("image_size"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "attention_bias": file.has_tensor("v.blk.0.attn_qkv.bias"),
        }
    }


def _glm_processor(file: ProjectorFile) -> dict[str, Any]:
    """Return the processor of GLM-4.6V, which names the times of frames otherwise than GLM-4.1V's and 4.5V's."""
    sizes = {
        "patch_size": file.read_count("patch_size"),
        "merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
        "temporal_patch_size": FRAMES,
        **file.colour_scale(),
    }
    return {
        "processor_class": "Glm46VProcessor",
        "image_processor": {
            "image_processor_type": "Glm46VImageProcessor",
            "size": file.read_pixel_limits(GLM_PIXELS),
            **sizes,
        },
        "video_processor": {"video_processor_type": "Glm46VVideoProcessor", "size": GLM_VIDEO_PIXELS, **sizes},
    }


def glm_projector_variant(file: ProjectorFile) -> Projector | None:
    """Return the row of GLM-OCR for files whose queries have norms."""
    return GLM_OCR if file.has_tensor("v.blk.0.attn_q_norm.weight") else None


GLM_4_V = Projector(
    {
        "glm4v_text": WholeModel("glm4v", "Glm4vForConditionalGeneration", "glm4v_text"),
        "glm4v_moe_text": WholeModel("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
    },
    {
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.norm_embd": "model.visual.post_conv_layernorm",
        "v.position_embd": "model.visual.embeddings.position_embedding",
        "v.post_ln": "model.visual.post_layernorm",
        "mm.patch_merger": "model.visual.downsample",
        "mm.model.fc": "model.visual.merger.proj",
        "mm.post_norm": "model.visual.merger.post_projection_norm",
        "mm.gate": "model.visual.merger.gate_proj",
        "mm.up": "model.visual.merger.up_proj",
        "mm.down": "model.visual.merger.down_proj",
    },
    "model.visual.blocks.",
    QWEN_BLOCK_NAMES
    | {
        "attn_qkv": "attn.qkv",
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    GLM_MARKS,
    {f"{mark}_id": mark for mark in GLM_MARKS},
    _glm_4_encoder,
    _glm_processor,
    variant=glm_projector_variant,
)
GLM_OCR = replace(
    GLM_4_V,
    whole_models={"glm_ocr_text": WholeModel("glm_ocr", "GlmOcrForConditionalGeneration", "glm_ocr_text")},
    read_encoder=_glm_ocr_encoder,
    variant=lambda file: None,
)
