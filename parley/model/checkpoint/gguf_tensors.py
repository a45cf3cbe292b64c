"""The tensors of a GGUF file by the names and in the layouts of Hugging Face format."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from parley.gguf.architecture import (
    LAYER_NUMBER,
    LAYER_TENSOR,
    Architecture,
    fields_of,
    read_layer_numbers,
    tensor_name,
    tensor_shape,
)
from parley.gguf.architectures import find_architecture
from parley.gguf.encoder_architectures import DENSE_FOLDERS, POSITIONS
from parley.gguf.gemma_architectures import STACKED_NAMES
from parley.gguf.header import GgufError, GgufModel, GgufTensor
from parley.gguf.model_config import model_config, used_tensors
from parley.gguf.projectors.projector_tensors import ProjectorTensor, projector_tensors
from parley.gguf.projectors.table import open_projector
from parley.model.checkpoint.tensor_entry import TensorEntry

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # others are blocks of bytes
# Queries, keys and values in one tensor
DOWN_EXPERTS = ".ffn_down_exps.weight"
PACKED_HEADS = re.compile(r"(blk\.\d+\.attn_)qkv(\.weight|\.bias)")
# Scales of whole weights or experts, beside those of NVFP4's blocks, and of the rows that a weight multiplies
OUTER_SCALE = re.compile(r"(.+)\.(scale|input_scale)")
# The two halves of DeepSeek's layer that makes keys and values of latents; files from 2025 on have them apart
SPLIT_LATENT_UP = re.compile(r"(blk\.\d+\.attn_)[kv]_b\.weight")


def read_gguf_entries(model: GgufModel) -> dict[str, TensorEntry]:
    """Return the tensors of the model by their names in Hugging Face format. Raises GgufError."""
    architecture, config = find_architecture(model), model_config(model)
    entries = _layer_number_entries(model, architecture, config["num_hidden_layers"])
    for tensor in used_tensors(model):
        if _is_outer_scale(model, tensor):
            continue
        if architecture.is_encoder or tensor.name.partition(".")[0] in DENSE_FOLDERS:
            entries[tensor_name(architecture, tensor.name)] = _make_encoder_entry(tensor, config)
            continue
        if split := SPLIT_LATENT_UP.fullmatch(tensor.name):
            whole = split[1] + "kv_b.weight"
            if whole not in model.tensors:  # some files have all three
                entries[tensor_name(architecture, whole)] = _join_latent_up(model, split[1])
            continue
        if architecture.has_packed_heads and (packed := PACKED_HEADS.fullmatch(tensor.name)):
            parts = _divide_heads(model, tensor, _make_entry(model, tensor, architecture, config), config)
            names = (tensor_name(architecture, f"{packed[1]}{letter}{packed[2]}") for letter in "qkv")
            entries |= zip(names, parts, strict=True)
            continue
        name, entry = tensor_name(architecture, tensor.name), _make_entry(model, tensor, architecture, config)
        entry = _apply_outer_scale(model, tensor, entry)
        is_stack = tensor.name.removesuffix(".weight") in STACKED_NAMES
        entries |= _divide_stack(name, entry) if is_stack else {name: entry}
    return entries


def _is_outer_scale(model: GgufModel, tensor: GgufTensor) -> bool:
    """Whether a tensor is a scale of a weight in NVFP4."""
    match = OUTER_SCALE.fullmatch(tensor.name)
    weight = model.tensors.get(f"{match[1]}.weight") if match else None
    return weight is not None and weight.blocks.name == "NVFP4"


def _apply_outer_scale(model: GgufModel, tensor: GgufTensor, entry: TensorEntry) -> TensorEntry:
    """Return the entry of a weight: in NVFP4 with a scale of the whole, its blocks become numbers. Raises GgufError."""
    scale = model.tensors.get(tensor.name.removesuffix(".weight") + ".scale")
    if entry.blocks is None or entry.blocks.name != "NVFP4" or scale is None:
        return entry
    if len(tensor.shape) != 2 or scale.shape != (1,):
        raise GgufError(f"{model.paths[0].name} has a scale for each expert of {tensor.name}, which is not read")
    plain = replace(entry, heads=0, rows=None, columns=None)
    return TensorEntry(
        entry.file,
        torch.float32,
        entry.shape,
        0,
        entry.end - entry.start,
        parts=(plain, _plain_entry(scale)),
        join=partial(_scale_numbers, entry),
    )


def _scale_numbers(entry: TensorEntry, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return entry.order_rows(numbers * scale)


def _layer_number_entries(model: GgufModel, architecture: Architecture, count: int) -> dict[str, TensorEntry]:
    """Return entries for the numbers of layers that the metadata have. Raises GgufError."""
    return {
        f"{architecture.layer_prefix}{layer}.{name}": TensorEntry(
            0, torch.float32, (), 0, 0, join=partial(torch.tensor, number)
        )
        for key, name in architecture.layer_numbers.items()
        for layer, number in enumerate(read_layer_numbers(model, key, count))
    }


def _divide_heads(
    model: GgufModel, tensor: GgufTensor, entry: TensorEntry, config: dict[str, Any]
) -> list[TensorEntry]:
    """Return queries, keys and values, which a tensor has one after the other. Raises GgufError."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    shared = _key_heads(model, tensor) or config.get("num_key_value_heads") or heads
    counts = [heads * head_dim, shared * head_dim, shared * (config.get("v_head_dim") or head_dim)]
    if sum(counts) != entry.shape[0]:
        raise GgufError(f"a tensor {tensor.name} has {entry.shape[0]} rows, but the heads have {sum(counts)}")
    size, start = (entry.end - entry.start) // entry.shape[0], entry.start
    firsts = accumulate(counts, initial=0)
    return [
        replace(entry, shape=(count, *entry.shape[1:]), start=start + first * size, end=start + (first + count) * size)
        for first, count in zip(firsts, counts, strict=False)
    ]


def _key_heads(model: GgufModel, tensor: GgufTensor) -> int:
    """Return the number of heads of keys in the layer of a tensor, 0 if the file does not list it by layer."""
    match, listed = LAYER_NUMBER.match(tensor.name), fields_of(model).get("attention.head_count_kv")
    if match is None or not isinstance(listed, list) or int(match[1]) >= len(listed):
        return 0
    count = listed[int(match[1])]
    return count if type(count) is int else 0


def _divide_stack(name: str, entry: TensorEntry) -> dict[str, TensorEntry]:
    """Return the linear layers that a tensor [count, out, in] holds. Raises GgufError."""
    if len(entry.shape) != 3:
        raise GgufError(f"a tensor {name} has the shape {list(entry.shape)}, but holds several weights")
    module, size = name.removesuffix(".weight"), (entry.end - entry.start) // entry.shape[0]
    starts = [entry.start + i * size for i in range(entry.shape[0])]
    return {
        f"{module}.{i}.weight": replace(entry, shape=entry.shape[1:], start=start, end=start + size)
        for i, start in enumerate(starts)
    }


def _make_encoder_entry(tensor: GgufTensor, config: dict[str, Any]) -> TensorEntry:
    """Return the entry of a tensor that computes in float32, so that its blocks become numbers."""
    entry = _plain_entry(tensor)
    if len(tensor.shape) == 3:
        is_down = tensor.name.endswith(DOWN_EXPERTS)
        experts, out, width = tensor.shape
        flat = (experts * width, out) if is_down else (experts * out, width)
        join = partial(_flatten_experts, is_down)
        return TensorEntry(tensor.file, torch.float32, flat, 0, tensor.end - tensor.start, parts=(entry,), join=join)
    skipped = config["max_position_embeddings"] - tensor.shape[0] if tensor.name == POSITIONS else 0
    if entry.blocks is None and not skipped:
        return entry
    shape = tensor.shape[0] + skipped, *tensor.shape[1:]
    size = tensor.end - tensor.start
    return TensorEntry(tensor.file, torch.float32, shape, 0, size, parts=(entry,), join=partial(_add_rows, skipped))


def _flatten_experts(is_down: bool, numbers: torch.Tensor) -> torch.Tensor:
    """Return the weights of an encoder's experts [experts, out, in] as one matrix, whose rows are inner numbers."""
    return (numbers.mT if is_down else numbers).flatten(0, 1)


def _add_rows(count: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return a tensor with rows of zeros before its own."""
    return torch.cat((numbers.new_zeros(count, *numbers.shape[1:]), numbers)) if count else numbers


def read_projector_entries(projector: GgufModel, file: int) -> dict[str, TensorEntry]:
    """Return the tensors of a projector file, which has number ``file``, by their names in Hugging Face format.

    Encoders are plain modules of Transformers, so blocks become numbers. Raises GgufError.
    """
    kind, header = open_projector(projector)
    entries = {name: _join_projector_parts(tensor, file) for name, tensor in projector_tensors(projector).items()}
    for name, (shape, value) in kind.filled(header).items():
        entries[name] = TensorEntry(file, torch.float32, shape, 0, 0, join=partial(torch.full, shape, value))
    return entries


def _join_projector_parts(tensor: ProjectorTensor, file: int) -> TensorEntry:
    parts = tuple(_plain_entry(part._replace(file=file)) for part in tensor.parts)
    first = parts[0]
    size = sum(part.end - part.start for part in parts)
    if len(parts) == 1:
        if first.blocks is None and tensor == ProjectorTensor(tensor.parts, shape=tensor.shape):
            return first
        return TensorEntry(file, torch.float32, tensor.shape, 0, size, parts=parts, join=partial(_lay_out, tensor))
    if tensor.is_patch:
        shape, join = (*first.shape[:2], len(parts), *first.shape[2:]), _stack_frames
    else:
        shape, join = (sum(part.shape[0] for part in parts), *first.shape[1:]), _join_rows
    if len({part.shape if tensor.is_patch else part.shape[1:] for part in parts}) > 1:
        raise GgufError(f"tensors {', '.join(part.name for part in tensor.parts)} do not fit each other")
    return TensorEntry(file, torch.float32, shape, 0, size, parts=parts, join=join)


def _lay_out(tensor: ProjectorTensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor with one part as they lie in Hugging Face format."""
    if tensor.heads:
        numbers = numbers.unflatten(0, (tensor.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    if tensor.parted_heads:  # of queries and keys; values come third
        parted = numbers.unflatten(0, (3, tensor.parted_heads, 2, -1, 2))
        numbers = torch.cat((parted[:2].transpose(2, 3).flatten(0, 4), parted[2].flatten(0, 3)))
    if tensor.layout is not None and tensor.layout.axes:
        numbers = numbers.permute(tensor.layout.stored_axes)
    if tensor.order:
        numbers = numbers[..., torch.tensor(tensor.order)]
    if tensor.is_softened:  # by softplus
        numbers = numbers.double().expm1().log().to(numbers.dtype)
    return numbers.reshape(tensor.shape) - tensor.offset


def _stack_frames(*frames: torch.Tensor) -> torch.Tensor:
    return torch.stack(frames, 2)


def _join_rows(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def tiled_order(config: dict[str, Any], size: int) -> torch.Tensor:
    """Return where each number of all value heads of a gated delta net lies in a file with tiled heads, int64.

    ``size``: the numbers of a head.
    """
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    order = torch.arange(heads).view(heads // keys, keys).T.flatten()
    return (order[:, None] * size + torch.arange(size)).flatten()


def _order_values(entry: TensorEntry, name: str, config: dict[str, Any]) -> TensorEntry:
    """Return the entry of a tensor of a gated delta net whose value heads are tiled; others as they are."""
    width = config["linear_value_head_dim"]
    if name == "ssm_out":
        return _order_inputs(entry, tiled_order(config, 1), width)
    if name in ("attn_qkv", "ssm_conv1d"):
        skipped = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]  # queries and keys
        rows = torch.cat((torch.arange(skipped), skipped + tiled_order(config, width)))
    elif name in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        rows = tiled_order(config, width if name == "attn_gate" else 1)
    else:
        return entry
    if len(rows) != entry.shape[0]:
        raise GgufError(f"a tensor {name} has {entry.shape[0]} rows, but the heads have {len(rows)}")
    return replace(entry, rows=rows)


def _order_inputs(entry: TensorEntry, heads: torch.Tensor, width: int) -> TensorEntry:
    """Return the entry of a weight with its inputs in the order of ``heads``, each of ``width`` inputs."""
    if len(entry.shape) != 2 or entry.shape[1] != len(heads) * width:
        raise GgufError(f"a tensor ssm_out has the shape {list(entry.shape)}, but the heads have {len(heads) * width}")
    if entry.blocks is None or width % entry.blocks.numbers == 0:
        return replace(entry, columns=heads)
    # Its blocks have numbers of several heads, so they cannot stay blocks
    order = partial(_order_columns, heads)
    return replace(entry, dtype=torch.float32, blocks=None, parts=(entry,), join=order)


def _order_columns(order: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(len(numbers), len(order), -1)[:, order].flatten(1)


def _make_entry(
    model: GgufModel, tensor: GgufTensor, architecture: Architecture, config: dict[str, Any]
) -> TensorEntry:
    dtype = DTYPES.get(tensor.blocks.name)
    is_norm = tensor.name.endswith("_norm.weight") and not tensor.name.endswith(".ssm_norm.weight")
    is_norm &= not (architecture.has_plain_last_norm and tensor.name == "output_norm.weight")
    entry = TensorEntry(
        tensor.file,
        dtype or torch.uint8,
        tensor_shape(tensor),
        tensor.start,
        tensor.end,
        None if dtype else tensor.blocks,
        _interleaved_heads(model, tensor, config) if architecture.interleaved else 0,
        restore=partial(_subtract_offset, architecture.norm_offset) if is_norm and architecture.norm_offset else None,
    )
    match = LAYER_TENSOR.fullmatch(tensor.name)
    if architecture.has_positive_rates and match and match[2] == "ssm_a":
        return replace(entry, restore=torch.neg)
    if architecture.has_parted_pairs and match and match[2] in ("attn_q", "attn_k"):
        return replace(entry, rows=_pair_rows(tensor, config))
    has_shares = architecture.has_tiled_values and config["linear_num_value_heads"] != config["linear_num_key_heads"]
    return _order_values(entry, match[2], config) if match and has_shares else entry


def _pair_rows(tensor: GgufTensor, config: dict[str, Any]) -> torch.Tensor:
    """Return where each row of queries or keys with pairs lies in a tensor with parted pairs, int64. Raises
    GgufError."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary_dim = round(head_dim * config.get("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise GgufError(f"{rotary_dim} of {head_dim} dimensions of a head cannot turn")
    if tensor.shape[0] % head_dim:
        raise GgufError(f"a tensor {tensor.name} has {tensor.shape[0]} rows, which heads of {head_dim} cannot share")
    order = torch.arange(head_dim)
    order[:rotary_dim] = torch.arange(rotary_dim).view(2, -1).T.flatten()
    return (torch.arange(0, tensor.shape[0], head_dim)[:, None] + order).flatten()


def _interleaved_heads(model: GgufModel, tensor: GgufTensor, config: dict[str, Any]) -> int:
    """Return the number of heads of queries or keys, 1 for the norms of a head, and 0 for other tensors."""
    match, heads = LAYER_TENSOR.fullmatch(tensor.name), config["num_attention_heads"]
    shared = _key_heads(model, tensor) or config.get("num_key_value_heads") or heads
    counts: dict[str, int] = {"attn_q": heads, "attn_k": shared, "attn_q_norm": 1, "attn_k_norm": 1}
    return counts.get(match[2], 0) if match else 0


def _subtract_offset(offset: float, numbers: torch.Tensor) -> torch.Tensor:
    return numbers - offset


def _join_latent_up(model: GgufModel, prefix: str) -> TensorEntry:
    """Return DeepSeek's kv_b_proj [heads * (keys + values), rank] of k_b [heads, rank, keys] and v_b [heads, values,
    rank]. Raises GgufError if one is missing or they do not belong together."""
    keys, values = (model.tensors.get(f"{prefix}{kind}_b.weight") for kind in "kv")
    if keys is None or values is None:
        raise GgufError(f"{model.paths[0].name} has only one of the tensors {prefix}k_b and {prefix}v_b")
    heads, rank = keys.shape[0], keys.shape[1] if len(keys.shape) == 3 else 0
    if len(values.shape) != 3 or (values.shape[0], values.shape[2]) != (heads, rank):
        shapes = f"{list(keys.shape)} and {list(values.shape)}"
        raise GgufError(f"{model.paths[0].name} has the tensors {prefix}k_b and {prefix}v_b of shapes {shapes}")
    shape = heads * (keys.shape[2] + values.shape[1]), rank
    size = keys.end - keys.start + values.end - values.start
    parts = tuple(_plain_entry(tensor) for tensor in (keys, values))
    return TensorEntry(keys.file, torch.float32, shape, 0, size, parts=parts, join=_join_heads)


def _plain_entry(tensor: GgufTensor) -> TensorEntry:
    dtype = DTYPES.get(tensor.blocks.name)
    blocks = None if dtype else tensor.blocks
    return TensorEntry(tensor.file, dtype or torch.uint8, tensor.shape, tensor.start, tensor.end, blocks)


def _join_heads(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat((keys.mT, values), 1).flatten(0, 1)
