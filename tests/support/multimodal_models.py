"""Tiny multimodal models with random weights, in the shapes of the families that people serve; no processors."""

from pathlib import Path
from typing import Any

from support.tiny_models import BASE_CONFIG, write_random_model, write_tokenizer

TEXT: dict[str, Any] = BASE_CONFIG | {"intermediate_size": 96, "num_hidden_layers": 3}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
CLIP = VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7}
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
QWEN2_5_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
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
QWEN_MARKS = {"image_token_id": 20, "video_token_id": 21, "vision_start_token_id": 22, "vision_end_token_id": 23}

# model type -> the fields of its config besides those of the types above
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP, "image_token_id": 20},
    "llava_next": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": CLIP,
        "image_grid_pinpoints": [[28, 56], [56, 28]],
        "image_token_id": 20,
    },
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": SIGLIP,
        "image_token_id": 20,
        "video_token_id": 21,
        "tie_word_embeddings": True,
    },
    "qwen2_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN2_VISION, **QWEN_MARKS},
    "qwen2_5_vl": {"text_config": TEXT | MROPE, "vision_config": QWEN2_5_VISION, **QWEN_MARKS},
    "qwen3_vl": {
        "text_config": TEXT | INTERLEAVED_MROPE | {"head_dim": 16},
        "vision_config": QWEN3_VISION,
        "tie_word_embeddings": True,
        **QWEN_MARKS,
    },
    "idefics3": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"image_size": 32, "patch_size": 8},
        "image_token_id": 20,
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"image_size": 32, "patch_size": 8},
        "image_token_id": 20,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
        "image_token_id": 20,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16},
        "image_token_id": 20,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16, "sliding_window": 33, "query_pre_attn_scalar": 16},
        "vision_config": VISION | {"image_size": 56, "patch_size": 7},
        "image_token_id": 20,
    },
    "qwen2_audio": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
        "audio_token_index": 20,
    },
}


def write_multimodal_model(folder: Path, family: str) -> Path:
    """Write a model of one of FAMILIES in float32 into ``folder``."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    config = AutoConfig.for_model(family, **FAMILIES[family])
    write_random_model(folder, AutoModelForMultimodalLM.from_config(config), seed=0, dtype="float32")
    write_tokenizer(folder)
    return folder
