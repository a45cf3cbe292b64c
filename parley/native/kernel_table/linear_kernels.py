"""Linear layers, their adapters, and mixtures of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parley.native import kernel_choice
from parley.native.compiled_forms.compiled_int8 import CompiledRows
from parley.native.compiled_forms.compiled_lora import CompiledLora, CompiledLoraRows
from parley.native.experts import Experts, stack_experts
from parley.native.kernel_choice import form_for_rows, form_of_stacked, form_of_weight, packing_form
from parley.native.layer_shape import GateLimits, Routing
from parley.native.lowrank import LowRank
from parley.native.packed import PackedWeight
from parley.native.torch_forms import torch_experts, torch_int8, torch_lora
from parley.native.torch_forms.torch_grouped import GroupedWeight

QuantizedRows = torch_int8.TorchRows | CompiledRows
PackedLora = CompiledLora | torch_lora.TorchLora
LoraRows = CompiledLoraRows | torch_lora.TorchLoraRows


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack a weight [out, in], and its bias [out], for ``linear``."""
    result: PackedWeight = packing_form("pack_weight", weight.device, weight.dtype).pack_weight(weight, bias)
    return result


def pack_int8(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedWeight:
    """Pack a weight int8 [out, in] with scales float32 [out], for rows of ``dtype``."""
    result: PackedWeight = packing_form("pack_int8", values.device, dtype).pack_int8(values, scales, bias, dtype)
    return result


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """Pack a weight of 1 to 8 bits in groups, and its bias [out], for rows of ``dtype``."""
    result: PackedWeight = packing_form("pack_grouped", weight.values.device, dtype).pack_grouped(weight, bias, dtype)
    return result


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Quantize rows [T, width] to int8, with one scale per row."""
    result: QuantizedRows = form_for_rows("quantize_rows", x).quantize_rows(x)
    return result


def linear(x: torch.Tensor | QuantizedRows, packed: PackedWeight) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]."""
    result: torch.Tensor = form_of_weight("linear", packed).linear(x, packed)
    return result


def lm_head_logits(x: torch.Tensor | QuantizedRows, packed: PackedWeight) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, vocab]."""
    result: torch.Tensor = form_of_weight("lm_head_logits", packed).lm_head_logits(x, packed)
    return result


def pack_lora(sites: Sequence[Sequence[LowRank]], dtype: torch.dtype, device: torch.device) -> PackedLora:
    """Pack a LoRA adapter for rows of ``dtype``: ``sites`` holds its parts for each linear layer, by number."""
    kernels = kernel_choice.compiled_kernels() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return kernels.pack_lora(sites) if kernels else torch_lora.TorchLora(sites, dtype, device)


def group_lora_rows(groups: Sequence[tuple[Any, Sequence[int]]], device: torch.device) -> LoraRows:
    """Assign adapters to rows of a batch. Call ``add_lora`` of the result after each linear layer."""
    if groups and isinstance(groups[0][0], torch_lora.TorchLora):
        return torch_lora.TorchLoraRows(groups, device)
    kernels = kernel_choice.compiled_kernels()
    assert kernels is not None
    return kernels.group_lora_rows(groups)


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row of float32 ``logits`` [T, experts], best first, and their weights.

    Both are [T, chosen], int64 and float32. A shared expert has one more logit and weight in each row.
    """
    if routing.sqrt_softplus:
        return torch_experts.route(logits, bias, routing)
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("route", logits).route(logits, bias, routing)
    return result


def weigh_experts(logits: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the weights of the experts ``ids`` int64 [T, chosen], which scores did not choose, as ``route`` does."""
    return torch_experts.weigh_experts(logits, ids, routing)


def mix_experts(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    weighs_inputs: bool = False,
    limits: GateLimits | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' MLPs for rows x [T, hidden]: [T, hidden].

    ``ids`` and ``weights``: from ``route``. ``shared`` [T, hidden]: the outputs of the expert that computes all rows.
    ``weighs_inputs``: as in ``Routing``. ``limits``: of the gates and ups of the chosen experts.
    """
    result: torch.Tensor = form_of_stacked("mix_experts", experts.gate_up).mix_experts(
        x, experts, ids, weights, shared, activation, weighs_inputs=weighs_inputs, limits=limits
    )
    return result


def pack_heads(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight of each head [heads, out, in] for ``linear_heads``."""
    return stack_experts((pack_weight(expert_weight) for expert_weight in weight), len(weight))


def linear_heads(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """Return each head's rows times its own weight: x [T, heads, in] -> [T, heads, out]."""
    result: torch.Tensor = form_of_stacked("linear_heads", packed).linear_heads(x, packed)
    return result
