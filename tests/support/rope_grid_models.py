"""Tiny models whose positions have three axes (M-RoPE), or with Qwen's encoders, for ``multimodal_models.FAMILIES``."""

import functools
from typing import Any

from support.media_family_shape import TEXT, VISION, Family

QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
QWEN2_5_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
INTERLEAVED_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
GATED_DELTA = {  # of Qwen3.5: one layer with attention, whose heads rotate by half
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": INTERLEAVED_MROPE["rope_parameters"] | {"partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 80}
QWEN_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_PARTS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
QWEN_IDS = {f"{name}_id": name for name in QWEN_MARKS}
OMNI_VISION = {name: value for name, value in QWEN2_5_VISION.items() if name != "tokens_per_second"}
OMNI_MARKS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
OMNI_PARTS = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
OMNI_IDS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "audio_token_id": "audio_token",
    "vision_start_token_id": "vision_bos_token",
    "vision_end_token_id": "vision_eos_token",
    "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
}
QWEN3_OMNI_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 56,
    "patch_size": 14,
}
GLM_MARKS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
GLM_PARTS = {
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
}
GLM_IDS = {f"{name}_id": name for name in GLM_MARKS}
GLM_TEXT = TEXT | {
    "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
}
GLM_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_routed_experts": 4}


def _qwen_vl(tokenizer: Any, *, name: str, patch_size: int) -> Any:
    import transformers

    cell = (2 * patch_size) ** 2  # pixels of one embedding
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": patch_size}
    video_class = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": patch_size}
    return getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, video_class(**video_sizes)
    )


def _qwen_omni(tokenizer: Any, *, name: str, patch_size: int) -> Any:
    import transformers

    cell = (2 * patch_size) ** 2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": patch_size}
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": patch_size}
    return getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes),
        transformers.Qwen2VLVideoProcessor(**video_sizes),
        transformers.WhisperFeatureExtractor(feature_size=80),
        tokenizer,
    )


def _glm_v(tokenizer: Any, *, name: str) -> Any:
    import transformers

    cell = 28**2  # pixels of one embedding
    sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": 14}
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{name}ImageProcessor")(**sizes),
        tokenizer,
        getattr(transformers, f"{name}VideoProcessor")(**sizes),
    )


def _paddle_ocr(tokenizer: Any) -> Any:
    from transformers import PaddleOCRVLImageProcessor, PaddleOCRVLProcessor

    cell = 28**2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": 14}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessor(**sizes), tokenizer)


def _exaone4_5(tokenizer: Any) -> Any:
    import transformers

    cell = 28**2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": 14}
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": 14}
    return transformers.Exaone4_5_Processor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, transformers.Qwen2VLVideoProcessor(**video_sizes)
    )


def _video_llama3(tokenizer: Any) -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 14**2, "longest_edge": 14**2 * 256}, "patch_size": 14}
    return transformers.VideoLlama3Processor(
        transformers.VideoLlama3ImageProcessor(**sizes), tokenizer, transformers.VideoLlama3VideoProcessor(**sizes)
    )


QWEN3_VL = Family(
    {"text_config": TEXT | INTERLEAVED_MROPE | {"head_dim": 16}, "vision_config": QWEN3_VISION},
    QWEN_MARKS,
    QWEN_PARTS,
    functools.partial(_qwen_vl, name="Qwen3VL", patch_size=16),
    QWEN_IDS,
)
ROPE_GRID_MODELS: dict[str, Family] = {
    "qwen2_vl": Family(
        {"text_config": TEXT | MROPE, "vision_config": QWEN2_VISION},
        QWEN_MARKS,
        QWEN_PARTS,
        functools.partial(_qwen_vl, name="Qwen2VL", patch_size=14),
        QWEN_IDS,
    ),
    "qwen2_5_vl": Family(
        {"text_config": TEXT | MROPE, "vision_config": QWEN2_5_VISION},
        QWEN_MARKS,
        QWEN_PARTS,
        functools.partial(_qwen_vl, name="Qwen2_5_VL", patch_size=14),
        QWEN_IDS,
    ),
    "qwen3_vl": Family(
        QWEN3_VL.config | {"tie_word_embeddings": True}, QWEN_MARKS, QWEN_PARTS, QWEN3_VL.processor, QWEN_IDS
    ),
    "qwen3_vl_moe": Family(
        QWEN3_VL.config | {"text_config": QWEN3_VL.config["text_config"] | EXPERTS},
        QWEN_MARKS,
        QWEN_PARTS,
        QWEN3_VL.processor,
        QWEN_IDS,
    ),
    "qwen3_5": Family(
        {"text_config": TEXT | GATED_DELTA, "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": []}},
        QWEN_MARKS,
        QWEN_PARTS,
        QWEN3_VL.processor,
        QWEN_IDS,
    ),
    "qwen2_5_omni_thinker": Family(
        {
            "text_config": TEXT | MROPE,
            "vision_config": OMNI_VISION,
            "audio_config": AUDIO | {"output_dim": 64, "n_window": 20},
        },
        OMNI_MARKS,
        OMNI_PARTS,
        functools.partial(_qwen_omni, name="Qwen2_5Omni", patch_size=14),
        OMNI_IDS,
    ),
    "qwen3_omni_moe_thinker": Family(
        {
            "text_config": QWEN3_VL.config["text_config"] | EXPERTS,
            "vision_config": QWEN3_VISION,
            "audio_config": AUDIO | {"output_dim": 64, "downsample_hidden_size": 16},
        },
        QWEN3_OMNI_MARKS,
        QWEN_PARTS | {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        functools.partial(_qwen_omni, name="Qwen3OmniMoe", patch_size=16),
        OMNI_IDS,
    ),
    "glm4v": Family(
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm4v"),
        GLM_IDS,
    ),
    "glm46v": Family(
        {
            "text_config": GLM_TEXT | {"model_type": "glm4v_text"},
            "vision_config": GLM_VISION | {"model_type": "glm4v_vision"},
        },
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm46V"),
        GLM_IDS,
    ),
    "glm4v_moe": Family(
        {"text_config": GLM_TEXT | GLM_MOE, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm4v"),
        GLM_IDS,
    ),
    "glm_ocr": Family(
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm46V"),
        GLM_IDS,
    ),
    "paddleocr_vl": Family(
        {
            "text_config": TEXT | MROPE | {"head_dim": 16},
            "vision_config": VISION | {"image_size": 56, "patch_size": 14},
        },
        {"image_token": "<|IMAGE_PLACEHOLDER|>", "image_bos": "<|IMAGE_START|>", "image_eos": "<|IMAGE_END|>"},
        {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        _paddle_ocr,
    ),
    "exaone4_5": Family(
        {
            "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 33, "sliding_window_pattern": 2},
            "vision_config": {name: value for name, value in QWEN2_5_VISION.items() if name != "tokens_per_second"}
            | {"num_key_value_heads": 1},
        },
        QWEN_MARKS,
        QWEN_PARTS,
        _exaone4_5,
        QWEN_IDS,
    ),
    "video_llama_3": Family(
        {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": VISION | {"patch_size": 14}},
        QWEN_MARKS,
        {"image": "<|image_pad|>\n", "video": "<|video_pad|>\n"},
        _video_llama3,
        QWEN_IDS,
    ),
}
