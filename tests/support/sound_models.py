"""Tiny models that read sound alone, for ``multimodal_models.FAMILIES``."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.media_family_shape import TEXT, VISION, Family
from support.rope_grid_models import AUDIO

QWEN_AUDIO_MARKS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPEECH_ENCODER = VISION | {"num_mel_bins": 80}
VOXTRAL_ENCODER = SPEECH_ENCODER | {"intermediate_size": 128}  # of four frames, which are one embedding


def _qwen2_audio(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _qwen3_asr(tokenizer: Any) -> Any:
    from transformers import Qwen3ASRProcessor
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    return Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=80), tokenizer)


class VoxtralFiles:
    """The files of Voxtral's processor, and what Transformers makes of sound with mistral-common."""

    def __init__(self, extractor: Any, tokenizer: Any):
        self.feature_extractor, self.tokenizer = extractor, tokenizer

    def save_pretrained(self, folder: Path) -> None:
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(*args, **options)

    def __call__(self, text: list[str], audio: list[Any], **options: Any) -> dict[str, Any]:
        from transformers import VoxtralProcessor

        own_options = {
            name: value for name, value in VoxtralProcessor.audio_kwargs.items() if name != "max_source_positions"
        }
        features = VoxtralProcessor._retrieve_input_features(self, audio, 3000, **own_options)
        replacement = "[AUDIO]" * (375 * len(features))
        tokens = self.tokenizer([text[0].replace("[AUDIO]", replacement)], return_tensors="pt")
        offsets = [[{"replacement": replacement}]] if options.get("return_text_replacement_offsets") else None
        return {**tokens, "input_features": features, **({"text_replacement_offsets": offsets} if offsets else {})}


def _voxtral(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return VoxtralFiles(WhisperFeatureExtractor(feature_size=80), tokenizer)


class GraniteSpeechFiles:
    """The files of Granite Speech's processor, which Transformers loads with torchaudio only, and its tensors."""

    def __init__(self, tokenizer: Any, audio_token: str = "<|audio|>"):
        self.tokenizer, self.audio_token = tokenizer, audio_token

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        content = {"feature_extractor_type": "GraniteSpeechFeatureExtractor", "sampling_rate": 16000}
        (folder / "preprocessor_config.json").write_text(json.dumps(content))

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(*args, **options)

    def __call__(self, text: list[str], audio: list[Any], **options: Any) -> dict[str, Any]:
        from parley.model.media_input.granite_speech import GraniteSpeechProcessor

        folder = Path(self.tokenizer.name_or_path)
        own = GraniteSpeechProcessor(folder, self.tokenizer.convert_tokens_to_ids(self.audio_token))
        outputs = [
            own(
                text=text,
                audio=[clip],
                sampling_rate=16000,
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
            for clip in audio
        ]
        pieces = text[0].split(self.audio_token)
        whole = pieces[0]
        for piece, output in zip(pieces[1:], outputs, strict=True):
            whole += output["text_replacement_offsets"][0][0]["replacement"] + piece
        tensors = {"input_features": torch.cat([output["input_features"] for output in outputs])}
        if options.get("return_text_replacement_offsets"):
            tensors |= {"text_replacement_offsets": outputs[0]["text_replacement_offsets"]}
        return {**self.tokenizer([whole], return_tensors="pt"), **tensors}


def _whisper_speech(tokenizer: Any, *, name: str) -> Any:
    import transformers

    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    return getattr(transformers, f"{name}Processor")(extractor, tokenizer, audio_token=tokenizer.audio_token)


GRANITE_SPEECH = Family(
    {
        "text_config": TEXT | {"model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        "encoder_config": {
            "input_dim": 160,
            "num_layers": 4,
            "hidden_dim": 32,
            "num_heads": 2,
            "context_size": 10,
            "max_pos_emb": 16,
            "conv_kernel_size": 5,
        },
        "projector_config": VISION
        | {"model_type": "blip_2_qformer", "encoder_hidden_size": 32, "cross_attention_frequency": 1},
        "has_lora_adapter": False,
        "tie_word_embeddings": True,
    },
    {"audio_token": "<|audio|>"},
    {"audio": "<|audio|>"},
    GraniteSpeechFiles,
    {"audio_token_index": "audio_token"},
)
SOUND_MODELS: dict[str, Family] = {
    "qwen2_audio": Family(
        {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": AUDIO},
        QWEN_AUDIO_MARKS | {"audio_token": "<|AUDIO|>"},
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n"},
        _qwen2_audio,
        {"audio_token_id": "audio_token"},
        seed=0,
    ),
    "qwen3_asr": Family(
        {
            "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
            "audio_config": AUDIO | {"output_dim": 64, "downsample_hidden_size": 16},
        },
        QWEN_AUDIO_MARKS | {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
        {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        _qwen3_asr,
        {"audio_token_id": "audio_token"},
        seed=0,
    ),
    "voxtral": Family(
        {"text_config": TEXT | {"model_type": "llama", "head_dim": 16}, "audio_config": VOXTRAL_ENCODER},
        {"audio_token": "[AUDIO]", "audio_bos_token": "[BEGIN_AUDIO]"},
        {"audio": "[BEGIN_AUDIO][AUDIO]"},
        _voxtral,
        {"audio_token_id": "audio_token"},
    ),
    "glmasr": Family(
        {"text_config": TEXT | {"model_type": "llama"}, "audio_config": SPEECH_ENCODER | {"intermediate_size": 128}},
        {"audio_token": "<|pad|>", "audio_bos_token": "<|begin_of_audio|>", "audio_eos_token": "<|end_of_audio|>"},
        {"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"},
        functools.partial(_whisper_speech, name="GlmAsr"),
        {"audio_token_id": "audio_token"},
    ),
    "audioflamingo3": Family(
        {"text_config": TEXT | {"model_type": "qwen2"}, "audio_config": SPEECH_ENCODER},
        {"audio_token": "<sound>"},
        {"audio": "<sound>"},
        functools.partial(_whisper_speech, name="AudioFlamingo3"),
        {"audio_token_id": "audio_token"},
    ),
    "granite_speech": GRANITE_SPEECH,
    "granite_speech_plus": replace(
        GRANITE_SPEECH,
        config=GRANITE_SPEECH.config
        | {
            "encoder_config": GRANITE_SPEECH.config["encoder_config"] | {"cat_hidden_layers": [2]},
            "projector_config": GRANITE_SPEECH.config["projector_config"] | {"encoder_hidden_size": 64},
        },
    ),
}
