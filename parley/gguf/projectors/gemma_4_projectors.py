"""The image and audio encoders of Gemma 4 in projector files."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import Projector, TensorLayout, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

GEMMA_4_SCALE = 3  # patches per embedding in rows and columns
COLOURS = 3
SOUND_OUTPUT = "a.pre_encode.out.weight"
GEMMA_4_MARKS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
}
GEMMA_4_IDS = {f"{name}_id": name for name in GEMMA_4_MARKS if name != "eoa_token"} | {"eoa_token_index": "eoa_token"}
VIDEO_TOKENS = 70  # of a frame, as published


def _gemma_4_encoder(file: ProjectorFile) -> dict[str, Any]:
    heads = file.head_count()
    head_dim = file.read_count("embedding_length") // heads
    keys, positions = file.tensor_shape("v.blk.0.attn_k.weight"), file.tensor_shape("v.position_embd.weight")
    kv_heads, remainder = divmod(keys[0], head_dim)
    if remainder:
        raise GgufError(
            f"{file.name} has v.blk.0.attn_k.weight of the shape {keys}; the first axis must be a multiple of "
            f"{head_dim}, the dimensions of a head"
        )
    if len(positions) != 3:
        raise GgufError(f"{file.name} has v.position_embd.weight of the shape {positions}; it must have 3 axes")
    return {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "patch_size": file.read_count("patch_size"),
            "pooling_kernel_size": file.read_count("projector.scale_factor", GEMMA_4_SCALE),
            "position_embedding_size": positions[1],
            "rms_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
            "use_clipped_linears": file.has_tensor("v.blk.0.attn_q.input_max"),
            "standardize": file.has_tensor("v.std_bias"),
        },
    }


def _gemma_4_processor(file: ProjectorFile) -> dict[str, Any]:
    sizes = {
        "patch_size": file.read_count("patch_size"),
        "pooling_kernel_size": file.read_count("projector.scale_factor", GEMMA_4_SCALE),
    }
    return {
        "processor_class": "Gemma4Processor",
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **sizes},
        "video_processor": {
            "video_processor_type": "Gemma4VideoProcessor",
            "max_soft_tokens": VIDEO_TOKENS,
            **sizes,
        },
    }


def _sound_config(file: ProjectorFile) -> dict[str, Any]:
    """Return the config of the audio encoder. Raises GgufError."""
    sound = ProjectorFile(file.model, "audio")
    return {
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": sound.read_count("embedding_length"),
            "num_hidden_layers": sound.block_count(),
            "num_attention_heads": sound.head_count(),
            "subsampling_conv_channels": [sound.tensor_shape(f"a.conv1d.{layer}.weight")[0] for layer in range(2)],
            "conv_kernel_size": sound.tensor_shape("a.blk.0.conv_dw.weight")[-1],
            "rms_norm_eps": sound.positive_number("attention.layer_norm_epsilon", 1e-6),
            "output_proj_dims": sound.tensor_shape(SOUND_OUTPUT)[0],
            "use_clipped_linears": sound.has_tensor("a.blk.0.attn_q.input_max"),
        }
    }


def _gemma_4_with_sound(file: ProjectorFile) -> dict[str, Any]:
    return _gemma_4_encoder(file) | _sound_config(file)


def gemma_4_variant(file: ProjectorFile) -> Projector | None:
    """Return the row of the small models, whose files have an audio encoder as well."""
    return GEMMA_4_WITH_SOUND if file.has_tensor(SOUND_OUTPUT) else None


def _unified_patch(file: ProjectorFile) -> tuple[int, int, int]:
    """Return the side of the square of pixels that an embedding is made of, that of a patch in it, and how many patches
    the square has in a row. Raises GgufError."""
    width = math.prod(file.tensor_shape("v.patch_embd.weight")[1:])
    side = math.isqrt(width // COLOURS)
    if not side or COLOURS * side**2 != width:
        raise GgufError(f"{file.name} has a v.patch_embd.weight of {width} inputs, which are no square of pixels")
    patch = file.read_count("patch_size")
    if patch == side and side % GEMMA_4_SCALE == 0:  # the file has that of the square
        patch = side // GEMMA_4_SCALE
    if side % patch:
        raise GgufError(f"{file.name} gives {file.prefix}patch_size as {patch}, which does not divide {side} pixels")
    return side, patch, side // patch


def _unified_order(file: ProjectorFile) -> list[int]:
    """Return the place in the file of each number of a square of pixels: files have a colour after the other."""
    side, _, _ = _unified_patch(file)
    return [
        (colour * side + row) * side + column
        for row in range(side)
        for column in range(side)
        for colour in range(COLOURS)
    ]


def _unified_encoder(file: ProjectorFile) -> dict[str, Any]:
    _, patch, scale = _unified_patch(file)
    positions = file.tensor_shape("v.position_embd.weight")
    if len(positions) != 3:
        raise GgufError(f"{file.name} has v.position_embd.weight of the shape {positions}; it must have 3 axes")
    return {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": patch,
            "pooling_kernel_size": scale,
            "mm_embed_dim": file.tensor_shape("v.patch_embd.weight")[0],
            "mm_posemb_size": positions[1],
            "output_proj_dims": file.tensor_shape("mm.input_projection.weight")[-1],
        },
        "audio_config": {
            "model_type": "gemma4_unified_audio",
            "audio_embed_dim": file.tensor_shape("mm.a.input_projection.weight")[-1],
        },
    }


def _unified_processor(file: ProjectorFile) -> dict[str, Any]:
    _, patch, scale = _unified_patch(file)
    sizes = {"patch_size": patch, "pooling_kernel_size": scale}
    samples = file.tensor_shape("mm.a.input_projection.weight")[-1]
    return {
        "processor_class": "Gemma4UnifiedProcessor",
        "feature_extractor": {
            "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
            "feature_size": samples,
            "audio_samples_per_token": samples,
        },
        "image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor", **sizes},
        "video_processor": {
            "video_processor_type": "Gemma4UnifiedVideoProcessor",
            "max_soft_tokens": VIDEO_TOKENS,
            **sizes,
        },
    }


def _gemma_4_text(config: dict[str, Any]) -> dict[str, Any]:
    """Set ``use_bidirectional_attention``: images see both ways in large models, which have no inputs of layers."""
    return {"use_bidirectional_attention": None if config.get("hidden_size_per_layer_input") else "vision"}


# Linear layers, whose inputs and outputs may have bounds
GEMMA_4_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _bounds_of(linears: dict[str, str]) -> dict[str, str]:
    """Return the names of the bounds of linear layers, by their names in files."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return {f"{stored}.{bound}": f"{name}.{bound}" for stored, name in linears.items() for bound in bounds}


GEMMA_4_BOUNDS = _bounds_of(GEMMA_4_LINEARS)
GEMMA_4 = Projector(
    {"gemma4_text": WholeModel("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text")},
    {
        "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
        "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
    "model.vision_tower.encoder.layers.",
    {
        **{stored: f"{name}.linear" for stored, name in GEMMA_4_LINEARS.items()},
        **GEMMA_4_BOUNDS,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    GEMMA_4_MARKS,
    GEMMA_4_IDS,
    _gemma_4_encoder,
    _gemma_4_processor,
    layouts={
        "v.patch_embd.weight": TensorLayout(2, (0, 2, 3, 1)),
        **dict.fromkeys(GEMMA_4_BOUNDS, TensorLayout(0)),
    },
    unread=("a.", "mm.a."),
    complete_text=_gemma_4_text,
    variant=gemma_4_variant,
)
# A conformer, with a half of an MLP before and after attention and the convolution
SOUND_LINEARS = {
    "ffn_up": "feed_forward1.ffw_layer_1",
    "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_up_1": "feed_forward2.ffw_layer_1",
    "ffn_down_1": "feed_forward2.ffw_layer_2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
}
SOUND_BOUNDS = _bounds_of(SOUND_LINEARS)
GEMMA_4_SOUND = replace(
    GEMMA_4,
    names={
        **{
            f"a.conv1d.{layer}{part}": f"model.audio_tower.subsample_conv_projection.layer{layer}{name}"
            for layer in range(2)
            for part, name in (("", ".conv"), (".norm", ".norm"))
        },
        "a.input_projection": "model.audio_tower.subsample_conv_projection.input_proj_linear",
        "a.pre_encode.out": "model.audio_tower.output_proj",
        "mm.a.input_projection": "model.embed_audio.embedding_projection",
    },
    blocks="model.audio_tower.layers.",
    block_names={
        **{stored: f"{name}.linear" for stored, name in SOUND_LINEARS.items()},
        **SOUND_BOUNDS,
        "ffn_norm": "feed_forward1.pre_layer_norm",
        "ffn_post_norm": "feed_forward1.post_layer_norm",
        "ffn_norm_1": "feed_forward2.pre_layer_norm",
        "ffn_post_norm_1": "feed_forward2.post_layer_norm",
        "attn_pre_norm": "norm_pre_attn",
        "attn_post_norm": "norm_post_attn",
        "attn_k_rel": "self_attn.relative_k_proj",
        "per_dim_scale.weight": "self_attn.per_dim_scale",
        "conv_norm": "lconv1d.pre_layer_norm",
        "conv_dw": "lconv1d.depthwise_conv1d",
        "norm_conv": "lconv1d.conv_norm",
        "ln2": "norm_out",
    },
    modality="audio",
    layouts={
        "conv_dw.weight": TensorLayout(3, (0, None, 1)),
        **dict.fromkeys(SOUND_BOUNDS, TensorLayout(0)),
    },
    softened=("per_dim_scale.weight",),
    unread=(),
    variant=lambda file: None,
)
GEMMA_4_WITH_SOUND = replace(
    GEMMA_4,
    read_encoder=_gemma_4_with_sound,
    unread=(),
    audio_encoder=GEMMA_4_SOUND,
    variant=lambda file: None,
)
# Gemma 4 12B, whose language model gets pixels and samples after a linear layer, without encoders
GEMMA_4_UNIFIED = replace(
    GEMMA_4,
    whole_models={
        "gemma4_text": WholeModel("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text")
    },
    names={
        "v.patch_embd": "model.vision_embedder.patch_dense",
        "v.patch_norm.1": "model.vision_embedder.patch_ln1",
        "v.patch_norm.2": "model.vision_embedder.patch_ln2",
        "v.patch_norm.3": "model.vision_embedder.pos_norm",
        "v.position_embd.weight": "model.vision_embedder.pos_embedding",
        "mm.input_projection": "model.embed_vision.embedding_projection",
        "mm.a.input_projection": "model.embed_audio.embedding_projection",
    },
    read_encoder=_unified_encoder,
    read_processor=_unified_processor,
    layouts={"v.patch_embd.weight": TensorLayout(2), "v.position_embd.weight": TensorLayout(3, (1, 0, 2))},
    ordered=dict.fromkeys(("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"), _unified_order),
    unread=(),
    variant=lambda file: None,
)
