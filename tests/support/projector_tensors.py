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
    """Yield Gemma 4's encoders of images and sound."""
    for name, tensor in tensors.items():
        tensor = tensor[None] if tensor.ndim == 0 else tensor
        if "audio" in name:
            yield convert_conformer(name.replace("model.audio_tower.", "conformer.").replace(".linear.", "."), tensor)
            continue
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            yield name + ".weight", tensor
        elif name.endswith("patch_embedder.input_proj.weight"):
            yield name, patches_of_pixels(tensor)
        else:
            linear = name.replace("_proj.", "_proj.linear.") if "self_attn" in name else name
            yield linear, tensor


def convert_conformer(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the file's form of a tensor of Gemma 4's encoder of sound."""
    if name.endswith("per_dim_scale"):
        return name + ".weight", torch.nn.functional.softplus(tensor)
    return name, tensor.squeeze(1) if name.endswith("depthwise_conv1d.weight") else tensor


MINICPM_NAMES = {
    "layer_norm1": "ln1",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "pre_norm": "ds_ln",
    "linear_1": "ds_ffn_up",
    "linear_2": "ds_ffn_down",
}
MINICPM_MERGER = {"pre_norm": "mm.input_norm", "linear_1": "mm.up", "linear_2": "mm.down"}


def convert_minicpm(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield the encoder of MiniCPM-V 4.6, with the merger in it and the one after it."""
    for name, tensor in tensors.items():
        module, _, ending = name.rpartition(".")
        if ".vit_merger." in name:
            yield f"v.vit_merger.{MINICPM_NAMES[module.partition('.vit_merger.')[2]]}.{ending}", tensor
        elif name.startswith("model.merger."):
            yield f"{MINICPM_MERGER[module.removeprefix('model.merger.mlp.0.')]}.{ending}", tensor
        else:
            yield name.replace("model.vision_tower.", "vision_tower.vision_model."), tensor


UNIFIED_NAMES = {"patch_dense": "patch_embd", "patch_ln1": "patch_norm.1", "patch_ln2": "patch_norm.2"}


def convert_unified(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield the layers of Gemma 4 12B in place of encoders, whose inputs are one colour of a patch after the other."""
    for name, tensor in tensors.items():
        _, _, short = name.partition("vision_embedder.")
        part, _, ending = short.partition(".")
        if part == "pos_embedding":
            yield "v.position_embd.weight", tensor.transpose(0, 1)
        elif not short:
            yield name, tensor
        else:
            if part == "patch_ln1" or short == "patch_dense.weight":
                side = round((tensor.shape[-1] / 3) ** 0.5)
                tensor = tensor.unflatten(-1, (side, side, 3)).movedim(-1, -3).flatten(-3)
            yield f"v.{UNIFIED_NAMES.get(part, 'patch_norm.3')}.{ending}", tensor


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


def convert_granite(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Granite Speech's encoder, with batch norms computed, and keys and values of attention apart."""
    for name, tensor in tensors.items():
        if name.endswith("batch_norm.weight"):
            norm = name.removesuffix("weight")
            scale = tensor / (tensors[norm + "running_var"] + 1e-5).sqrt()
            yield name, scale
            yield norm + "bias", tensors[norm + "bias"] - tensors[norm + "running_mean"] * scale
        elif name.endswith("to_kv.weight"):
            for part, rows in zip("kv", tensor.chunk(2), strict=True):
                yield name.replace("to_kv", f"to_{part}"), rows
        elif name.endswith(("up_conv.weight", "down_conv.weight")):
            yield name, tensor.squeeze(2)
        elif name.endswith("depth_conv.conv.weight"):
            yield name, tensor.squeeze(1)
        elif ".batch_norm." not in name:
            yield name, tensor


def convert_janus(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Janus' encoder, and the layers after it by their place."""
    for name, tensor in tensors.items():
        module, _, ending = name.removeprefix("model.aligner.").rpartition(".")
        if not name.startswith("model.aligner."):
            yield name, tensor
        elif module == "fc1":
            yield f"mm.0.{ending}", tensor
        else:
            yield f"mm.{int(module.removeprefix('hidden_layers.')) + 1}.{ending}", tensor


QWEN_3_SOUND = {"multi_modal_projector.linear_": "mm.a.mlp.", "audio_tower.proj": "mm.a.mlp."}


def convert_qwen_3_sound(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield the encoder of sound of Qwen3-ASR and Qwen3-Omni, with the sinusoids of positions."""
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        for prefix, written in QWEN_3_SOUND.items():
            name = name.replace(prefix, written)
        is_bias = name.startswith("audio_tower.conv2d") and name.endswith(".bias")
        yield name, tensor[:, None, None] if is_bias else tensor
    yield "audio_tower.embed_positions.weight", torch.zeros(1500, config["audio_config"]["d_model"])


def convert_qwen_3_omni(config: dict[str, Any], tensors: Tensors) -> Named:
    """Yield Qwen3-Omni's encoders of images and sound."""
    deep, sound = config["vision_config"]["deepstack_visual_indexes"], {}
    parts = {"ln_q": "norm", "mlp.0": "fc1", "mlp.2": "fc2"}
    for name, tensor in tensors.items():
        module, _, ending = name.rpartition(".")
        if name.startswith("audio_tower."):
            sound[name] = tensor
        elif name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif name.startswith("visual.merger_list."):
            number, _, part = module.removeprefix("visual.merger_list.").partition(".")
            yield f"v.deepstack.{deep[int(number)]}.{parts[part]}.{ending}", tensor
        elif name.startswith("visual.merger."):
            written = {"ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2"}[module.removeprefix("visual.merger.")]
            yield f"{written}.{ending}", tensor
        else:
            yield name, tensor
    yield from convert_qwen_3_sound(config, sound)


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
    "minicpmv4_6": convert_minicpm,
    "minicpmv4_7": convert_minicpm,
    "gemma4_unified": convert_unified,
    "qwen3_asr": convert_qwen_3_sound,
    "qwen3_omni_moe_thinker": convert_qwen_3_omni,
    "granite_speech": convert_granite,
    "granite_speech_plus": convert_granite,
    "janus": convert_janus,
    "kimi_k25": convert_kimi,
    "qwen2_5_omni_thinker": convert_omni,
    "paddleocr_vl": convert_paddle,
    **dict.fromkeys(("qwen2_audio", "voxtral", "audioflamingo3"), convert_whisper),
}
