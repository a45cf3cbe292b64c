"""Tiny models of further families that read images, video or sound, for ``multimodal_models.FAMILIES``."""

from importlib.util import find_spec
from typing import Any

from support.media_family_shape import CLIP, LLAVA_SIZES, TEXT, VISION, Family
from support.tiny_models import VOCAB

MOSS_MARKS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def _video_llava(tokenizer: Any) -> Any:
    from transformers import VideoLlavaImageProcessor, VideoLlavaProcessor, VideoLlavaVideoProcessor

    return VideoLlavaProcessor(
        VideoLlavaImageProcessor(**LLAVA_SIZES), VideoLlavaVideoProcessor(**LLAVA_SIZES), tokenizer, patch_size=7
    )


def _moss_transcribe_diarize(tokenizer: Any) -> Any:
    import transformers

    extractor = transformers.MossTranscribeDiarizeFeatureExtractor()
    return transformers.MossTranscribeDiarizeProcessor(extractor, tokenizer)


def _fast_vlm(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    sizes = {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}}
    return LlavaProcessor(
        CLIPImageProcessor(**sizes),
        tokenizer,
        patch_size=32,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )


def _perception_lm(tokenizer: Any) -> Any:
    import transformers

    size = {"height": 28, "width": 28}
    return transformers.PerceptionLMProcessor(
        transformers.PerceptionLMVideoProcessor(size=size),
        transformers.PerceptionLMImageProcessor(tile_size=28, max_num_tiles=4, vision_input_type="thumb+tile"),
        tokenizer,
        patch_size=7,
        pooling_ratio=2,
    )


def _mllama(tokenizer: Any) -> Any:
    from transformers import MllamaImageProcessor, MllamaProcessor

    return MllamaProcessor(MllamaImageProcessor(size={"height": 28, "width": 28}, max_image_tiles=4), tokenizer)


FURTHER_MODELS: dict[str, Family] = {
    "mllama": Family(
        {
            "text_config": TEXT | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "vocab_size": VOCAB},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_global_layers": 2,
                "attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "vision_output_dim": 96,
                "intermediate_layers_indices": [0, 2],
            },
        },
        {"image_token": "<|image|>"},
        {"image": "<|image|>"},
        _mllama,
        {"image_token_index": "image_token"},
    ),
    "video_llava": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP},
        {"image_token": "<image>", "video_token": "<video>"},
        {"image": "<image>\n", "video": "<video>\n"},
        _video_llava,
        {"image_token_index": "image_token", "video_token_index": "video_token"},
    ),
    "moss_transcribe_diarize": Family(
        {
            "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
            "audio_config": VISION | {"num_mel_bins": 80},
        },
        MOSS_MARKS,
        {"audio": "".join(MOSS_MARKS[name] for name in ("audio_bos_token", "audio_token", "audio_eos_token"))},
        _moss_transcribe_diarize,
        {"audio_token_id": "audio_token"},
    ),
}

if find_spec("timm") is not None:  # Transformers builds these encoders with it
    FURTHER_MODELS |= {
        "fast_vlm": Family(
            {
                "text_config": TEXT | {"model_type": "qwen2"},
                "vision_config": {
                    "model_type": "timm_wrapper",
                    "architecture": "test_efficientnet",
                    "hidden_size": 256,
                    "do_pooling": False,
                },
            },
            {"image_token": "<image>"},
            {"image": "<image>\n"},
            _fast_vlm,
            {"image_token_index": "image_token"},
        ),
        "perception_lm": Family(
            {
                "text_config": TEXT | {"model_type": "llama"},
                "vision_config": {
                    "model_type": "timm_wrapper",
                    "architecture": "test_vit",
                    "hidden_size": 64,
                    "do_pooling": False,
                    "model_args": {"embed_dim": 64, "img_size": [28, 28], "patch_size": 7},
                },
                "projector_pooling_ratio": 2,
            },
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            {"image": "<|image|>", "video": "<|video|>"},
            _perception_lm,
            {"image_token_id": "image_token", "video_token_id": "video_token"},
        ),
    }
