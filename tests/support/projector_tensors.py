"""Puts the tensors of encoders in the layouts that llama.cpp's converter gives them, family by family.

Each function yields tensors by names that the gguf package knows, or by the file's own (``v.`` and ``mm.``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]
PIXTRALS = ("llava", "mistral3", "lighton_ocr")
INTERN_MLP = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def patches_of_pixels(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight of a layer that reads the pixels of a patch as that of a convolution."""
    side = round((weight.shape[1] / 3) ** 0.5)
    return weight.view(len(weight), side, side, 3).permute(0, 3, 1, 2)


def convert_pixtral(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Pixtral's encoder, whose queries and keys the converter reorders, and a row of the embedding."""
    heads = config["vision_config"]["num_attention_heads"]
    for name, tensor in tensors.items():
        name = name.replace("model.vision_encoder.", "vision_tower.")
        name = name.replace("model.vision_projection.", "multi_modal_projector.")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        yield name, tensor
    yield "v.token_embd.img_break", torch.ones(config["text_config"]["hidden_size"])


def convert_idefics(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield the encoder of Idefics3 as it is."""
    yield from tensors.items()


def convert_intern(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield InternVL's encoder by the names of Intern-S1."""
    for name, tensor in tensors.items():
        module, _, ending = name.removeprefix("multi_modal_projector.").rpartition(".")
        if name.startswith("multi_modal_projector."):
            yield f"{INTERN_MLP[module]}.{ending}", tensor
        else:
            is_bare = ".lambda_" in name or name.endswith("position_embeddings")
            yield f"model.{name}{'.weight' if is_bare else ''}", tensor


def convert_lfm(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield LFM2-VL's encoder without the head, which the published models do not have."""
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        if ".head." not in name:
            yield name, patches_of_pixels(tensor) if name.endswith("patch_embedding.weight") else tensor


def convert_llama(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Llama 4's encoder."""
    for name, tensor in tensors.items():
        if name.startswith("multi_modal_projector.linear_1."):
            yield "mm.model.fc.weight", tensor
        else:
            yield name + ".weight" * name.endswith("positional_embedding_vlm"), tensor


def convert_gemma(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Gemma 4's encoder of images. Its sound is not read, so one tensor stands for all."""
    yield "mm.a.fc.weight", torch.ones(4, 4)
    for name, tensor in tensors.items():
        if "audio" in name:
            continue
        tensor = tensor[None] if tensor.ndim == 0 else tensor
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            yield name + ".weight", tensor
        elif name.endswith("patch_embedder.input_proj.weight"):
            yield name, patches_of_pixels(tensor)
        else:
            linear = name.replace("_proj.", "_proj.linear.") if "self_attn" in name else name
            yield linear, tensor


def convert_whisper(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Whisper's encoder, whose biases of convolutions are columns."""
    for name, tensor in tensors.items():
        if name.startswith("audio_tower.conv") and name.endswith(".bias"):
            yield f"a.conv1d.{name[len('audio_tower.conv')]}.bias", tensor[:, None]
        else:
            yield f"{'audio.' * name.startswith('multi_modal_projector')}{name}", tensor


def convert_kimi(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Kimi K2.5's encoder, of whose queries and keys the converter puts the pairs of one axis first."""
    heads = config["vision_config"]["num_attention_heads"]
    for name, tensor in tensors.items():
        if ".wqkv." in name:
            queries, keys, values = tensor.chunk(3)
            parted = [
                part.unflatten(0, (heads, -1, 2, 2)).transpose(1, 2).reshape(part.shape) for part in (queries, keys)
            ]
            yield name, torch.cat((*parted, values))
        else:
            yield name.replace("proj.0.", "proj.linear_1.").replace("proj.2.", "proj.linear_2."), tensor


def convert_paddle(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield PaddleOCR-VL's encoder."""
    for name, tensor in tensors.items():
        yield name.replace("visual.vision_model.", "model.vision_model."), tensor


def convert_omni(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Qwen2.5-Omni's encoders of images and sound, with the sinusoids of positions, and without the tensor that
    nothing needs."""
    for name, tensor in tensors.items():
        if name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif name.startswith("visual.merger.mlp."):
            yield name.replace("visual.merger.mlp.", "mm."), tensor
        elif name.startswith("audio_tower.conv") and name.endswith(".bias"):
            yield f"a.conv1d.{name[len('audio_tower.conv')]}.bias", tensor[:, None]
        elif "audio_bos_eos_token" not in name:
            yield name, tensor
    yield "audio_tower.embed_positions.weight", torch.zeros(1500, config["audio_config"]["d_model"])


CONVERSIONS = {
    **dict.fromkeys(PIXTRALS, convert_pixtral),
    "idefics3": convert_idefics,
    "internvl": convert_intern,
    "lfm2_vl": convert_lfm,
    "llama4": convert_llama,
    "gemma4": convert_gemma,
    "kimi_k25": convert_kimi,
    "qwen2_5_omni_thinker": convert_omni,
    "paddleocr_vl": convert_paddle,
    **dict.fromkeys(("qwen2_audio", "voxtral", "audioflamingo3"), convert_whisper),
}
