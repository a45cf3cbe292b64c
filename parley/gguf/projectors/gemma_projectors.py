"""The image encoders of Gemma 3 and 4 in projector files."""

from __future__ import annotations

from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Projector, TensorLayout, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

GEMMA_3_SCALE, GEMMA_4_SCALE = 4, 3  # patches per embedding in rows and columns
GEMMA_3_MARKS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA_4_MARKS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
    "video_token": "<|video|>",
}
VIDEO_TOKENS = 70  # of a frame, as published


def _gemma_3_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "mm_tokens_per_image": file.embedding_side(GEMMA_3_SCALE) ** 2,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.read_count("image_size"),
            "patch_size": file.read_count("patch_size"),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-6),
            "vision_use_head": False,
        },
    }


def _gemma_3_processor(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("image_size")
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": size, "width": size}}
    return {
        "processor_class": "Gemma3Processor",
        "image_seq_length": file.embedding_side(GEMMA_3_SCALE) ** 2,
        "image_processor": image | file.colour_scale(),
    }


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


def _gemma_4_text(config: dict[str, Any]) -> dict[str, Any]:
    """Set ``use_bidirectional_attention``: images see both ways in large models, which have no inputs of layers."""
    return {"use_bidirectional_attention": None if config.get("hidden_size_per_layer_input") else "vision"}


GEMMA_3 = Projector(
    {"gemma3_text": WholeModel("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text")},
    {
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.post_ln": "vision_tower.post_layernorm",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    "vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    GEMMA_3_MARKS,
    {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
    _gemma_3_encoder,
    _gemma_3_processor,
    norms=("mm.soft_emb_norm.weight",),
)
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
GEMMA_4_BOUNDS = {
    f"{stored}.{bound}": f"{name}.{bound}"
    for stored, name in GEMMA_4_LINEARS.items()
    for bound in ("input_min", "input_max", "output_min", "output_max")
}
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
    {f"{name}_id": name for name in GEMMA_4_MARKS},
    _gemma_4_encoder,
    _gemma_4_processor,
    layouts={
        "v.patch_embd.weight": TensorLayout(2, (0, 2, 3, 1)),
        **dict.fromkeys(GEMMA_4_BOUNDS, TensorLayout(0)),
    },
    unread=("a.", "mm.a."),  # audio of the small models
    complete_text=_gemma_4_text,
)
