"""The image encoders of Qwen2-VL to Qwen3-VL and Qwen3.5 in projector files."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from functools import partial
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.projectors.projector import Projector, WholeModel
from parley.gguf.projectors.projector_file import ProjectorFile

FRAMES = 2  # frames of a patch; both are the same for an image
WINDOW_SIZE = 112  # pixels in rows and columns, in Qwen2.5-VL
MERGE_SIZE = 2  # patches per embedding in rows and columns
HEAD_PARTS = 4  # of heads: pairs of numbers that rotate by row, and by column
QWEN_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
# The fewest and the most pixels of an image, as published
QWEN2_PIXELS, QWEN3_PIXELS = (3136, 12845056), (65536, 16777216)
QWEN3_VIDEO_PIXELS = (4096, 25165824)


def _qwen_vision(file: ProjectorFile, **members: Any) -> dict[str, Any]:
    """Return the config of an encoder of Qwen's with members that the generations share."""
    merge = file.read_count("spatial_merge_size", MERGE_SIZE)
    config = {
        "depth": file.block_count(),
        "num_heads": file.head_count(HEAD_PARTS),
        "patch_size": file.read_count("patch_size"),
        "spatial_merge_size": merge,
        "temporal_patch_size": FRAMES,
    }
    return {"vision_config": config | members}


def _qwen_2_vision(file: ProjectorFile) -> dict[str, Any]:
    size = file.read_count("embedding_length")
    # Files give a wrong feed_forward_length, or 0, and the early ones give the two layers each other's names
    ratio, remainder = divmod(max(file.tensor_shape("v.blk.0.ffn_up.weight")), size)
    if remainder:
        raise GgufError(f"{file.name} has MLPs that are no multiple of {size} wide")
    return _qwen_vision(file, embed_dim=size, hidden_size=file.tensor_shape("mm.2.weight")[0], mlp_ratio=ratio)


def qwen_2_5_vision(file: ProjectorFile) -> dict[str, Any]:
    """Return the config of Qwen2.5-VL's encoder, as ``vision_config``. Raises GgufError."""
    depth, pattern = file.block_count(), file.read_count("n_wa_pattern")
    window = file.read_count("window_size", WINDOW_SIZE)
    cell = file.read_count("patch_size") * file.read_count("spatial_merge_size", MERGE_SIZE)
    if window < cell:
        raise GgufError(f"{file.name} gives clip.vision.window_size as {window}; it is {cell} pixels or more")
    return _qwen_vision(
        file,
        hidden_size=file.read_count("embedding_length"),
        intermediate_size=file.read_count("feed_forward_length"),
        out_hidden_size=file.tensor_shape("mm.2.weight")[0],
        window_size=window,
        fullatt_block_indexes=list(range(pattern - 1, depth, pattern)),
        tokens_per_second=2,
    )


def qwen_3_vision(file: ProjectorFile) -> dict[str, Any]:
    """Return the config of Qwen3-VL's encoder, as ``vision_config``. Raises GgufError."""
    return _qwen_vision(
        file,
        hidden_size=file.read_count("embedding_length"),
        intermediate_size=file.read_count("feed_forward_length"),
        out_hidden_size=file.tensor_shape("mm.2.weight")[0],
        num_position_embeddings=file.position_side() ** 2,
        deepstack_visual_indexes=deep_layers(file),
    )


def deep_layers(file: ProjectorFile) -> list[int]:
    """Return the blocks whose output the language model gets besides the last one's. Raises GgufError."""
    marked = file.read_field("is_deepstack_layers")
    if marked is None:
        return []
    blocks = file.read_count("block_count")
    if (
        not isinstance(marked, list)
        or len(marked) != blocks
        or not all(isinstance(is_deep, bool) for is_deep in marked)
    ):
        raise GgufError(
            f"{file.name} gives clip.vision.is_deepstack_layers as {reprlib.repr(marked)}; it is true or false "
            f"for each of {blocks} blocks"
        )
    return [layer for layer, is_deep in enumerate(marked) if is_deep]


def _exaone_vision(file: ProjectorFile) -> dict[str, Any]:
    """Return the config of EXAONE 4.5's encoder: Qwen2.5-VL's, whose query heads share those of keys. Raises
    GgufError."""
    heads, width = file.head_count(HEAD_PARTS), file.read_count("embedding_length")
    rows = file.tensor_shape("v.blk.0.attn_qkv.weight")[0]
    key_heads, remainder = divmod(rows - width, 2 * width // heads)
    if remainder or key_heads < 1 or heads % key_heads:
        raise GgufError(f"{file.name} has {rows} rows in v.blk.0.attn_qkv.weight, which {heads} heads cannot share")
    encoder = qwen_2_5_vision(file)
    del encoder["vision_config"]["tokens_per_second"]
    return {"vision_config": encoder["vision_config"] | {"num_key_value_heads": key_heads}}


def _qwen_processor(name: str, file: ProjectorFile) -> dict[str, Any]:
    is_third = name == "Qwen3VL"
    sizes = {
        "patch_size": file.read_count("patch_size"),
        "merge_size": file.read_count("spatial_merge_size", MERGE_SIZE),
        "temporal_patch_size": FRAMES,
        **file.colour_scale(),
    }
    pixels = file.read_pixel_limits(QWEN3_PIXELS if is_third else QWEN2_PIXELS)
    smallest, largest = QWEN3_VIDEO_PIXELS
    return {
        "processor_class": f"{name}Processor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": pixels, **sizes},
        "video_processor": {
            "video_processor_type": "Qwen3VLVideoProcessor" if is_third else "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": smallest, "longest_edge": largest} if is_third else pixels,
            **sizes,
        },
    }


QWEN_BLOCK_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
QWEN_2_VL = Projector(
    {"qwen2_vl_text": WholeModel("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text")},
    {
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.post_ln": "model.visual.merger.ln_q",
        "mm.0": "model.visual.merger.mlp.0",
        "mm.2": "model.visual.merger.mlp.2",
    },
    "model.visual.blocks.",
    QWEN_BLOCK_NAMES,
    QWEN_MARKS,
    {f"{mark}_id": mark for mark in QWEN_MARKS},
    _qwen_2_vision,
    partial(_qwen_processor, "Qwen2VL"),
)
QWEN_2_5_VL = replace(
    QWEN_2_VL,
    whole_models={"qwen2_vl_text": WholeModel("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text")},
    block_names=QWEN_BLOCK_NAMES | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
    read_encoder=qwen_2_5_vision,
    read_processor=partial(_qwen_processor, "Qwen2_5_VL"),
)
QWEN_3_VL = replace(
    QWEN_2_VL,
    whole_models={
        "qwen3_vl_text": WholeModel("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
        "qwen3_vl_moe_text": WholeModel("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
        "qwen3_5_text": WholeModel("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
        "qwen3_5_moe_text": WholeModel("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    },
    names={
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.position_embd": "model.visual.pos_embed",
        "v.post_ln": "model.visual.merger.norm",
        "mm.0": "model.visual.merger.linear_fc1",
        "mm.2": "model.visual.merger.linear_fc2",
    },
    block_names=QWEN_BLOCK_NAMES | {"attn_qkv": "attn.qkv", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    deep_names={
        "norm": "model.visual.deepstack_merger_list.{}.norm",
        "fc1": "model.visual.deepstack_merger_list.{}.linear_fc1",
        "fc2": "model.visual.deepstack_merger_list.{}.linear_fc2",
    },
    read_encoder=qwen_3_vision,
    read_processor=partial(_qwen_processor, "Qwen3VL"),
)
EXAONE_4_5 = replace(
    QWEN_2_5_VL,
    whole_models={"exaone4": WholeModel("exaone4_5", "Exaone4_5_ForConditionalGeneration", "exaone4")},
    block_names=QWEN_2_5_VL.block_names | {"attn_qkv": "attn.qkv"},
    read_encoder=_exaone_vision,
    read_processor=partial(_qwen_processor, "Exaone4_5_"),
)
