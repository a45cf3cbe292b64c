"""Tiny multimodal models with random weights and their processors, in the shapes of the families that people serve.

A folder of ``write_multimodal_model`` has all that a published one has: weights, tokenizer with the family's marks,
processor, and a chat template that puts a mark where a message has a picture, video or clip.
"""

import functools
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.media_family_shape import CLIP, GRID_PINPOINTS, LLAVA_SIZES, SIGLIP, TEXT, VISION, Family
from support.picture_models import PICTURE_MODELS
from support.recent_media_models import RECENT_MODELS
from support.tiny_models import GEMMA_3N, VOCAB, models_home, write_random_model, write_tokenizer

QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
QWEN2_5_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
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
IDEFICS_VISION = VISION | {"image_size": 32, "patch_size": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
INTERLEAVED_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
GATED_DELTA = {  # of Qwen3.5: one layer with attention, whose heads rotate by half
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": INTERLEAVED_MROPE["rope_parameters"] | {"partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4}
AUDIO = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 80}
QWEN_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_PARTS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
QWEN_AUDIO_MARKS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
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


def _qwen_vl(tokenizer: Any, *, name: str, patch_size: int) -> Any:
    import transformers

    cell = (2 * patch_size) ** 2  # pixels of one embedding
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": patch_size}
    video_class = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": patch_size}
    return getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, video_class(**video_sizes)
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


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=16)


def _gemma3n(tokenizer: Any) -> Any:
    from transformers import Gemma3nAudioFeatureExtractor, Gemma3nProcessor, SiglipImageProcessor

    clips = Gemma3nAudioFeatureExtractor(feature_size=32)
    pictures = SiglipImageProcessor(size={"height": 64, "width": 64})
    return Gemma3nProcessor(clips, pictures, tokenizer, audio_seq_length=12, image_seq_length=4)


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


def _internvl(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": 56, "width": 56}
    image = GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4)
    return InternVLProcessor(image, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=4)


def _mistral3(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    image = PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(image, tokenizer, patch_size=8, spatial_merge_size=2)


def _qwen2_audio(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _qwen3_asr(tokenizer: Any) -> Any:
    from transformers import Qwen3ASRProcessor
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    return Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=80), tokenizer)


def _qwen_omni(tokenizer: Any, *, name: str, patch_size: int) -> Any:
    import transformers

    cell = (2 * patch_size) ** 2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": patch_size}
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": patch_size}
    return getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes),
        transformers.Qwen2VLVideoProcessor(**video_sizes),
        transformers.WhisperFeatureExtractor(feature_size=80),
        tokenizer,
    )


def _glm_v(tokenizer: Any, *, name: str) -> Any:
    import transformers

    cell = 28**2  # pixels of one embedding
    sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": 14}
    return getattr(transformers, f"{name}Processor")(
        getattr(transformers, f"{name}ImageProcessor")(**sizes),
        tokenizer,
        getattr(transformers, f"{name}VideoProcessor")(**sizes),
    )


def _paddle_ocr(tokenizer: Any) -> Any:
    from transformers import PaddleOCRVLImageProcessor, PaddleOCRVLProcessor

    cell = 28**2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": 14}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessor(**sizes), tokenizer)


def _exaone4_5(tokenizer: Any) -> Any:
    import transformers

    cell = 28**2
    sizes = {"min_pixels": cell, "max_pixels": cell * 64, "patch_size": 14}
    video_sizes = {"size": {"shortest_edge": 2 * cell, "longest_edge": 2 * cell * 64}, "patch_size": 14}
    return transformers.Exaone4_5_Processor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, transformers.Qwen2VLVideoProcessor(**video_sizes)
    )


def _video_llama3(tokenizer: Any) -> Any:
    import transformers

    sizes = {"size": {"shortest_edge": 14**2, "longest_edge": 14**2 * 256}, "patch_size": 14}
    return transformers.VideoLlama3Processor(
        transformers.VideoLlama3ImageProcessor(**sizes), tokenizer, transformers.VideoLlama3VideoProcessor(**sizes)
    )


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


def load_processor(folder: Path) -> Any:
    """Return the processor in a model folder, as Transformers has it."""
    from transformers import AutoConfig, AutoFeatureExtractor, AutoProcessor, AutoTokenizer

    if AutoConfig.from_pretrained(folder).model_type == "voxtral":
        return VoxtralFiles(AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    return AutoProcessor.from_pretrained(folder)


def _voxtral(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return VoxtralFiles(WhisperFeatureExtractor(feature_size=80), tokenizer)


def _whisper_speech(tokenizer: Any, *, name: str) -> Any:
    import transformers

    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    return getattr(transformers, f"{name}Processor")(extractor, tokenizer, audio_token=tokenizer.audio_token)


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
    "position_embedding_size": 256,  # a picture of one row of tokens has 140 patches in a row
    "standardize": True,
}
QWEN_IDS = {f"{name}_id": name for name in QWEN_MARKS}
QWEN3_VL = Family(
    {"text_config": TEXT | INTERLEAVED_MROPE | {"head_dim": 16}, "vision_config": QWEN3_VISION},
    QWEN_MARKS,
    QWEN_PARTS,
    functools.partial(_qwen_vl, name="Qwen3VL", patch_size=16),
    QWEN_IDS,
)
FAMILIES: dict[str, Family] = {
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
    "qwen2_vl": Family(
        {"text_config": TEXT | MROPE, "vision_config": QWEN2_VISION},
        QWEN_MARKS,
        QWEN_PARTS,
        functools.partial(_qwen_vl, name="Qwen2VL", patch_size=14),
        QWEN_IDS,
    ),
    "qwen2_5_vl": Family(
        {"text_config": TEXT | MROPE, "vision_config": QWEN2_5_VISION},
        QWEN_MARKS,
        QWEN_PARTS,
        functools.partial(_qwen_vl, name="Qwen2_5_VL", patch_size=14),
        QWEN_IDS,
    ),
    "qwen3_vl": Family(
        QWEN3_VL.config | {"tie_word_embeddings": True}, QWEN_MARKS, QWEN_PARTS, QWEN3_VL.processor, QWEN_IDS
    ),
    "qwen3_vl_moe": Family(
        QWEN3_VL.config | {"text_config": QWEN3_VL.config["text_config"] | EXPERTS},
        QWEN_MARKS,
        QWEN_PARTS,
        QWEN3_VL.processor,
        QWEN_IDS,
    ),
    "qwen3_5": Family(
        {"text_config": TEXT | GATED_DELTA, "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": []}},
        QWEN_MARKS,
        QWEN_PARTS,
        QWEN3_VL.processor,
        QWEN_IDS,
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
    "gemma4_31b": Family(  # pictures see both ways, where layers have a window; no sound
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
        QWEN_AUDIO_MARKS,
        {"audio": "<|audio_bos|><|audio_pad|><|audio_eos|>"},
        _qwen3_asr,
        {"audio_token_id": "audio_token"},
        seed=0,
    ),
    **PICTURE_MODELS,
    **RECENT_MODELS,
}

OMNI_VISION = {name: value for name, value in QWEN2_5_VISION.items() if name != "tokens_per_second"}
OMNI_MARKS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
OMNI_PARTS = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
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
QWEN3_OMNI_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 56,
    "patch_size": 14,
}
GLM_MARKS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
GLM_PARTS = {
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
}
GLM_IDS = {f"{name}_id": name for name in GLM_MARKS}
GLM_TEXT = TEXT | {
    "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
}
GLM_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_routed_experts": 4}
SPEECH_ENCODER = VISION | {"num_mel_bins": 80}
VOXTRAL_ENCODER = SPEECH_ENCODER | {"intermediate_size": 128}  # of four frames, which are one embedding
FAMILIES |= {
    "qwen2_5_omni_thinker": Family(
        {
            "text_config": TEXT | MROPE,
            "vision_config": OMNI_VISION,
            "audio_config": AUDIO | {"output_dim": 64, "n_window": 20},
        },
        OMNI_MARKS,
        OMNI_PARTS,
        functools.partial(_qwen_omni, name="Qwen2_5Omni", patch_size=14),
        OMNI_IDS,
    ),
    "qwen3_omni_moe_thinker": Family(
        {
            "text_config": QWEN3_VL.config["text_config"] | EXPERTS,
            "vision_config": QWEN3_VISION,
            "audio_config": AUDIO | {"output_dim": 64, "downsample_hidden_size": 16},
        },
        QWEN3_OMNI_MARKS,
        QWEN_PARTS | {"audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
        functools.partial(_qwen_omni, name="Qwen3OmniMoe", patch_size=16),
        OMNI_IDS,
    ),
    "glm4v": Family(
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm4v"),
        GLM_IDS,
    ),
    "glm46v": Family(
        {
            "text_config": GLM_TEXT | {"model_type": "glm4v_text"},
            "vision_config": GLM_VISION | {"model_type": "glm4v_vision"},
        },
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm46V"),
        GLM_IDS,
    ),
    "glm4v_moe": Family(
        {"text_config": GLM_TEXT | GLM_MOE, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm4v"),
        GLM_IDS,
    ),
    "glm_ocr": Family(
        {"text_config": GLM_TEXT, "vision_config": GLM_VISION},
        GLM_MARKS,
        GLM_PARTS,
        functools.partial(_glm_v, name="Glm46V"),
        GLM_IDS,
    ),
    "paddleocr_vl": Family(
        {
            "text_config": TEXT | MROPE | {"head_dim": 16},
            "vision_config": VISION | {"image_size": 56, "patch_size": 14},
        },
        {"image_token": "<|IMAGE_PLACEHOLDER|>", "image_bos": "<|IMAGE_START|>", "image_eos": "<|IMAGE_END|>"},
        {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        _paddle_ocr,
    ),
    "exaone4_5": Family(
        {
            "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 33, "sliding_window_pattern": 2},
            "vision_config": {name: value for name, value in QWEN2_5_VISION.items() if name != "tokens_per_second"}
            | {"num_key_value_heads": 1},
        },
        QWEN_MARKS,
        QWEN_PARTS,
        _exaone4_5,
        QWEN_IDS,
    ),
    "video_llama_3": Family(
        {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": VISION | {"patch_size": 14}},
        QWEN_MARKS,
        {"image": "<|image_pad|>\n", "video": "<|video_pad|>\n"},
        _video_llama3,
        QWEN_IDS,
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
}

if find_spec("timm") is not None:  # Transformers builds the encoder of pictures with it
    FAMILIES["gemma3n"] = Family(
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


def write_multimodal_model(
    folder: Path,
    family: str,
    *,
    dtype: str = "float32",
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a model of one of FAMILIES and its processor into ``folder``.

    ``text`` and ``vision`` change the members of its configs.
    """
    from transformers import AutoConfig

    shape = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_marked_tokenizer(folder, shape)
    ids = {name: tokenizer.convert_tokens_to_ids(shape.marks[mark]) for name, mark in shape.ids.items()}
    changes = {"text_config": text, "vision_config": vision}
    changed = {name: shape.config[name] | members for name, members in changes.items() if members}
    if family == "ovis2":
        ids["visual_indicator_token_ids"] = tokenizer.convert_tokens_to_ids(list(shape.marks.values())[1:])
    members = {"model_type": family} | shape.config | changed
    for name in [name for name in ids if "." in name]:
        part, field = name.split(".")
        members[part] = members[part] | {field: ids.pop(name)}
    config = AutoConfig.for_model(**members, **ids)
    model = model_class(config).from_config(config)
    model.generation_config.eos_token_id = None
    write_random_model(folder, model, seed=shape.seed, dtype=dtype)
    _rename_tensors(folder, shape.renames)
    processor = shape.processor(tokenizer)
    processor.save_pretrained(folder)
    return folder


def model_class(config: Any) -> Any:
    """Return the Auto class of Transformers that has the whole model of a config."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    return AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else AutoModelForSeq2SeqLM


def load_whole_model(folder: Path, attention: str | dict[str, str] = "eager") -> Any:
    """Return the model in a folder as Transformers runs it, in float32."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model = model_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def write_whole_omni(folder: Path, thinker: str) -> Path:
    """Write a Qwen-Omni as it is published: a family's model as the thinker, and the embedding of one that speaks."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(multimodal_folder(thinker), folder)
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": thinker.removesuffix("_thinker"), "dtype": config["dtype"], "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["talker.model.embed_tokens.weight"] = torch.zeros(8, 4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _rename_tensors(folder: Path, renames: dict[str, str]) -> None:
    """Replace the beginnings of the names of tensors that are keys of ``renames``."""
    if not renames:
        return
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        for beginning, other in renames.items():
            if name.startswith(beginning):
                tensors[other + name.removeprefix(beginning)] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_model_for_vllm(folder: Path) -> Path:
    """Write a Qwen2-VL whose heads have a size that vLLM's kernels for CPUs know."""
    rope = MROPE["rope_parameters"] | {"mrope_section": [4, 6, 6]}
    text = {"hidden_size": 128, "head_dim": 32, "rope_parameters": rope}
    return write_multimodal_model(folder, "qwen2_vl", text=text, vision={"hidden_size": 128})


@functools.cache
def multimodal_folder(family: str, dtype: str = "float32") -> Path:
    """Return the folder of such a model, written once per test run. Tests must not change it: copy it first."""
    return write_multimodal_model(models_home() / f"{family}-{dtype}", family, dtype=dtype)


def _write_marked_tokenizer(folder: Path, shape: Family) -> Any:
    """Write a tokenizer with the marks of a family into ``folder``, and return it."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        extra_special_tokens=shape.marks,
        chat_template=_chat_template(shape.parts),
        **{name: settings[name] for name in ("bos_token", "eos_token", "pad_token", "model_max_length")},
    )
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in shape.tiles])
    return tokenizer


def _chat_template(parts: dict[str, str]) -> str:
    """Return a chat template like those of published models: contents are texts or lists of parts."""
    choices = "".join(
        f"{{%- elif part['type'] == '{kind}' -%}}{{{{- {json.dumps(mark)} -}}}}" for kind, mark in parts.items()
    )
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{- part['text'] -}}" + choices + "{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
