"""Tiny models of families of images and sound whose code came late to Transformers, for ``multimodal_models``."""

import functools
from dataclasses import replace
from typing import Any

from support.media_family_shape import GRID_PINPOINTS, LLAVA_SIZES, SIGLIP, TEXT, VISION, Family
from support.rope_grid_models import MROPE, QWEN_MARKS


def _lfm3_vl(tokenizer: Any) -> Any:
    import transformers

    cell = 32**2  # pixels of one embedding
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": 16}
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": 16}
    return transformers.Lfm3VlProcessor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, transformers.Qwen3VLVideoProcessor(**video_sizes)
    )


def _got_ocr2(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, GotOcr2Processor

    GotOcr2Processor.num_image_tokens = 4
    return GotOcr2Processor(GotOcr2ImageProcessor(size={"height": 128, "width": 128}), tokenizer)


def _minicpm_v(tokenizer: Any, *, name: str = "MiniCPMV4_6Processor") -> Any:
    import transformers

    sizes = {"scale_resolution": 64, "patch_size": 8, "max_slice_nums": 4}
    return getattr(transformers, name)(
        transformers.MiniCPMV4_6ImageProcessor(**sizes),
        transformers.MiniCPMV4_6VideoProcessor(**sizes),
        tokenizer,
    )


def _idefics2(tokenizer: Any) -> Any:
    from transformers import Idefics2ImageProcessor, Idefics2Processor

    sizes = {"shortest_edge": 24, "longest_edge": 64}
    return Idefics2Processor(Idefics2ImageProcessor(size=sizes, do_image_splitting=True), tokenizer, image_seq_len=4)


def _ovis2(tokenizer: Any) -> Any:
    from transformers import Ovis2ImageProcessor, Ovis2Processor

    image = Ovis2ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    return Ovis2Processor(image, tokenizer, image_seq_length=4)


def _phi4(tokenizer: Any) -> Any:
    import transformers

    return transformers.Phi4MultimodalProcessor(
        transformers.Phi4MultimodalImageProcessor(size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2),
        transformers.Phi4MultimodalFeatureExtractor(),
        tokenizer,
    )


def _music_flamingo(tokenizer: Any) -> Any:
    from transformers import MusicFlamingoProcessor, WhisperFeatureExtractor

    return MusicFlamingoProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _paligemma(tokenizer: Any) -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    image = SiglipImageProcessor(size={"height": 28, "width": 28}, image_seq_length=16)
    return PaliGemmaProcessor(image, tokenizer)


def _aria(tokenizer: Any) -> Any:
    from transformers import AriaImageProcessor, AriaProcessor

    return AriaProcessor(AriaImageProcessor(), tokenizer, size_conversion={980: 4})


def _step3p7(tokenizer: Any) -> Any:
    import transformers

    image = transformers.Step3p7ImageProcessor(size={"height": 112, "width": 112}, patch_size=56, max_image_size=224)
    return transformers.Step3p7Processor(image, tokenizer)


def _ernie(tokenizer: Any) -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 28**2, "longest_edge": 28**2 * 64}, "patch_size": 14}
    video = transformers.Ernie4_5_VLMoeVideoProcessor(**sizes, draw_on_frames=False)
    return transformers.Ernie4_5_VLMoeProcessor(transformers.Ernie4_5_VLMoeImageProcessor(**sizes), tokenizer, video)


def _granite4(tokenizer: Any) -> Any:
    from transformers import Granite4VisionProcessor, LlavaNextImageProcessor

    return Granite4VisionProcessor(
        LlavaNextImageProcessor(**LLAVA_SIZES, image_grid_pinpoints=GRID_PINPOINTS),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="full",
        downsample_rate="1/2",
    )


PALIGEMMA_TEXT = TEXT | {"model_type": "gemma", "head_dim": 16, "vocab_size": 2048}  # its processor adds 1152 tokens
PALIGEMMA = Family(
    {
        "model_type": "paligemma",
        "text_config": PALIGEMMA_TEXT,
        "vision_config": SIGLIP | {"vision_use_head": False},
        "projection_dim": 64,
        "hidden_size": 64,
        "vocab_size": 2048,
    },
    {"image_token": "<image>"},
    {"image": "<image>"},
    _paligemma,
)
ERNIE_MARKS = {
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_start_token": "<|IMAGE_START|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_end_token": "<|VIDEO_END|>",
}

MINICPM_V = Family(
    {
        "text_config": TEXT
        | {
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "vision_config": VISION | {"image_size": 64, "patch_size": 8},
        "insert_layer_id": 1,
    },
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
    {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    _minicpm_v,
    {"image_token_id": "image_token", "video_token_id": "video_token"},
)
RECENT_MODELS: dict[str, Family] = {
    "lfm3_vl": Family(
        {
            "text_config": TEXT | {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": VISION
            | {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"], "patch_size": 16},
            "projector_hidden_size": 48,
        },
        QWEN_MARKS,
        {
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        _lfm3_vl,
        {f"{name}_id": name for name in QWEN_MARKS},
    ),
    "got_ocr2": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 128,
                "patch_size": 16,
                "window_size": 4,
                "global_attn_indexes": [1],
                "mlp_dim": 48,
            },
        },
        {"image_token": "<imgpad>"},
        {"image": "<img><imgpad></img>\n"},
        _got_ocr2,
        tiles=["<img>", "</img>"],
    ),
    "minicpmv4_6": MINICPM_V,
    "minicpmv4_7": replace(  # whose positions have axes
        MINICPM_V,
        config=MINICPM_V.config
        | {
            "text_config": MINICPM_V.config["text_config"]
            | {
                "rope_parameters": MROPE["rope_parameters"]
                | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25}
            }
        },
        processor=functools.partial(_minicpm_v, name="MiniCPMV4_7Processor"),
        ids=MINICPM_V.ids
        | {
            "image_start_id": "image_start_token",
            "image_end_id": "image_end_token",
            "slice_start_id": "slice_start_token",
            "slice_end_id": "slice_end_token",
        },
    ),
    "idefics2": Family(
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"image_size": 64, "patch_size": 8},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 16,
                "num_key_value_heads": 2,
            },
        },
        {
            "image_token": "<image>",
            "image_boundary_token": "<fake_token_around_image>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        {"image": "<image>"},
        _idefics2,
    ),
    "ovis2": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": VISION
            | {"image_size": 28, "patch_size": 7, "vocab_size": 40, "hidden_stride": 2, "head_dim": 16},
            "hidden_size": 64,
        },
        {
            "image_token": "<IMG_ATOM>",
            "start_token": "<IMG_START>",
            "grid_token": "<IMG_GRID>",
            "column_token": "<IMG_COL>",
            "row_token": "<IMG_ROW>",
            "end_token": "<IMG_END>",
        },
        {"image": "<image>"},
        _ovis2,
        tiles=["<image>"],
    ),
    "phi4_multimodal": Family(
        TEXT
        | {
            "original_max_position_embeddings": 1024,
            "pad_token_id": 0,
            "vision_config": VISION | {"image_size": 64, "crop_size": 64, "patch_size": 2, "feature_layer": -2},
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 16,
            },
        },
        {"image_token": "<|image|>", "audio_token": "<|audio|>"},
        {"image": "<|image|>", "audio": "<|audio|>"},
        _phi4,
        {"vision_config.image_token_id": "image_token", "audio_config.audio_token_id": "audio_token"},
    ),
    "musicflamingo": Family(
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "audio_config": VISION | {"model_type": "audioflamingo3_encoder", "num_mel_bins": 80},
        },
        {"audio_token": "<sound>", "audio_bos_token": "<|sound_bos|>", "audio_eos_token": "<|sound_eos|>"},
        {"audio": "<sound>"},
        _music_flamingo,
        {f"audio{end}_token_id": f"audio{end}_token" for end in ("", "_bos", "_eos")},
    ),
    "paligemma": PALIGEMMA,
    "paligemma2": replace(
        PALIGEMMA,
        config=PALIGEMMA.config
        | {
            "text_config": PALIGEMMA_TEXT
            | {
                "model_type": "gemma2",
                "sliding_window": 24,  # shorter than prompts, in which it takes no effect
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            }
        },
    ),
    "aria": Family(
        {
            "text_config": TEXT
            | {"intermediate_size": 48, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
            "vision_config": VISION | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
            "projector_patch_to_query_dict": {196: 4},
        },
        {"image_token": "<|img|>"},
        {"image": "<fim_prefix><|img|><fim_suffix>"},
        _aria,
        tiles=["<fim_prefix>", "<fim_suffix>"],
    ),
    "step3p7": Family(
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "sliding_window": 29,
                "num_sliding_attention_heads": 6,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
                "share_expert_dim": 48,
            },
            "vision_config": VISION | {"mlp_ratio": 1.5, "image_size": 112, "patch_size": 14},
        },
        {"image_token": "<im_patch>"},
        {"image": "<im_patch>"},
        _step3p7,
        tiles=["<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"],
    ),
    "ernie4_5_vl_moe": Family(
        {
            "text_config": TEXT
            | {
                "moe_intermediate_size": [48, 24],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            },
            "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48},
        },
        ERNIE_MARKS,
        {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        _ernie,
        {f"{name}_id": name for name in ERNIE_MARKS},
    ),
    "granite4_vision": Family(
        {
            "text_config": TEXT | {"num_hidden_layers": 6, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
            "vision_config": SIGLIP | {"hidden_size": 64, "num_attention_heads": 2},
            "image_grid_pinpoints": GRID_PINPOINTS,
            "vision_feature_select_strategy": "full",
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [1, 2]],
            "spatial_target_layers": [1, 3, 4, 5],
        },
        {"image_token": "<image>"},
        {"image": "<image>\n"},
        _granite4,
    ),
}
