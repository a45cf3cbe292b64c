"""Pixtral's image encoder in projector files: of Pixtral itself, Mistral Small 3.1 and later, and LightOnOCR."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.projectors.projector import Projector, WholeModel, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

PIXTRAL_MARKS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
LIGHT_ON_MARKS = {
    "image_token": "<|image_pad|>",
    "image_break_token": "<|vision_pad|>",
    "image_end_token": "<|vision_end|>",
}
SILU_KEY = "clip.use_silu"


def _pixtral_config(file: ProjectorFile) -> dict[str, Any]:
    heads = file.head_count()
    return {
        "model_type": "pixtral",
        "hidden_size": file.read_count("embedding_length"),
        "intermediate_size": file.read_count("feed_forward_length"),
        "num_hidden_layers": file.block_count(),
        "num_attention_heads": heads,
        "head_dim": file.read_count("embedding_length") // heads,
        "image_size": file.read_count("image_size"),
        "patch_size": file.read_count("patch_size"),
        "hidden_act": "silu" if file.model.metadata.get(SILU_KEY) is True else "gelu",
    }


def _pixtral_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "vision_config": _pixtral_config(file),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": file.has_tensor("mm.1.bias"),
    }


def _mistral_3_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {
        "vision_config": _pixtral_config(file),
        "vision_feature_layer": -1,
        "spatial_merge_size": file.read_count("spatial_merge_size"),
        "multimodal_projector_bias": file.has_tensor("mm.1.bias"),
    }


def _pixtral_processor(file: ProjectorFile) -> dict[str, Any]:
    patch, merge = file.read_count("patch_size"), file.read_count("spatial_merge_size", 1)
    return {
        "processor_class": "PixtralProcessor",
        "patch_size": patch,
        "spatial_merge_size": merge,
        "image_processor": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": file.read_count("image_size")},
            "patch_size": {"height": patch * merge, "width": patch * merge},
            **file.colour_scale(),
        },
    }


def _light_on_encoder(file: ProjectorFile) -> dict[str, Any]:
    return {"vision_config": _pixtral_config(file), "spatial_merge_size": file.read_count("spatial_merge_size")}


def _light_on_processor(file: ProjectorFile) -> dict[str, Any]:
    return _pixtral_processor(file) | {"processor_class": "LightOnOcrProcessor"}


def pixtral_variant(file: ProjectorFile) -> Projector | None:
    """Return the row of Mistral 3 for files that merge patches."""
    return MISTRAL_3 if file.has_tensor("mm.patch_merger.weight") else None


def _encoder_names(tower: str, projector: str) -> dict[str, str]:
    """Return the names of tensors, by the prefixes of the encoder and of what follows it."""
    return {
        "v.patch_embd": f"{tower}patch_conv",
        "v.pre_ln": f"{tower}ln_pre",
        "mm.input_norm": f"{projector}norm",
        "mm.patch_merger": f"{projector}patch_merger.merging_layer",
        "mm.1": f"{projector}linear_1",
        "mm.2": f"{projector}linear_2",
    }


PIXTRAL = Projector(
    same_text("llava", "LlavaForConditionalGeneration", "llama", "mistral"),
    _encoder_names("vision_tower.", "multi_modal_projector."),
    "vision_tower.transformer.layers.",
    {
        "ln1": "attention_norm",
        "ln2": "ffn_norm",
        "attn_q": "attention.q_proj",
        "attn_k": "attention.k_proj",
        "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    PIXTRAL_MARKS,
    {"image_token_index": "image_token"},
    _pixtral_encoder,
    _pixtral_processor,
    has_permuted_heads=True,
    unread=("v.token_embd.img_break",),  # a row of the language model's embedding
    variant=pixtral_variant,
)
MISTRAL_3 = replace(
    PIXTRAL,
    whole_models=same_text("mistral3", "Mistral3ForConditionalGeneration", "llama", "mistral", "ministral3"),
    read_encoder=_mistral_3_encoder,
)
LIGHT_ON_OCR = replace(
    PIXTRAL,
    whole_models={"qwen3": WholeModel("lighton_ocr", "LightOnOcrForConditionalGeneration", "qwen3")},
    names=_encoder_names("model.vision_encoder.", "model.vision_projection."),
    blocks="model.vision_encoder.transformer.layers.",
    marks=LIGHT_ON_MARKS,
    ids={"image_token_id": "image_token"},
    read_encoder=_light_on_encoder,
    read_processor=_light_on_processor,
    variant=lambda file: None,
)
