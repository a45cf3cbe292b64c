"""Encoders in projector files that read large images as tiles: Idefics3's and SmolVLM's, InternVL's, LFM2-VL's and
Llama 4's."""

from __future__ import annotations

from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, TensorLayout, WholeModel, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

PATCH_SCALE = 2  # patches per embedding in rows and columns
EPS_KEY = "attention.layer_norm_epsilon"
CONVERTER_EPS, IDEFICS_EPS = 1e-5, 1e-6  # of encoders whose config names none: llama.cpp's, and that of their own code
IDEFICS_TILES = 4  # in a row or column of the largest image, as published
INTERN_TILES = {"min": 1, "max": 12}  # as published
INTERN_LANGUAGE_MODELS = ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss")


def _encoder_sizes(file: ProjectorFile) -> dict[str, Any]:
    """Return the sizes that configs of these encoders share. Raises GgufError."""
    return {
        "hidden_size": file.read_count("embedding_length"),
        "intermediate_size": file.read_count("feed_forward_length"),
        "num_hidden_layers": file.block_count(),
        "num_attention_heads": file.head_count(),
        "patch_size": file.read_count("patch_size"),
    }


def _idefics_3_encoder(file: ProjectorFile) -> dict[str, Any]:
    eps = file.positive_number(EPS_KEY, IDEFICS_EPS)
    sizes = {
        "image_size": file.read_count("image_size"),
        "layer_norm_eps": IDEFICS_EPS if eps == CONVERTER_EPS else eps,
    }
    return {
        "scale_factor": file.read_count("projector.scale_factor", PATCH_SCALE),
        "vision_config": _encoder_sizes(file) | sizes,
    }


def _idefics_3_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("image_size")
    return {
        "processor_class": "Idefics3Processor",
        "image_seq_len": file.embedding_side(PATCH_SCALE) ** 2,
        "image_processor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": file.read_count("preproc_image_size", IDEFICS_TILES * size)},
            "max_image_size": {"longest_edge": size},
            **file.colour_scale(),
        },
    }


def _intern_encoder(file: ProjectorFile) -> dict[str, Any]:
    size, patch = file.read_count("image_size"), file.read_count("patch_size")
    side = file.embedding_side(PATCH_SCALE)
    return {
        "image_seq_length": side**2,
        "downsample_ratio": 1 / file.read_count("projector.scale_factor", PATCH_SCALE),
        "vision_config": _encoder_sizes(file)
        | {
            "image_size": [size, size],
            "patch_size": [patch, patch],
            "layer_norm_eps": file.positive_number(EPS_KEY, 1e-6),
            "attention_bias": file.has_tensor("v.blk.0.attn_q.bias"),
            "use_qk_norm": file.has_tensor("v.blk.0.attn_q_norm.weight"),
            "norm_type": "layer_norm" if file.has_tensor("v.blk.0.ln1.bias") else "rms_norm",
        },
    }


def _intern_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("image_size")
    scale = {"size": {"height": size, "width": size}, **file.colour_scale()}
    min_tiles, max_tiles = (file.read_count(f"preproc_{bound}_tiles", count) for bound, count in INTERN_TILES.items())
    if min_tiles > max_tiles:
        raise GgufError(
            f"{file.name} gives {file.prefix}preproc_min_tiles as {min_tiles}; preproc_max_tiles is {max_tiles} only"
        )
    tiles = {"crop_to_patches": True, "min_patches": min_tiles, "max_patches": max_tiles}
    return {
        "processor_class": "InternVLProcessor",
        "image_seq_length": file.embedding_side(PATCH_SCALE) ** 2,
        "image_processor": {"image_processor_type": "GotOcr2ImageProcessor", **tiles, **scale},
        "video_processor": {"video_processor_type": "InternVLVideoProcessor", **scale},
    }


def _lfm_2_encoder(file: ProjectorFile) -> dict[str, Any]:
    width = file.tensor_shape("mm.1.weight")[0]
    return {
        "downsample_factor": file.read_count("projector.scale_factor", PATCH_SCALE),
        "projector_hidden_size": width,
        "projector_bias": file.has_tensor("mm.1.bias"),
        "projector_use_layernorm": file.has_tensor("mm.input_norm.weight"),
        "vision_config": _encoder_sizes(file)
        | {
            "model_type": "siglip2_vision_model",
            "num_patches": file.tensor_shape("v.position_embd.weight")[0],
            "layer_norm_eps": file.positive_number(EPS_KEY, 1e-6),
            "vision_use_head": False,
        },
    }


def _lfm_2_processor(file: ProjectorFile) -> dict[str, Any]:
    return {
        "processor_class": "Lfm2VlProcessor",
        "image_processor": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": file.read_count("patch_size"),
            "downsample_factor": file.read_count("projector.scale_factor", PATCH_SCALE),
            **file.colour_scale(),
        },
    }


def _llama_4_encoder(file: ProjectorFile) -> dict[str, Any]:
    scale = file.read_count("projector.scale_factor", PATCH_SCALE)
    inner, outer = file.tensor_shape("mm.model.mlp.1.weight")[0], file.tensor_shape("mm.model.mlp.2.weight")[0]
    return {
        "vision_config": _encoder_sizes(file)
        | {
            "model_type": "llama4_vision_model",
            "image_size": file.read_count("image_size"),
            "norm_eps": file.positive_number(EPS_KEY, 1e-5),
            "pixel_shuffle_ratio": 1 / scale,
            "projector_input_dim": inner,
            "projector_output_dim": outer,
            "vision_output_dim": outer,
        },
    }


def _llama_4_processor(file: ProjectorFile) -> dict[str, Any]:
    size, scale = file.read_count("image_size"), file.read_count("projector.scale_factor", PATCH_SCALE)
    return {
        "processor_class": "Llama4Processor",
        "patch_size": file.read_count("patch_size"),
        "pixel_shuffle_ratio": 1 / scale,
        "image_processor": {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": size, "width": size},
            **file.colour_scale(),
        },
    }


IDEFICS_3 = Projector(
    same_text("idefics3", "Idefics3ForConditionalGeneration", "llama"),
    {
        "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
        "v.position_embd": "model.vision_model.embeddings.position_embedding",
        "v.post_ln": "model.vision_model.post_layernorm",
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
    "model.vision_model.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    {"image_token_id": "image_token"},
    _idefics_3_encoder,
    _idefics_3_processor,
)
INTERN_VL = Projector(
    same_text("internvl", "InternVLForConditionalGeneration", *INTERN_LANGUAGE_MODELS),
    {
        "v.class_embd": "vision_tower.embeddings.cls_token",
        "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
        "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
        "mm.model.mlp.0": "multi_modal_projector.layer_norm",
        "mm.model.mlp.1": "multi_modal_projector.linear_1",
        "mm.model.mlp.3": "multi_modal_projector.linear_2",
    },
    "vision_tower.encoder.layer.",
    {
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "ls1.weight": "lambda_1",
        "ls2.weight": "lambda_2",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.projection_layer",
        "attn_q_norm": "attention.q_norm",
        "attn_k_norm": "attention.k_norm",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    {"image_token_id": "context_image_token"},
    _intern_encoder,
    _intern_processor,
    layouts={"v.class_embd": TensorLayout(3), "v.position_embd.weight": TensorLayout(3)},
    stand_ins={"video_token": "context_image_token"},
)
LFM_2_VL = Projector(
    {"lfm2": WholeModel("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2")},
    {
        "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
        "v.position_embd": "model.vision_tower.embeddings.position_embedding",
        "v.post_ln": "model.vision_tower.post_layernorm",
        "mm.input_norm": "model.multi_modal_projector.layer_norm",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
    "model.vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    },
    {"image_token_id": "image_token"},
    _lfm_2_encoder,
    _lfm_2_processor,
    layouts={"v.patch_embd.weight": TensorLayout(2, (0, 2, 3, 1))},
)
LLAMA_4 = Projector(
    {"llama4_text": WholeModel("llama4", "Llama4ForConditionalGeneration", "llama4_text")},
    {
        "v.class_embd": "vision_model.class_embedding",
        "v.patch_embd": "vision_model.patch_embedding.linear",
        "v.position_embd.weight": "vision_model.positional_embedding_vlm",
        "v.pre_ln": "vision_model.layernorm_pre",
        "v.post_ln": "vision_model.layernorm_post",
        "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
        "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
        "mm.model.fc": "multi_modal_projector.linear_1",
    },
    "vision_model.model.layers.",
    SIGLIP_BLOCK_NAMES
    | {
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "attn_post_norm": "post_attention_layernorm",  # of converters since Gemma 4, which has both
        "attn_out": "self_attn.o_proj",
    },
    {
        "image_token": "<|image|>",
        "start_of_image_token": "<|image_start|>",
        "end_of_image_token": "<|image_end|>",
        "patch_token": "<|patch|>",
        "tile_x_separator_token": "<|tile_x_separator|>",
        "tile_y_separator_token": "<|tile_y_separator|>",
    },
    {"image_token_index": "patch_token"},
    _llama_4_encoder,
    _llama_4_processor,
)
