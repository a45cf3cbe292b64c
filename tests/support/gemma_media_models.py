"""Tiny models of Gemma that read images, some also video and sound, for ``multimodal_models.FAMILIES``."""

import functools
from importlib.util import find_spec
from typing import Any

from support.media_family_shape import TEXT, VISION, Family
from support.tiny_models import GEMMA_3N, VOCAB

GEMMA4_MARKS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
GEMMA4_PARTS = {"image": "\n\n<|image|>\n\n", "video": "<|video|>", "audio": "<|audio|>"}
GEMMA4_IDS = {f"{kind}_token_id": f"{kind}_token" for kind in ("image", "video", "audio")}
GEMMA4_TEXT = TEXT | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 33,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
GEMMA4_VISION = VISION | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 256,  # an image of one row of tokens has 140 patches in a row
    "standardize": True,
}


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=16)


def _gemma3n(tokenizer: Any) -> Any:
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    clips = Gemma3nAudioFeatureExtractor(feature_size=32)
    images = SiglipImageProcessor(size={"height": 64, "width": 64})
    return Gemma3nProcessor(clips, images, tokenizer, audio_seq_length=12, image_seq_length=4)


def _gemma4(tokenizer: Any, *, is_unified: bool = False) -> Any:
    import transformers

    name = "Gemma4Unified" if is_unified else "Gemma4"
    sizes = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}  # the fewest that are allowed
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{name}AudioFeatureExtractor")(),
        getattr(transformers, f"{name}ImageProcessor")(**sizes),
        tokenizer,
        getattr(transformers, f"{name}VideoProcessor")(**sizes),
    )


GEMMA_MODELS: dict[str, Family] = {
    "gemma3": Family(
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "sliding_window": 33,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": VISION | {"image_size": 56, "patch_size": 7},
            "mm_tokens_per_image": 16,
        },
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"image": "<start_of_image>"},
        _gemma3,
        {"image_token_id": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
    ),
    "gemma4": Family(  # in the shape of E2B: inputs of layers, shared keys and values, sound
        {
            "text_config": GEMMA4_TEXT
            | {
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": VOCAB,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "pad_token_id": 2,
            },
            "vision_config": GEMMA4_VISION | {"use_clipped_linears": True},
            "audio_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [128, 8],
                "output_proj_dims": 48,
            },
        },
        GEMMA4_MARKS,
        GEMMA4_PARTS,
        _gemma4,
        GEMMA4_IDS,
    ),
    "gemma4_31b": Family(  # images see both ways, where layers have a window; no sound
        {
            "model_type": "gemma4",
            "text_config": GEMMA4_TEXT
            | {
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": GEMMA4_VISION,
        },
        GEMMA4_MARKS,
        {kind: mark for kind, mark in GEMMA4_PARTS.items() if kind != "audio"},
        _gemma4,
        GEMMA4_IDS,
    ),
    "gemma4_unified": Family(  # without encoders
        {
            "text_config": GEMMA4_TEXT | {"use_bidirectional_attention": None},
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 48,
                "mm_posemb_size": 128,
                "output_proj_dims": 48,
            },
            "audio_config": {"audio_embed_dim": 640},
        },
        GEMMA4_MARKS,
        GEMMA4_PARTS,
        functools.partial(_gemma4, is_unified=True),
        GEMMA4_IDS,
    ),
}

if find_spec("timm") is not None:  # Transformers builds the encoder of images with it
    GEMMA_MODELS["gemma3n"] = Family(
        {
            "text_config": GEMMA_3N
            | {
                "num_kv_shared_layers": 3,
                "intermediate_size": 96,
                "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.0, 0.0],
                "vocab_size_per_layer_input": 465,  # the tokenizer has four more, of media
            },
            "vision_config": {
                "architecture": "test_efficientnet",  # its blocks differ, as those of the published encoder do
                "model_args": {"norm_layer": "rmsnorm2d"},
                "hidden_size": 256,
                "vocab_offset": 465,
                "vocab_size": 2,
                "num_classes": 0,
            },
            "audio_config": {
                "hidden_size": 32,
                "vocab_offset": 467,
                "vocab_size": VOCAB - 467,
                "input_feat_size": 32,
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 2,
                "sscp_conv_channel_size": [8, 4],
            },
            "vision_soft_tokens_per_image": 4,
            "audio_soft_tokens_per_image": 12,
        },
        {
            "boi_token": "<start_of_image>",
            "boa_token": "<start_of_audio>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "eoa_token": "<end_of_audio>",
            "audio_token": "<audio_soft_token>",
        },
        {"image": "<image_soft_token>", "audio": "<audio_soft_token>"},
        _gemma3n,
        {f"{name}_id": name for name in ("boi_token", "eoi_token", "image_token")}
        | {f"{name}_id": name for name in ("boa_token", "eoa_token", "audio_token")},
    )
