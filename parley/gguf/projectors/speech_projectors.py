"""Whisper's audio encoder in projector files: of Qwen2-Audio, Voxtral and Audio Flamingo 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.projectors.projector import Projector, TensorLayout, WholeModel, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

WHISPER_BLOCK_NAMES = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
WHISPER_NAMES = {
    "a.conv1d.1": "audio_tower.conv1",
    "a.conv1d.2": "audio_tower.conv2",
    "a.position_embd": "audio_tower.embed_positions",
    "a.post_ln": "audio_tower.layer_norm",
}


def _whisper_config(file: ProjectorFile) -> dict[str, Any]:
    return {
        "num_mel_bins": file.read_count("num_mel_bins"),
        "max_source_positions": file.tensor_shape("a.position_embd.weight")[0],
        "d_model": file.read_count("embedding_length"),
        "encoder_ffn_dim": file.read_count("feed_forward_length"),
        "encoder_layers": file.block_count(),
        "encoder_attention_heads": file.head_count(),
    }


def _qwen_2_audio_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {"audio_config": _whisper_config(file) | {"model_type": "qwen2_audio_encoder"}}


def _feature_extractor(file: ProjectorFile) -> dict[str, Any]:
    return {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": file.read_count("num_mel_bins")}


def _qwen_2_audio_processor(file: ProjectorFile) -> dict[str, Any]:
    return {"processor_class": "Qwen2AudioProcessor", "feature_extractor": _feature_extractor(file)}


def _voxtral_config(file: ProjectorFile) -> dict[str, Any]:
    config = _whisper_config(file)
    names = {
        "d_model": "hidden_size",
        "encoder_ffn_dim": "intermediate_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
    }
    return {names.get(name, name): value for name, value in config.items()}


def _voxtral_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {"audio_config": _voxtral_config(file) | {"model_type": "voxtral_encoder"}}


def _voxtral_processor(file: ProjectorFile) -> dict[str, Any]:
    return {"processor_class": "VoxtralProcessor", "feature_extractor": _feature_extractor(file)}


def _audio_flamingo_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {"audio_config": _voxtral_config(file) | {"model_type": "audioflamingo3_encoder"}}


def _audio_flamingo_processor(file: ProjectorFile) -> dict[str, Any]:
    return {
        "processor_class": "AudioFlamingo3Processor",
        "audio_token": AUDIO_FLAMINGO_3.marks["audio_token"],
        "feature_extractor": _feature_extractor(file),
    }


QWEN_2_AUDIO = Projector(
    {"qwen2": WholeModel("qwen2_audio", "Qwen2AudioForConditionalGeneration", "qwen2")},
    WHISPER_NAMES | {"mm.a.fc": "multi_modal_projector.linear"},
    "audio_tower.layers.",
    WHISPER_BLOCK_NAMES,
    {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    {"audio_token_index": "audio_token"},
    _qwen_2_audio_encoder,
    _qwen_2_audio_processor,
    modality="audio",
    layouts={"a.conv1d.1.bias": TensorLayout(1), "a.conv1d.2.bias": TensorLayout(1)},
)
VOXTRAL = replace(
    QWEN_2_AUDIO,
    whole_models=same_text("voxtral", "VoxtralForConditionalGeneration", "llama", "mistral"),
    names=WHISPER_NAMES
    | {"mm.a.mlp.1": "multi_modal_projector.linear_1", "mm.a.mlp.2": "multi_modal_projector.linear_2"},
    marks={"audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]"},
    ids={"audio_token_id": "audio_token"},
    read_encoder=_voxtral_encoder,
    read_processor=_voxtral_processor,
)
AUDIO_FLAMINGO_3 = replace(
    VOXTRAL,
    whole_models={"qwen2": WholeModel("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", "qwen2")},
    marks={"audio_token": "<sound>"},
    read_encoder=_audio_flamingo_encoder,
    read_processor=_audio_flamingo_processor,
)
