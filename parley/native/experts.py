"""The weights of a mixture of experts. Plain data; the kernels compute with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from parley.native import memory
from parley.native.compiled_forms.compiled_grouped import GroupedPacked
from parley.native.layer_shape import Norm
from parley.native.packed import PackedWeight
from parley.native.torch_forms.torch_kernels import TorchPacked
from parley.native.triton_forms.triton_packed import TritonGroupedPacked


@dataclass(frozen=True)
class Experts:
    """The MLPs of a mixture of ``count`` experts. Each tensor of a packed weight has the experts as its first
    dimension.

    ``is_gated``: as in ``LayerShape``; else ``gate_up`` has the outputs of up alone.
    """

    count: int
    gate_up: PackedWeight
    down: PackedWeight
    is_gated: bool = True


@dataclass(frozen=True)
class Mixture:
    """A router with its experts. ``router`` computes a logit for each expert, and one more if the weight of the shared
    expert is learned.

    ``bias`` float32 [experts] is added to scores for the choice only. ``router_norm``: the norm of the router's input,
    if that is not the input of the experts. ``scales`` float32 [experts] multiply the weights of chosen experts.
    ``latent_down`` makes the rows that chosen experts read of their usual input, and ``latent_up`` makes rows of the
    hidden size of their sum; None: they have the hidden size. ``table`` int64 [vocab, chosen]: the experts of each
    token, in place of a choice.
    """

    router: PackedWeight
    bias: torch.Tensor | None
    experts: Experts
    router_norm: Norm | None = None
    scales: torch.Tensor | None = None
    latent_down: PackedWeight | None = None
    latent_up: PackedWeight | None = None
    table: torch.Tensor | None = None


class Unstackable(ValueError):
    """The experts' weights cannot be stacked in their packed form, only as plain numbers."""


def stack_experts(packed: Iterator[PackedWeight], count: int) -> PackedWeight:
    """Stack the packed weights of ``count`` experts, one from each. Only one of them is in memory besides the result.

    Raises Unstackable if a weight needs a permutation of its rows' numbers, as each expert would have its own, or if
    experts have weights of different forms.
    """
    first = _stackable_weight(next(packed))
    if isinstance(first, GroupedPacked | TritonGroupedPacked) and first.order is not None:
        raise Unstackable("the weights of experts are quantized in an order of their own")
    names = [field.name for field in fields(first) if isinstance(getattr(first, field.name), torch.Tensor)]
    stacked = {}
    for name in names:
        tensor: torch.Tensor = getattr(first, name)
        destination = memory.map_tensor(count * tensor.numel(), tensor.dtype) if tensor.is_cpu else None
        shape = count, *tensor.shape
        stacked[name] = tensor.new_empty(shape) if destination is None else destination.view(shape)
    for expert in range(count):
        weight = first if expert == 0 else _stackable_weight(next(packed))
        if _shared_properties(weight, names) != _shared_properties(first, names):
            raise Unstackable("the weights of experts are quantized differently")
        for name in names:
            stacked[name][expert].copy_(getattr(weight, name))
    return _replace_tensors(first, stacked)


def _shared_properties(weight: PackedWeight, names: list[str]) -> list[object]:
    """Return the properties that the weights of all experts must share. ``names``: the fields with tensors."""
    shapes = [getattr(weight, name).shape for name in names]
    if isinstance(weight, GroupedPacked):
        return [type(weight), shapes, weight.code, weight.group, weight.parts]
    if isinstance(weight, TritonGroupedPacked):
        return [type(weight), shapes, weight.code, weight.group, weight.piece, weight.in_features]
    return [type(weight), shapes]


def _stackable_weight(weight: PackedWeight) -> PackedWeight:
    """Return a weight with tensors that can be stacked, which oneDNN's layout is not."""
    if isinstance(weight, TorchPacked) and weight.onednn:
        return replace(weight, weight=weight.weight.to_dense())
    return weight


def expert_of(stacked: PackedWeight, expert: int) -> PackedWeight:
    """Return the weight of one expert, a view."""
    tensors = {field.name: getattr(stacked, field.name) for field in fields(stacked)}
    return _replace_tensors(
        stacked, {name: tensor[expert] for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    )


def _replace_tensors(weight: Any, tensors: dict[str, torch.Tensor]) -> PackedWeight:
    """Return a packed weight with other tensors in these fields."""
    result: PackedWeight = replace(weight, **tensors)
    return result
