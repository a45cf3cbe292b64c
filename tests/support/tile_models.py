"""Tiny models that read images, some also video, most of them in tiles, for ``multimodal_models.FAMILIES``."""

from typing import Any

from support.media_family_shape import CLIP, GRID_PINPOINTS, LLAVA_SIZES, SIGLIP, TEXT, VISION, Family

IDEFICS_VISION = VISION | {"image_size": 32, "patch_size": 8}
IDEFICS_MARKS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
IDEFICS_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS_SIZES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}


def _llava(tokenizer: Any) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_llava import LlavaImageProcessor

    return LlavaProcessor(
        LlavaImageProcessor(**LLAVA_SIZES),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_next(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    return LlavaNextProcessor(
        LlavaNextImageProcessor(**LLAVA_SIZES, image_grid_pinpoints=GRID_PINPOINTS),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava_onevision(tokenizer: Any) -> Any:
    from transformers import (
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    size = {"height": 28, "width": 28}
    return LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=GRID_PINPOINTS),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


def _idefics3(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    return Idefics3Processor(Idefics3ImageProcessor(**IDEFICS_SIZES), tokenizer, image_seq_len=4)


def _smolvlm(tokenizer: Any) -> Any:
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 32}}
    video = SmolVLMVideoProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, video_sampling=sampling, fps=1, num_frames=8
    )
    return SmolVLMProcessor(SmolVLMImageProcessor(**IDEFICS_SIZES), tokenizer, video, image_seq_len=4)


def _internvl(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": 56, "width": 56}
    image = GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4)
    return InternVLProcessor(image, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=4)


def _mistral3(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    image = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(image, tokenizer, patch_size=8, spatial_merge_size=2)


TILE_MODELS: dict[str, Family] = {
    "llava": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "vision_feature_layer": -2},
        {"image_token": "<image>"},
        {"image": "<image>\n"},
        _llava,
    ),
    "llava_next": Family(
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": CLIP,
            "image_grid_pinpoints": GRID_PINPOINTS,
        },
        {"image_token": "<image>"},
        {"image": "<image>\n"},
        _llava_next,
    ),
    "llava_onevision": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
            "vision_config": SIGLIP,
            "image_grid_pinpoints": GRID_PINPOINTS,
            "tie_word_embeddings": True,
        },
        {"image_token": "<image>", "video_token": "<video>"},
        {"image": "<image>", "video": "<video>"},
        _llava_onevision,
        {"image_token_id": "image_token", "video_token_id": "video_token"},
    ),
    "idefics3": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": IDEFICS_VISION, "scale_factor": 2},
        IDEFICS_MARKS,
        {"image": "<image>"},
        _idefics3,
        tiles=IDEFICS_TILES,
    ),
    "smolvlm": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": IDEFICS_VISION, "scale_factor": 2},
        IDEFICS_MARKS | {"video_token": "<video>"},
        {"image": "<image>", "video": "<video>"},
        _smolvlm,
        tiles=IDEFICS_TILES,
    ),
    "internvl": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
        _internvl,
        {"image_token_id": "context_image_token"},
    ),
    "mistral3": Family(
        {
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16},
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        {"image": "[IMG]"},
        _mistral3,
    ),
}
