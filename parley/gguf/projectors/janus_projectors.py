"""Janus' image encoder in projector files. The part of the model that makes images is not in them."""

from __future__ import annotations

from typing import Any

from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

FIRST_LAYER = "mm.0.weight"
# Of the part that makes images, which is not built; the smallest that Transformers' config accepts
MAKER_SIZES = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 1}


def _projector_layers(file: ProjectorFile) -> int:
    """Return the number of layers between the encoder and the language model. Raises GgufError."""
    file.tensor_shape(FIRST_LAYER)
    return max(layer for layer in range(1, MAX_LAYERS + 1) if file.has_tensor(f"mm.{layer - 1}.weight"))


def _janus_encoder(file: ProjectorFile) -> dict[str, Any]:
    width = file.read_count("embedding_length")
    return {
        "vision_config": {
            "model_type": "janus_vision_model",
            "hidden_size": width,
            "mlp_ratio": file.read_count("feed_forward_length") / width,
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.read_count("image_size"),
            "patch_size": file.read_count("patch_size"),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
            "hidden_act": "silu" if file.model.metadata.get("clip.use_silu") is True else "gelu",
            "attention_bias": file.has_tensor("v.blk.0.attn_q.bias"),
            "projection_dim": file.tensor_shape(FIRST_LAYER)[0],
            "depth": _projector_layers(file),
            "num_image_tokens": file.embedding_side(1) ** 2,
        },
        "vq_config": MAKER_SIZES,
    }


def _janus_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("image_size")
    return {
        "processor_class": "JanusProcessor",
        "num_image_tokens": file.embedding_side(1) ** 2,
        "image_processor": {
            "image_processor_type": "JanusImageProcessor",
            "size": {"height": size, "width": size},
            **file.colour_scale(),
        },
    }


MAX_LAYERS = 8  # two, as published
JANUS = Projector(
    {"llama": WholeModel("janus", "JanusForConditionalGeneration", "llama")},
    {
        "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
        "v.position_embd": "model.vision_model.embeddings.position_embedding",
        "v.post_ln": "model.vision_model.post_layernorm",
        "mm.0": "model.aligner.fc1",
        **{f"mm.{layer}": f"model.aligner.hidden_layers.{layer - 1}" for layer in range(1, MAX_LAYERS)},
    },
    "model.vision_model.encoder.layers.",
    SIGLIP_BLOCK_NAMES | {"attn_out": "self_attn.projection_layer"},
    {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    {"image_token_id": "image_token"},
    _janus_encoder,
    _janus_processor,
)
