"""Tiny models of families that read documents, for ``multimodal_models.FAMILIES``."""

from dataclasses import replace
from typing import Any

from support.media_family_shape import TEXT, VISION, Family
from support.recent_media_models import RECENT_MODELS
from support.tile_models import IDEFICS_TILES


def _deepseek_ocr2(tokenizer: Any) -> Any:
    from transformers import DeepseekOcr2ImageProcessor, DeepseekOcr2Processor

    # Its encoder has 144 queries for a tile of 12 x 12 patches and 256 for the whole image, whatever the sizes are
    image = DeepseekOcr2ImageProcessor(size={"height": 256, "width": 256}, tile_size=192)
    return DeepseekOcr2Processor(image, tokenizer, patch_size=4)


def _minicpm_ocr(tokenizer: Any) -> Any:
    import transformers

    sizes = {"scale_resolution": 64, "patch_size": 8, "max_slice_nums": 4}
    return transformers.MiniCPMOcrProcessor(
        transformers.MiniCPMOcrImageProcessor(**sizes), transformers.MiniCPMOcrVideoProcessor(**sizes), tokenizer
    )


def _hunyuan_vl(tokenizer: Any) -> Any:
    from transformers import HunYuanVLImageProcessor, HunYuanVLProcessor

    cell = 32**2  # pixels of one embedding
    sizes = {"shortest_edge": cell, "longest_edge": cell * 16}
    return HunYuanVLProcessor(HunYuanVLImageProcessor(size=sizes), tokenizer)


def _granite_docling(tokenizer: Any) -> Any:
    from transformers import GraniteDoclingImageProcessor, GraniteDoclingProcessor

    image = GraniteDoclingImageProcessor(size={"height": 32, "width": 32}, max_patches=4)
    return GraniteDoclingProcessor(image, tokenizer, image_seq_len=4)


HUNYUAN_MARKS = {
    "image_start_token": "<｜hy_place▁holder▁no▁100｜>",
    "image_token": "<｜hy_place▁holder▁no▁102｜>",
    "image_end_token": "<｜hy_place▁holder▁no▁101｜>",
}

OCR_MODELS: dict[str, Family] = {
    "deepseek_ocr2": Family(
        {
            "text_config": TEXT
            | {
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "moe_intermediate_size": 48,
            },
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16,
                    "output_channels": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 1,
                    "image_size": 256,
                    "patch_size": 4,
                    "window_size": 7,
                    "global_attn_indexes": [1],
                    "mlp_dim": 32,
                    "downsample_channels": [16, 32],
                },
                "encoder_config": VISION | {"num_key_value_heads": 1},
            },
        },
        {"image_token": "<image>"},
        {"image": "<image>\n"},
        _deepseek_ocr2,
    ),
    "hunyuan_vl": Family(
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 1.0,
                    "alpha": 100.0,
                    "mrope_section": [2, 2, 2, 2],
                },
            },
            "vision_config": VISION | {"out_hidden_size": 64, "max_image_size": 64},
        },
        HUNYUAN_MARKS,
        {"image": "".join(HUNYUAN_MARKS.values())},
        _hunyuan_vl,
        {"image_token_id": "image_token", "im_start_id": "image_start_token", "im_end_id": "image_end_token"},
    ),
    "granite_docling": Family(
        {
            "text_config": TEXT | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            "vision_config": VISION
            | {"image_size": 32, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]},
        },
        {"image_token": "<image>"},
        {"image": "<image>"},
        _granite_docling,
        tiles=["<fake_token_around_image>", "<global-img>", *IDEFICS_TILES],
    ),
    "minicpm_ocr": replace(RECENT_MODELS["minicpmv4_6"], processor=_minicpm_ocr),
}
