"""The image and audio encoders of Qwen2.5-Omni, which one projector file has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from parley.gguf.projectors.projector import Filled, Projector, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile
from parley.gguf.projectors.qwen_projectors import (
    FRAMES,
    MERGE_SIZE,
    QWEN2_PIXELS,
    QWEN_2_5_VL,
    qwen_2_5_vision,
)
from parley.gguf.projectors.speech_projectors import QWEN_2_AUDIO, WHISPER_NAMES

OMNI_MARKS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
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
POSITIONS = "a.position_embd."  # sinusoids, which the model computes


def _sound_width(file: ProjectorFile) -> int:
    return file.tensor_shape("mm.a.fc.weight")[0]


def _edges(file: ProjectorFile) -> dict[str, Filled]:
    """Return the embeddings of edges of audio, which Transformers' code has and does not use."""
    return {"audio_tower.audio_bos_eos_token.weight": Filled((2, _sound_width(file)))}


def _omni_encoder(file: ProjectorFile) -> dict[str, Any]:
    sound = ProjectorFile(file.model, "audio")
    encoder = qwen_2_5_vision(file)
    del encoder["vision_config"]["tokens_per_second"]  # the language model's config has it
    return encoder | {
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "num_mel_bins": sound.read_count("num_mel_bins"),
            "d_model": sound.read_count("embedding_length"),
            "encoder_ffn_dim": sound.read_count("feed_forward_length"),
            "encoder_layers": sound.block_count(),
            "encoder_attention_heads": sound.head_count(),
            "output_dim": _sound_width(file),
        }
    }


def omni_processor(processor_class: str, file: ProjectorFile) -> dict[str, Any]:
    """Return the configs of the processors of Qwen2.5-Omni and Qwen3-Omni."""
    sizes = {
        "size": file.read_pixel_limits(QWEN2_PIXELS),
        "patch_size": file.read_count("patch_size"),
        "merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
        "temporal_patch_size": FRAMES,
        **file.colour_scale(),
    }
    bins = ProjectorFile(file.model, "audio").read_count("num_mel_bins")
    return {
        "processor_class": processor_class,
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **sizes},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **sizes},
        "feature_extractor": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins},
    }


OMNI_SOUND = replace(
    QWEN_2_AUDIO,
    names={name: target for name, target in WHISPER_NAMES.items() if name != "a.position_embd"}
    | {"a.post_ln": "audio_tower.ln_post", "mm.a.fc": "audio_tower.proj"},
    unread=(POSITIONS,),
)
QWEN_2_5_OMNI = Projector(
    {
        "qwen2_vl_text": WholeModel(
            "qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_text"
        )
    },
    {name: target.removeprefix("model.") for name, target in QWEN_2_5_VL.names.items()},
    "visual.blocks.",
    QWEN_2_5_VL.block_names | {f"attn_{part}": f"attn.{part}" for part in "qkv"},
    OMNI_MARKS,
    OMNI_IDS,
    _omni_encoder,
    partial(omni_processor, "Qwen2_5OmniProcessor"),
    unread=(POSITIONS,),
    filled=_edges,
    audio_encoder=OMNI_SOUND,
)
