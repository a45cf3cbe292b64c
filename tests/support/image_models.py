"""Tiny models of more families that read images, for ``multimodal_models.FAMILIES``."""

from typing import Any

from support.media_family_shape import CLIP, GRID_PINPOINTS, LLAVA_SIZES, SIGLIP, TEXT, VISION, Family

COHERE_TEXT = TEXT | {
    "model_type": "cohere2",
    "head_dim": 16,
    "sliding_window": 29,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "logit_scale": 1.0,  # Transformers' code for these models forgets it
}
COHERE_MARKS = {
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
PIXTRAL = VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16}
LLAMA4_MARKS = {
    "image_token": "<|image|>",
    "start_of_image_token": "<|image_start|>",
    "end_of_image_token": "<|image_end|>",
    "patch_token": "<|patch|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}


def _aya_vision(tokenizer: Any) -> Any:
    from transformers import AyaVisionProcessor, GotOcr2ImageProcessor

    image = GotOcr2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4)
    return AyaVisionProcessor(image, tokenizer, patch_size=7, img_size=28, downsample_factor=2)


def _cohere2_vision(tokenizer: Any) -> Any:
    from transformers import Cohere2VisionImageProcessor, Cohere2VisionProcessor

    size = {"height": 28, "width": 28}
    return Cohere2VisionProcessor(Cohere2VisionImageProcessor(size=size, patch_size=2, max_patches=4), tokenizer)


def _lfm2_vl(tokenizer: Any) -> Any:
    from transformers import Lfm2VlImageProcessor, Lfm2VlProcessor

    tiles = {"tile_size": 32, "encoder_patch_size": 8, "min_image_tokens": 4, "max_image_tokens": 8, "max_tiles": 4}
    return Lfm2VlProcessor(Lfm2VlImageProcessor(**tiles, max_num_patches=64), tokenizer)


def _lighton_ocr(tokenizer: Any) -> Any:
    from transformers import LightOnOcrProcessor, PixtralImageProcessor

    image = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    return LightOnOcrProcessor(image, tokenizer, patch_size=8, spatial_merge_size=2)


def _vipllava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        CLIPImageProcessor(**LLAVA_SIZES),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    image = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(image, tokenizer, patch_size=8)


def _llava_next_video(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextVideoProcessor, LlavaNextVideoVideoProcessor

    return LlavaNextVideoProcessor(
        LlavaNextVideoVideoProcessor(**LLAVA_SIZES),
        LlavaNextImageProcessor(**LLAVA_SIZES, image_grid_pinpoints=GRID_PINPOINTS),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _qianfan_ocr(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, QianfanOCRProcessor

    image = GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4)
    return QianfanOCRProcessor(image, tokenizer, image_seq_length=4)


def _kimi_k25(tokenizer: Any) -> Any:
    import transformers

    size = {"max_height": 64, "max_width": 64}
    return transformers.Kimi_K25Processor(
        transformers.Kimi_K25ImageProcessor(size=size), tokenizer, transformers.Kimi_K25VideoProcessor(size=size)
    )


def _hyperclovax(tokenizer: Any) -> Any:
    import transformers

    sizes = {"min_pixels": 28**2, "max_pixels": 28**2 * 64, "patch_size": 14}
    return transformers.HyperCLOVAXVisionV2Processor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, transformers.Qwen2VLVideoProcessor(**sizes)
    )


def _llama4(tokenizer: Any) -> Any:
    from transformers import Llama4ImageProcessor, Llama4Processor

    image = Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    return Llama4Processor(image, tokenizer, patch_size=7)


def _janus(tokenizer: Any) -> Any:
    from transformers import JanusImageProcessor, JanusProcessor

    return JanusProcessor(JanusImageProcessor(size={"height": 32, "width": 32}), tokenizer, num_image_tokens=16)


IMAGE_MODELS: dict[str, Family] = {
    "aya_vision": Family(
        {"text_config": COHERE_TEXT, "vision_config": SIGLIP, "downsample_factor": 2, "tie_word_embeddings": True},
        {
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "img_patch_token": "<|IMG_PATCH|>",
        },
        {"image": "<image>"},
        _aya_vision,
        {"image_token_index": "img_patch_token"},
        tiles=["TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13))],
    ),
    "cohere2_vision": Family(
        {
            "text_config": COHERE_TEXT,
            "vision_config": SIGLIP,
            "downsample_factor": 2,
            "alignment_intermediate_size": 48,
            "tie_word_embeddings": True,
        },
        COHERE_MARKS,
        {"image": "<|IMG_PATCH|>"},
        _cohere2_vision,
    ),
    "lfm2_vl": Family(
        {
            "text_config": TEXT
            | {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": VISION | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16},
            "projector_hidden_size": 48,
        },
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        {"image": "<image>"},
        _lfm2_vl,
        tiles=[f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)],
    ),
    "lighton_ocr": Family(
        {"text_config": TEXT | {"model_type": "qwen3", "head_dim": 16}, "vision_config": PIXTRAL},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        {"image": "<|image_pad|>"},
        _lighton_ocr,
    ),
    "vipllava": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "vision_feature_layer": [-2, 1]},
        {"image_token": "<image>"},
        {"image": "<image>\n"},
        _vipllava,
    ),
    "pixtral": Family(
        {
            "model_type": "llava",
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
            "vision_config": PIXTRAL,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        {"image": "[IMG]"},
        _pixtral,
    ),
    "llava_next_video": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "image_grid_pinpoints": GRID_PINPOINTS},
        {"image_token": "<image>", "video_token": "<video>"},
        {"image": "<image>\n", "video": "<video>\n"},
        _llava_next_video,
        {"image_token_id": "image_token", "video_token_id": "video_token"},
    ),
    "qianfan_ocr": Family(
        {
            "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
            "vision_config": VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
            "image_seq_length": 4,
        },
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        {"image": "<image>\n"},
        _qianfan_ocr,
        {"image_token_id": "context_image_token"},
        renames={"language_model.model.encoder.layers.": "language_model.model.layers."},
    ),
    "kimi_k25": Family(
        {
            "text_config": TEXT
            | {
                "model_type": "deepseek_v3",
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "moe_intermediate_size": 48,
                "first_k_dense_replace": 1,
                "num_key_value_heads": 4,
            },
            "vision_config": VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        {"image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"},
        _kimi_k25,
        tiles=["<|media_begin|>", "<|media_content|>", "<|media_end|>"],
        renames={
            "language_model.model.blocks.": "language_model.model.layers.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
            "model.mm_projector.": "mm_projector.",
        },
    ),
    "hyperclovax_vision_v2": Family(
        {
            "text_config": TEXT | {"model_type": "hyperclovax", "embedding_multiplier": 3.0},
            "vision_config": {
                "model_type": "qwen2_5_vl_vision",
                "depth": 4,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 48,
                "window_size": 56,
                "fullatt_block_indexes": [1, 3],
            },
            "tie_word_embeddings": False,
        },
        {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
        {"image": "<|IMAGE_PAD|>\n"},
        _hyperclovax,
    ),
    "llama4": Family(
        {
            "text_config": TEXT
            | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1}
            | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0], "attention_chunk_size": 40},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "vision_output_dim": 48,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
                "image_size": 28,
                "patch_size": 7,
            },
        },
        LLAMA4_MARKS,
        {"image": "<|image|>"},
        _llama4,
        {"image_token_index": "patch_token"},
    ),
    "janus": Family(
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "mlp_ratio": 2.0,
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 64,
                "num_image_tokens": 16,
            },
            "vq_config": {
                "base_channels": 32,
                "latent_channels": 32,
                "num_embeddings": 16,
                "channel_multiplier": [1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
        },
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        {"image": "<image_placeholder>"},
        _janus,
    ),
}
