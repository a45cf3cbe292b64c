"""Writes multimodal model folders as two GGUF files: the language model, and its encoder of images or sound as
llama.cpp's converter does it (its class MmprojModel and those of families).

The names are those of the gguf package, so they do not come from the code that reads them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.clip_tensors import write_clip
from support.gguf_conversion import convert_folder
from support.gguf_hybrids import convert_hybrid
from support.projector_tensors import CONVERSIONS, PIXTRALS

# Prefixes of language models, by family
BODIES = ("language_model.model.", "model.language_model.", "model.text_model.", "model.")
HEADS = ("language_model.lm_head.", "lm_head.")
ENCODERS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.visual.",
    "visual.",
    "vision_model.",
    "audio_tower.",
    "model.vision_model.",
    "model.connector.",
    "model.vision_tower.",
    "model.vision_embedder.",
    "model.merger.",
    "model.aligner.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
    "model.vision_encoder.",
    "model.vision_projection.",
    "mm_projector.",
    "encoder.",
    "projector.",
    "mlp_AR.",
    "image_newline",
)
KINDS = {
    "gemma3": gguf.VisionProjectorType.GEMMA3,
    "qwen2_vl": gguf.VisionProjectorType.QWEN2VL,
    "qwen2_5_vl": gguf.VisionProjectorType.QWEN25VL,
    "qwen3_vl": gguf.VisionProjectorType.QWEN3VL,
    "qwen3_vl_moe": gguf.VisionProjectorType.QWEN3VL,
    "qwen3_5": gguf.VisionProjectorType.QWEN3VL,
    "gemma4": gguf.VisionProjectorType.GEMMA4V,
    "idefics3": gguf.VisionProjectorType.IDEFICS3,
    "internvl": gguf.VisionProjectorType.INTERNVL,
    "lfm2_vl": gguf.VisionProjectorType.LFM2,
    "lighton_ocr": gguf.VisionProjectorType.LIGHTONOCR,
    "llama4": gguf.VisionProjectorType.LLAMA4,
    "llava": gguf.VisionProjectorType.PIXTRAL,
    "mistral3": gguf.VisionProjectorType.PIXTRAL,
    "qwen2_audio": gguf.VisionProjectorType.QWEN2A,
    "voxtral": gguf.VisionProjectorType.VOXTRAL,
    "glm4v": gguf.VisionProjectorType.GLM4V,
    "glm4v_moe": gguf.VisionProjectorType.GLM4V,
    "glm_ocr": gguf.VisionProjectorType.GLM4V,
    "paddleocr_vl": gguf.VisionProjectorType.PADDLEOCR,
    "qwen2_5_omni_thinker": gguf.VisionProjectorType.QWEN25O,
    "kimi_k25": gguf.VisionProjectorType.KIMIK25,
    "audioflamingo3": gguf.VisionProjectorType.MUSIC_FLAMINGO,
    "janus": gguf.VisionProjectorType.JANUS_PRO,
}
KINDS |= dict.fromkeys(("granite_speech", "granite_speech_plus"), gguf.VisionProjectorType.GRANITE_SPEECH)
KINDS |= {name: name for name in ("minicpmv4_6", "minicpmv4_7", "exaone4_5")}  # which the package does not know yet
# Of families whose files name the kinds of both encoders, or only that of sound
MODAL_KINDS = {
    "gemma4": (gguf.VisionProjectorType.GEMMA4V, gguf.VisionProjectorType.GEMMA4A),
    "gemma4_unified": ("gemma4uv", "gemma4ua"),
    "qwen3_asr": (None, gguf.VisionProjectorType.QWEN3A),
    "qwen3_omni_moe_thinker": (gguf.VisionProjectorType.QWEN3VL, gguf.VisionProjectorType.QWEN3A),
}
# Types of language models that llama.cpp has no architectures of their own for
TEXT_TYPES = {"gemma4_unified_text": "gemma4_text", "qwen3_omni_moe_text": "qwen3_vl_moe_text"}
PLAIN_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")  # of language models that need no more than names
# Of Janus' part that makes images, which the converter leaves out
IMAGE_MAKERS = ("model.vqmodel.", "model.generation_")
ENDINGS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
# Qwen3-VL's merger has the names of Qwen2-VL's
MERGER = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
DEEP = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}


def is_encoder(name: str) -> bool:
    """Whether a tensor is one of an encoder, and not of the language model."""
    return name.startswith(ENCODERS)


def convert_multimodal(target: Path, folder: Path, kind: str = "F32", **options: bool) -> tuple[Path, Path]:
    """Write the files of a folder's model into ``target``: the language model's and the encoder's.

    ``kind``: the type of the encoder's linear weights where their shape allows it. ``options``: of ``write_projector``.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith(IMAGE_MAKERS)
    }
    encoder = {name: tensor for name, tensor in tensors.items() if is_encoder(name)}
    plain = write_language_model(target / "plain", folder, config, tensors.keys() - encoder.keys(), tensors)
    write = gguf_files.write_gguf if config["text_config"]["model_type"] in PLAIN_TYPES else convert_folder
    write = convert_hybrid if config["model_type"] == "llama4" else write
    model = write(target / "model.gguf", plain)
    shutil.rmtree(plain)
    if config.get("vision_config", {}).get("model_type") == "clip_vision_model":
        return model, write_clip(target / "mmproj-model.gguf", folder, encoder, **options)
    return model, write_projector(target / "mmproj-model.gguf", folder, config, encoder, kind, **options)


def write_language_model(
    path: Path, folder: Path, config: dict[str, Any], names: set[str], tensors: dict[str, torch.Tensor]
) -> Path:
    """Write the language model as a folder of its own, whose config has what is converted."""
    path.mkdir(parents=True)
    text = config["text_config"]
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    text["model_type"] = TEXT_TYPES.get(text["model_type"], text["model_type"])
    if config["model_type"] == "qwen3_asr":  # whose files have the architecture of Qwen3-VL
        text["model_type"] = "qwen3_vl_text"
        text["rope_parameters"] |= {"mrope_section": [4, 2, 2]}
    if text["model_type"] == "gemma3_text":
        text["rope_parameters"] = text["rope_parameters"]["full_attention"]
    (path / "config.json").write_text(json.dumps(text))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / name, path)
    renamed = {}
    for name in names:
        prefix = next(known_prefix for known_prefix in (*BODIES, *HEADS) if name.startswith(known_prefix))
        renamed[("lm_head." if prefix in HEADS else "model.") + name.removeprefix(prefix)] = tensors[name]
    save_file(renamed, path / "model.safetensors")
    return path


def write_projector(
    path: Path,
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: str,
    *,
    swaps_layers: bool = False,
) -> Path:
    """Write the encoder of images or sound. ``swaps_layers``: those of MLPs have each other's names."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    family = config["model_type"]
    if family in MODAL_KINDS:
        of_images, of_sound = MODAL_KINDS[family]
        if of_images:
            writer.add_clip_vision_projector_type(of_images)
        if config.get("audio_config"):
            writer.add_clip_audio_projector_type(of_sound)
    else:
        writer.add_clip_projector_type(KINDS[family])
    if "vision_config" in config:
        add_vision(writer, folder, config)
    if config.get("audio_config") and family != "gemma4_unified":
        add_sound(writer, config)
    if family.startswith("granite_speech"):
        add_conformer(writer, config)
    blocks = max(8, config.get("vision_config", {}).get("depth", 0))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, blocks)
    for name, tensor in convert_tensors(config, tensors):
        is_whole = name.startswith(("v.", "mm.")) or name in ("a.conv1d.1.bias", "a.conv1d.2.bias")
        written = name if is_whole else names.get_name(name, ENDINGS)
        assert written is not None, name
        if swaps_layers and ".ffn_" in written:
            written = written.replace("up", "down") if "up" in written else written.replace("down", "up")
        plain = tensor.ndim > 2 or "position_embd" in written
        gguf_files.add_tensor(writer, written, tensor.float().contiguous().numpy(), "F32" if plain else kind)
    gguf_files.close_writer(writer)
    return path


def add_sound(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of an encoder of sound, which Whisper's config names otherwise than others."""
    sound = config["audio_config"]
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(config["text_config"]["hidden_size"])
    writer.add_audio_embedding_length(sound.get("hidden_size") or sound["d_model"])
    width = sound.get("intermediate_size") or sound.get("encoder_ffn_dim") or 4 * sound["hidden_size"]
    writer.add_audio_feed_forward_length(width)
    writer.add_audio_block_count(sound.get("num_hidden_layers") or sound["encoder_layers"])
    writer.add_audio_head_count(sound.get("num_attention_heads") or sound["encoder_attention_heads"])
    writer.add_audio_num_mel_bins(sound.get("num_mel_bins", 128))
    writer.add_audio_attention_layernorm_eps(sound.get("rms_norm_eps", 1e-5))


def add_conformer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of Granite Speech's encoder."""
    sound = config["encoder_config"]
    writer.add_clip_has_audio_encoder(True)
    writer.add_audio_projection_dim(config["text_config"]["hidden_size"])
    writer.add_audio_embedding_length(sound["hidden_dim"])
    writer.add_audio_feed_forward_length(sound["hidden_dim"] * sound["feedforward_mult"])
    writer.add_audio_block_count(sound["num_layers"])
    writer.add_audio_head_count(sound["num_heads"])
    writer.add_audio_num_mel_bins(sound["input_dim"])
    writer.add_audio_attention_layernorm_eps(1e-5)
    writer.add_audio_chunk_size(sound["context_size"])
    writer.add_audio_conv_kernel_size(sound["conv_kernel_size"])
    writer.add_audio_max_pos_emb(sound["max_pos_emb"])
    writer.add_audio_projector_window_size(config["window_size"])
    writer.add_audio_projector_downsample_rate(config["downsample_rate"])
    writer.add_audio_projector_head_count(config["projector_config"]["num_attention_heads"])
    if sound.get("cat_hidden_layers"):
        writer.add_array("clip.audio.feature_layer", sound["cat_hidden_layers"])


def add_vision(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Add the sizes of an encoder of images."""
    vision, family = config["vision_config"], config["model_type"]
    image = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    sizes = vision.get("image_size", 560), vision["patch_size"]
    size, patch = (sides[0] if isinstance(sides, list) else sides for sides in sizes)
    if family.startswith("minicpm"):
        size = image["scale_resolution"]  # of slices; the positions show the encoder's own
        writer.add_array("clip.vision.wa_layer_indexes", [config["insert_layer_id"]])
        writer.add_uint32("clip.vision.max_slice_nums", image["max_slice_nums"])
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(size)
    writer.add_vision_patch_size(patch)
    if family == "gemma4_unified":
        return
    writer.add_vision_embedding_length(vision.get("embed_dim") or vision["hidden_size"])
    # Of Qwen2-VL the converter writes the size of the language model here
    width = round(vision["hidden_size"] * vision["mlp_ratio"]) if family == "janus" else vision["hidden_size"]
    writer.add_vision_feed_forward_length(vision.get("intermediate_size", width))
    writer.add_vision_block_count(vision.get("num_hidden_layers") or vision["depth"])
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    writer.add_vision_image_mean(image["image_mean"])
    writer.add_vision_image_std(image["image_std"])
    names = ("layer_norm_eps", "norm_eps", "rms_norm_eps")
    eps = next((vision[name] for name in names if name in vision), config.get("projection_layer_norm_eps", 1e-6))
    writer.add_vision_attention_layernorm_eps(eps)
    if family == "gemma3":
        writer.add_vision_projector_scale_factor(round(size // patch / config["mm_tokens_per_image"] ** 0.5))
    elif family.startswith(("qwen", "exaone")):
        add_qwen(writer, vision, image)
    elif family.startswith(("glm", "paddle")):
        writer.add_uint32(gguf.Keys.ClipVision.IMAGE_MIN_PIXELS, image["size"]["shortest_edge"])
        writer.add_uint32(gguf.Keys.ClipVision.IMAGE_MAX_PIXELS, image["size"]["longest_edge"])
    elif family == "janus":
        writer.add_vision_use_gelu(True)
    elif family in PIXTRALS:
        writer.add_vision_use_gelu(True)
        if "spatial_merge_size" in config:
            writer.add_vision_spatial_merge_size(config["spatial_merge_size"])
    else:
        writer.add_vision_projector_scale_factor(patches_per_embedding(config))
    if family == "idefics3":
        writer.add_vision_preproc_image_size(image["size"]["longest_edge"])
    elif family == "internvl":
        writer.add_vision_preproc_max_tiles(image["max_patches"])


def patches_per_embedding(config: dict[str, Any]) -> int:
    """Return how many patches an embedding has in rows and columns."""
    vision = config["vision_config"]
    counts = (
        vision.get("merge_kernel_size", [None])[0],
        config.get("scale_factor"),
        config.get("downsample_factor"),
        vision.get("pooling_kernel_size"),
    )
    if config["model_type"].startswith("minicpm"):
        return 4
    ratio = config.get("downsample_ratio") or vision.get("pixel_shuffle_ratio")
    return next(filter(None, counts), None) or round(1 / ratio)


def add_qwen(writer: gguf.GGUFWriter, vision: dict[str, Any], image: dict[str, Any]) -> None:
    """Add what encoders of Qwen have of their own, and the sizes of images, which are not the published ones."""
    writer.add_uint32(gguf.Keys.ClipVision.IMAGE_MIN_PIXELS, image["size"]["shortest_edge"])
    writer.add_uint32(gguf.Keys.ClipVision.IMAGE_MAX_PIXELS, image["size"]["longest_edge"])
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    if "fullatt_block_indexes" in vision:
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_uint32(gguf.Keys.ClipVision.WINDOW_SIZE, vision["window_size"])
    if "deepstack_visual_indexes" in vision:
        deep = vision["deepstack_visual_indexes"]
        writer.add_vision_is_deepstack_layers([layer in deep for layer in range(vision["depth"])])


def convert_tensors(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the encoder's tensors in the layouts of files, by names that the gguf package knows, or by their own."""
    convert = CONVERSIONS.get(config["model_type"])
    if convert is not None:
        yield from convert(config, tensors)
        return
    deep = config["vision_config"].get("deepstack_visual_indexes", [])
    keeps_qkv = config["model_type"].startswith(("qwen3", "glm", "exaone"))
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if ".head." in name:  # which Gemma does not use
            continue
        if name.startswith("vision_tower."):
            yield name.replace("vision_tower.", "vision_tower.vision_model."), tensor
        elif name.endswith("soft_emb_norm.weight"):
            yield name, tensor + 1
        elif name.startswith("multi_modal_projector."):
            yield name.replace("_weight", ".weight"), tensor
        elif name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif ".qkv." in name and not keeps_qkv:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                yield name.replace("qkv", part), rows
        elif match := re.fullmatch(r"visual\.merger\.mlp\.(.+)", name):  # the package counts blocks, and not these
            yield f"mm.{match[1]}", tensor
        elif match := re.fullmatch(r"visual\.merger\.(linear_fc\d|norm)\.(\w+)", name):
            yield f"{MERGER[match[1]]}.{match[2]}", tensor
        elif match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(\w+)\.(\w+)", name):
            yield f"v.deepstack.{deep[int(match[1])]}.{DEEP[match[2]]}.{match[3]}", tensor
        else:
            yield name, tensor
