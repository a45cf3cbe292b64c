"""The audio encoder of Qwen3-ASR and Qwen3-Omni in projector files, and the image encoder that the latter also has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from parley.gguf.projectors.omni_projectors import OMNI_IDS, omni_processor
from parley.gguf.projectors.projector import Projector, TensorLayout, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile
from parley.gguf.projectors.qwen_projectors import (
    QWEN_3_VL,
    qwen_3_vision,
)
from parley.gguf.projectors.speech_projectors import WHISPER_BLOCK_NAMES

AUDIO_MARKS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
OMNI_MARKS = AUDIO_MARKS | {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
POSITIONS_PER_SECOND = 13  # of video and audio, as published
CONVOLUTIONS = (1, 2, 3)


def _sound_config(file: ProjectorFile, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_mel_bins": file.read_count("num_mel_bins"),
        "d_model": file.read_count("embedding_length"),
        "encoder_ffn_dim": file.read_count("feed_forward_length"),
        "encoder_layers": file.block_count(),
        "encoder_attention_heads": file.head_count(),
        "downsample_hidden_size": file.tensor_shape("a.conv2d.1.weight")[0],
        "output_dim": file.tensor_shape("mm.a.mlp.2.weight")[0],
    }


def _asr_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {"audio_config": _sound_config(file, "qwen3_asr_encoder")}


def _asr_processor(file: ProjectorFile) -> dict[str, Any]:
    bins = file.read_count("num_mel_bins")
    return {
        "processor_class": "Qwen3ASRProcessor",
        "feature_extractor": {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": bins},
    }


def _asr_text(config: dict[str, Any]) -> dict[str, Any]:
    """Set that positions have one axis, which is the same: of sound all of Qwen3-VL's axes are equal."""
    rope = {key: value for key, value in config["rope_scaling"].items() if key != "mrope_section"}
    return {"rope_scaling": rope}


def _omni_encoder(file: ProjectorFile) -> dict[str, Any]:
    encoder = qwen_3_vision(file)
    encoder["vision_config"]["model_type"] = "qwen3_omni_moe_vision_encoder"
    sound = _sound_config(ProjectorFile(file.model, "audio"), "qwen3_omni_moe_audio_encoder")
    return encoder | {"audio_config": sound, "position_id_per_seconds": POSITIONS_PER_SECOND}


QWEN_3_ASR = Projector(
    {
        text_type: WholeModel("qwen3_asr", "Qwen3ASRForConditionalGeneration", "qwen3")
        for text_type in ("qwen3", "qwen3_vl_text")  # llama.cpp's converter names the latter's architecture
    },
    {
        **{f"a.conv2d.{layer}": f"model.audio_tower.conv2d{layer}" for layer in CONVOLUTIONS},
        "a.conv_out": "model.audio_tower.conv_out",
        "a.post_ln": "model.audio_tower.ln_post",
        "mm.a.mlp.1": "model.multi_modal_projector.linear_1",
        "mm.a.mlp.2": "model.multi_modal_projector.linear_2",
    },
    "model.audio_tower.layers.",
    WHISPER_BLOCK_NAMES,
    AUDIO_MARKS,
    {"audio_token_id": "audio_token"},
    _asr_encoder,
    _asr_processor,
    modality="audio",
    layouts={f"a.conv2d.{layer}.bias": TensorLayout(1) for layer in CONVOLUTIONS},
    unread=("a.position_embd.",),  # sinusoids, which the model computes
    complete_text=_asr_text,
    last_tensor="mm.a.mlp.2.weight",
)
OMNI_SOUND = replace(
    QWEN_3_ASR,
    names={
        **{
            stored: name.removeprefix("model.")
            for stored, name in QWEN_3_ASR.names.items()
            if not stored.startswith("mm.")
        },
        "mm.a.mlp.1": "audio_tower.proj1",
        "mm.a.mlp.2": "audio_tower.proj2",
    },
    blocks="audio_tower.layers.",
)
QWEN_3_OMNI = replace(
    QWEN_3_VL,
    whole_models={
        "qwen3_vl_moe_text": WholeModel(
            "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_text"
        )
    },
    names={
        "v.patch_embd": "visual.patch_embed.proj",
        "v.position_embd": "visual.pos_embed",
        "v.post_ln": "visual.merger.ln_q",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    },
    blocks="visual.blocks.",
    deep_names={
        "norm": "visual.merger_list.{}.ln_q",
        "fc1": "visual.merger_list.{}.mlp.0",
        "fc2": "visual.merger_list.{}.mlp.2",
    },
    marks=OMNI_MARKS,
    ids=OMNI_IDS,
    read_encoder=_omni_encoder,
    read_processor=partial(omni_processor, "Qwen3OmniMoeProcessor"),
    unread=("a.position_embd.",),
    audio_encoder=OMNI_SOUND,
)
