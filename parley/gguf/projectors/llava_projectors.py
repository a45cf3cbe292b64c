"""LLaVA's image encoders in projector files (kind ``mlp``): of LLaVA 1.5 and 1.6, and models made as they are.

Most files are those of llama.cpp's first converter (convert_image_encoder_to_gguf.py). It leaves out the blocks after
the one whose output the language model gets, and the last norm of CLIP, which nothing needs.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import SIGLIP_BLOCK_NAMES, Filled, Projector, same_text
from parley.gguf.projectors.projector_file import ProjectorFile

LANGUAGE_MODELS = ("llama", "mistral", "phi3", "qwen2", "gemma")
PINPOINTS = "image_grid_pinpoints"
SELECTED = {"vision_feature_select_strategy": "default"}  # all but CLIP's token for the whole image
NEWLINE = "model.image_newline"


def _llava_encoder(file: ProjectorFile) -> dict[str, Any]:
    file.tensor_shape("v.class_embd")  # which encoders other than CLIP's lack
    layers = file.read_field("feature_layer")
    if layers is not None and layers != [file.read_count("block_count")]:
        raise GgufError(
            f"{file.name} gives {file.prefix}feature_layer as {reprlib.repr(layers)}; only the output of the last "
            "block is read"
        )
    return SELECTED | {
        "vision_feature_layer": -1,
        "multimodal_projector_bias": file.has_tensor("mm.0.bias"),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": file.read_count("embedding_length"),
            "intermediate_size": file.read_count("feed_forward_length"),
            "num_hidden_layers": file.block_count(),
            "num_attention_heads": file.head_count(),
            "image_size": file.read_count("image_size"),
            "patch_size": file.read_count("patch_size"),
            "layer_norm_eps": file.positive_number("attention.layer_norm_epsilon", 1e-5),
            "hidden_act": "gelu" if file.model.metadata.get("clip.use_gelu") is True else "quick_gelu",
        },
    }


def _llava_processor(file: ProjectorFile) -> dict[str, Any]:
    """Return the processor, which pads an image to a square, as the published config and llama.cpp do."""
    return _processor_config(file, "LlavaProcessor", "LlavaImageProcessor", do_pad=True)


def _last_norm(file: ProjectorFile) -> dict[str, Filled]:
    shape = (file.read_count("embedding_length"),)
    return {f"vision_tower.post_layernorm.{part}": Filled(shape) for part in ("weight", "bias")}


def _processor_config(file: ProjectorFile, name: str, image_name: str, **members: Any) -> dict[str, Any]:
    size = file.read_count("image_size")
    return SELECTED | {
        "processor_class": name,
        "patch_size": file.read_count("patch_size"),
        "num_additional_image_tokens": 1,
        "image_processor": {
            "image_processor_type": image_name,
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
            **file.colour_scale(),
            **members,
        },
    }


def _read_pinpoints(file: ProjectorFile) -> list[list[int]]:
    """Return the sizes (height, width) of images that are divided into tiles. Raises GgufError."""
    sides, tile = file.read_field(PINPOINTS), file.read_count("image_size")
    if (
        not isinstance(sides, list)
        or not sides
        or len(sides) % 2
        or not all(type(side) is int and side > 0 and side % tile == 0 for side in sides)
    ):
        raise GgufError(
            f"{file.name} gives {file.prefix}{PINPOINTS} as {reprlib.repr(sides)}; it is pairs of multiples of {tile}"
        )
    return [sides[index : index + 2] for index in range(0, len(sides), 2)]


def _llava_next_encoder(file: ProjectorFile) -> dict[str, Any]:
    return _llava_encoder(file) | {"image_grid_pinpoints": _read_pinpoints(file)}


def _llava_next_processor(file: ProjectorFile) -> dict[str, Any]:
    return _processor_config(
        file, "LlavaNextProcessor", "LlavaNextImageProcessor", image_grid_pinpoints=_read_pinpoints(file)
    )


def llava_variant(file: ProjectorFile) -> Projector | None:
    """Return the row of LLaVA 1.6 for files whose encoder reads large images as tiles."""
    return LLAVA_NEXT if file.has_tensor(NEWLINE) else None


LLAVA = Projector(
    same_text("llava", "LlavaForConditionalGeneration", *LANGUAGE_MODELS),
    {
        "v.class_embd": "vision_tower.embeddings.class_embedding",
        "v.patch_embd": "vision_tower.embeddings.patch_embedding",
        "v.position_embd": "vision_tower.embeddings.position_embedding",
        "v.pre_ln": "vision_tower.pre_layrnorm",
        "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    "vision_tower.encoder.layers.",
    SIGLIP_BLOCK_NAMES,
    {"image_token": "<image>"},
    {"image_token_index": "image_token"},
    _llava_encoder,
    _llava_processor,
    variant=llava_variant,
    filled=_last_norm,
    last_tensor="mm.2.weight",
)
LLAVA_NEXT = replace(
    LLAVA,
    whole_models=same_text("llava_next", "LlavaNextForConditionalGeneration", *LANGUAGE_MODELS),
    names=LLAVA.names | {NEWLINE: "image_newline"},
    read_encoder=_llava_next_encoder,
    read_processor=_llava_next_processor,
    variant=lambda file: None,
)
