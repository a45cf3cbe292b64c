"""The tensors of a projector file by their names in Hugging Face format."""

from __future__ import annotations

import re
from typing import NamedTuple

from parley.gguf.header import GgufError, GgufModel, GgufTensor
from parley.gguf.projectors.projector import Projector, TensorLayout
from parley.gguf.projectors.projector_file import BLOCK_TENSOR, ProjectorFile, block_key
from parley.gguf.projectors.qwen_projectors import deep_layers
from parley.gguf.projectors.table import open_projector

DEEP_TENSOR = re.compile(r"v\.deepstack\.(\d{1,5})\.(norm|fc1|fc2)\.(weight|bias)")
QUERY_TENSOR = re.compile(r"a\.proj_blk\.(\d{1,5})\.([a-z_]+)\.(weight|bias)")
PATCH_PARTS = ("v.patch_embd.weight", "v.patch_embd.weight.1")  # of an image's patch, and of the frame that follows
TURNED_TENSORS = ("attn_q", "attn_k")


class ProjectorTensor(NamedTuple):
    """A tensor in Hugging Face format.

    * ``parts``: those in the file that it consists of: one, or the two halves of patches (``is_patch``), or queries,
      keys and values.
    * ``offset``: the number that the file's numbers are larger by.
    * ``heads``: the number of heads, if rows are in llama.cpp's order of queries and keys; else 0.
    * ``parted_heads``: the same for queries, keys and values with parted axes.
    * ``layout``: the order of its numbers, if it is not that of the file.
    * ``shape``: its shape in that order.
    * ``is_softened``: softplus was applied to its numbers.
    * ``order``: where each number of the last axis lies in the file.
    """

    parts: tuple[GgufTensor, ...]
    is_patch: bool = False
    offset: float = 0.0
    heads: int = 0
    parted_heads: int = 0
    layout: TensorLayout | None = None
    shape: tuple[int, ...] = ()
    is_softened: bool = False
    order: tuple[int, ...] = ()


def projector_tensors(model: GgufModel) -> dict[str, ProjectorTensor]:
    """Return the tensors of a projector file by their names in Hugging Face format.

    Raises GgufError if the file has a type, a tensor or a shape that is not known here.
    """
    projector, file = open_projector(model)
    named = [(row, row_file, _named_parts(row, row_file)) for row, row_file in _file_rows(projector, model)]
    known_names = {name for _, _, parts in named for tensors in parts.values() for name in tensors}
    for name in model.tensors:
        if name not in known_names and not name.startswith(projector.unread):
            raise GgufError(f"{file.name} has the tensor {name[:100]}, which its kind does not have here")
    return {
        target: _join_parts(row, row_file, tensors)
        for row, row_file, parts in named
        for target, tensors in parts.items()
    }


def _file_rows(projector: Projector, model: GgufModel) -> list[tuple[Projector, ProjectorFile]]:
    """Return the rows of the encoders in a file, each with readers of its metadata."""
    rows = (row for row in (projector, projector.audio_encoder) if row is not None)
    return [(row, ProjectorFile(model, row.modality)) for row in rows]


def _named_parts(projector: Projector, file: ProjectorFile) -> dict[str, dict[str, GgufTensor]]:
    """Return the tensors of one encoder by their names in Hugging Face format, and those in the file."""
    deep_numbers, names, parts = deep_layers(file), projector.block_names, dict[str, dict[str, GgufTensor]]()
    if _has_swapped_layers(file.model) and file.modality == "vision":
        names = names | {"ffn_up": names["ffn_down"], "ffn_down": names["ffn_up"]}
    for tensor in file.model.tensors.values():
        if not tensor.name.startswith(projector.unread) and (
            target := _tensor_name(projector, names, tensor.name, deep_numbers)
        ):
            parts.setdefault(target, {})[tensor.name] = tensor
    return parts


def check_block_tensors(model: GgufModel) -> None:
    """Raise GgufError if a block of the encoder that is read lacks a tensor that another one has."""
    for _, file in _file_rows(open_projector(model)[0], model):
        _check_blocks_of(file)


def _check_blocks_of(file: ProjectorFile) -> None:
    letter = file.modality[0]
    blocks: dict[int, set[str]] = {}
    for name in file.model.tensors:
        if (match := BLOCK_TENSOR.fullmatch(name)) and match[1] == letter:
            blocks.setdefault(int(match[2]), set()).add(block_key(match))
    expected = set[str]().union(*blocks.values())
    for number in range(max(blocks, default=-1) + 1):
        for name in sorted(expected - blocks.get(number, set())):
            raise GgufError(f"{file.name} has no tensor {letter}.blk.{number}.{name}, which other blocks have")


def _join_parts(projector: Projector, file: ProjectorFile, tensors: dict[str, GgufTensor]) -> ProjectorTensor:
    """Return a tensor that consists of these, by their names. Raises GgufError for impossible shapes."""
    order = sorted(tensors, key=lambda name: ("qkv".find(name.partition(".attn_")[2][:1]), name))
    first = tensors[order[0]]
    is_patch = len(tensors) > 1 and PATCH_PARTS[0] in tensors
    offset = float(first.name in projector.norms)
    match = BLOCK_TENSOR.fullmatch(first.name)
    heads = file.head_count(2) if projector.has_permuted_heads and match and match[3] in TURNED_TENSORS else 0
    parted = file.head_count(4) if projector.has_split_axes and match and match[3] == "attn_qkv" else 0
    if first.shape[0] % (2 * heads or 12 * parted or 1):
        raise GgufError(
            f"{file.name} has {first.shape[0]} rows in {first.name}, which {heads or parted} heads cannot share"
        )
    key = block_key(match) if match else first.name
    layout, read_order = projector.layouts.get(key), projector.ordered.get(key)
    number_order = () if read_order is None else tuple(read_order(file))
    if number_order and len(number_order) != first.shape[-1]:
        shown_shape = list(first.shape)[:8]
        raise GgufError(
            f"{file.name} has the tensor {first.name} of the shape {shown_shape}; its last axis has {len(number_order)}"
        )
    shape = first.shape if layout is None else layout.shape_of(first.shape)
    if shape is None:
        shown_shape = list(first.shape)[:8]
        raise GgufError(
            f"{file.name} has the tensor {first.name} of the shape {shown_shape}, which its kind does not have"
        )
    return ProjectorTensor(
        tuple(tensors[name] for name in order),
        is_patch,
        offset,
        heads,
        parted,
        layout,
        shape,
        key in projector.softened,
        number_order,
    )


def _has_swapped_layers(model: GgufModel) -> bool:
    """Whether the two layers of MLPs have each other's names, as in files of early converters."""
    size = model.metadata.get("clip.vision.embedding_length")
    up, down = (model.tensors.get(f"v.blk.0.ffn_{name}.weight") for name in ("up", "down"))
    return up is not None and down is not None and up.shape[0] == size == down.shape[-1] != up.shape[-1]


def _tensor_name(projector: Projector, block_names: dict[str, str], name: str, deep_numbers: list[int]) -> str | None:
    """Return the name in Hugging Face format, None for an unknown one. ``deep_numbers``: the blocks with mergers."""
    stem, _, ending = name.rpartition(".")
    if name in projector.names:
        return projector.names[name]
    if name in PATCH_PARTS and "v.patch_embd" in projector.names:
        return projector.names["v.patch_embd"] + ".weight"
    if stem in projector.names and ending in ("weight", "bias"):
        return f"{projector.names[stem]}.{ending}"
    if (match := BLOCK_TENSOR.fullmatch(name)) and match[1] == projector.modality[0]:
        block = f"{projector.blocks}{int(match[2])}."
        if (suffix := block_key(match)) in block_names:
            return block + block_names[suffix]
        if match[3] in block_names and match[4] in ("weight", "bias"):
            return f"{block}{block_names[match[3]]}.{match[4]}"
    if (match := QUERY_TENSOR.fullmatch(name)) and match[2] in projector.query_block_names:
        return f"{projector.query_blocks}{int(match[1])}.{projector.query_block_names[match[2]]}.{match[3]}"
    match = DEEP_TENSOR.fullmatch(name)
    if match and int(match[1]) in deep_numbers and match[2] in projector.deep_names:
        return f"{projector.deep_names[match[2]].format(deep_numbers.index(int(match[1])))}.{match[3]}"
    return None
