"""Tiny models of families that talk about images and videos, for ``multimodal_models.FAMILIES``."""

from dataclasses import replace
from typing import Any

from support.media_family_shape import SIGLIP, TEXT, VISION, Family
from support.rope_grid_models import ROPE_GRID_MODELS

MUSE_MARKS = {
    "image_token": "<|patch|>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "video_token": "<|video|>",
    "video_sep_token": "<|vid_frame_separator|>",
    "video_start_token": "<|vid_start|>",
    "video_end_token": "<|vid_end|>",
}


def _glmga(tokenizer: Any) -> Any:
    import transformers

    sizes = {"shortest_edge": 28**2, "longest_edge": 28**2 * 64}
    return transformers.Glm46VProcessor(
        transformers.GlmgaImageProcessor(size=sizes), tokenizer, transformers.GlmgaVideoProcessor(size=sizes)
    )


def _deepseek_vl(tokenizer: Any) -> Any:
    from transformers import DeepseekVLImageProcessor, DeepseekVLProcessor

    image = DeepseekVLImageProcessor(size={"height": 28, "width": 28})
    return DeepseekVLProcessor(image, tokenizer, num_image_tokens=16)


def _deepseek_vl_hybrid(tokenizer: Any) -> Any:
    from transformers import DeepseekVLHybridImageProcessor, DeepseekVLHybridProcessor

    sizes = {"size": {"height": 32, "width": 32}, "high_res_size": {"height": 128, "width": 128}}
    return DeepseekVLHybridProcessor(DeepseekVLHybridImageProcessor(**sizes), tokenizer, num_image_tokens=16)


def _muse_glimmer(tokenizer: Any) -> Any:
    import transformers

    return transformers.MuseGlimmerProcessor(
        transformers.MuseGlimmerImageProcessor(patch_size=8, max_image_tokens=16),
        transformers.MuseGlimmerVideoProcessor(patch_size=8, max_video_frame_tokens=4),
        tokenizer,
    )


VISION_CHAT_MODELS: dict[str, Family] = {
    "glmga": replace(ROPE_GRID_MODELS["glm46v"], processor=_glmga),
    "deepseek_vl": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP},
        {"image_token": "<image_placeholder>"},
        {"image": "<image_placeholder>"},
        _deepseek_vl,
    ),
    "deepseek_vl_hybrid": Family(
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIGLIP | {"image_size": 32, "patch_size": 8},
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": 16,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 1,
                "image_size": 128,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
                "mlp_dim": 32,
            },
        },
        {"image_token": "<image_placeholder>"},
        {"image": "<image_placeholder>"},
        _deepseek_vl_hybrid,
    ),
    "muse_glimmer": Family(
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "sliding_window": 29,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "layer_rope_theta": [1e4, 1e4, 0],
            },
            "vision_config": VISION
            | {
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "patch_size": 8,
                "max_position_embeddings": 16,
                "layer_types": ["window_attention", "full_attention", "full_attention"],
            },
            "out_hidden_size": 128,
            "projector_hidden_size": 48,
        },
        MUSE_MARKS,
        {"image": "<|patch|>", "video": "<|video|>"},
        _muse_glimmer,
        {"image_token_id": "image_token", "video_token_id": "video_token"},
    ),
}
