"""Tiny multimodal models with random weights and their processors, in the shapes of the families that people serve.

A folder of ``write_multimodal_model`` has all that a published one has: weights, tokenizer with the family's marks,
processor, and a chat template that puts a mark where a message has an image, video or clip.
"""

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

from support.further_media_models import FURTHER_MODELS
from support.gemma_media_models import GEMMA_MODELS
from support.image_models import IMAGE_MODELS
from support.media_family_shape import Family
from support.nemotron_models import NEMOTRON_MODELS
from support.ocr_models import OCR_MODELS
from support.recent_media_models import RECENT_MODELS
from support.rope_grid_models import MROPE, ROPE_GRID_MODELS
from support.sound_models import SOUND_MODELS, GraniteSpeechFiles, VoxtralFiles
from support.tile_models import TILE_MODELS
from support.tiny_models import models_home, write_random_model, write_tokenizer
from support.vision_chat_models import VISION_CHAT_MODELS

FAMILIES: dict[str, Family] = {
    **TILE_MODELS,
    **ROPE_GRID_MODELS,
    **GEMMA_MODELS,
    **SOUND_MODELS,
    **IMAGE_MODELS,
    **RECENT_MODELS,
    **OCR_MODELS,
    **VISION_CHAT_MODELS,
    **NEMOTRON_MODELS,
    **FURTHER_MODELS,
}
# Those with mechanisms that other families have as well are tested by night only.
BY_NIGHT = [
    "paligemma",
    "aria",
    "step3p7",
    "ernie4_5_vl_moe",
    "granite4_vision",
    "video_llava",
    *OCR_MODELS,
    *VISION_CHAT_MODELS,
]
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
SAMPLED_FAMILIES = {name: family for name, family in FAMILIES.items() if IS_NIGHT or name not in BY_NIGHT}


def load_processor(folder: Path) -> Any:
    """Return the processor in a model folder, as Transformers has it."""
    from transformers import AutoConfig, AutoFeatureExtractor, AutoProcessor, AutoTokenizer

    model_type = AutoConfig.from_pretrained(folder).model_type
    if model_type.startswith("granite_speech"):
        return GraniteSpeechFiles(AutoTokenizer.from_pretrained(folder))
    if model_type == "voxtral":
        return VoxtralFiles(AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    return AutoProcessor.from_pretrained(folder)


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
    if family == "minicpmv4_7":
        ids["newline_id"] = tokenizer("\n", add_special_tokens=False).input_ids[-1]
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
    if config.model_type == "nemotron_h_omni":
        _return_frames_as_tuple(model)
    if config.model_type == "mllama":
        _hide_images_from_earlier_text(model)
    return model.eval()


def _hide_images_from_earlier_text(model: Any) -> None:
    """Let text before the first image see none, as in Meta's own code (github.com/meta-llama/llama-models, models/
    llama3/multimodal/model.py, CrossAttention), where Transformers lets it attend to all of them."""
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            seen: dict[str, Any] = {}
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.update(mask=kwargs["full_text_row_masked_out_mask"]),
                with_kwargs=True,
            )
            layer.cross_attn.register_forward_hook(
                lambda _, args, output, seen=seen: (
                    (output[0] * seen["mask"][:, 0], output[1]) if seen["mask"] is not None else output
                )
            )


def _return_frames_as_tuple(model: Any) -> None:
    """Let a model's forward pass read videos: it expects a tuple of what its own encoder returns as one tensor."""
    encode = model.get_video_features

    @functools.wraps(encode)  # generation reads its signature
    def encode_video(*args: Any, **options: Any) -> Any:
        output = encode(*args, **options)
        output.pooler_output = tuple(output.pooler_output)
        return output

    model.get_video_features = encode_video


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
