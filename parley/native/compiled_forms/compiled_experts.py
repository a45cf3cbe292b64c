"""Calls ``router.cpp`` and ``experts.cpp``: mixtures of experts on bfloat16 rows."""

from __future__ import annotations

import ctypes

import torch

from parley.native.compiled_forms.weight_struct import LinearStruct, address_of, linear_struct
from parley.native.experts import Experts, Mixture
from parley.native.layer_shape import ACTIVATIONS, GateLimits, Routing

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
EXPERTS_SIGNATURES = {
    "route": [P, P, P, P, P, N, N],
    "experts_workspace": [P, N, N],
    "experts": [P, P, P, P, P, P, N, N, P, N],
}
EXPERTS_RETURN_INT64 = ("experts_workspace",)  # functions that return an int64


class RoutingStruct(ctypes.Structure):
    """``Routing`` of ``experts.h``, with the first fields of ``layer_shape.Routing``. The kernels do not know the
    others."""

    _fields_ = [
        *((name, N) for name in ("experts", "experts_per_token", "groups", "chosen_groups", "group_best")),
        *((name, N) for name in ("sigmoid", "normalized", "shared", "weighs_inputs", "chooses_by_logits")),
        *((name, R) for name in ("scale", "margin")),
    ]


class ExpertsStruct(ctypes.Structure):
    """``Experts`` of ``experts.h``."""

    _fields_ = [
        *((name, N) for name in ("count", "activation", "is_gated", "weighs_inputs")),
        *((name, R) for name in ("gate_limit", "up_limit")),
        *((name, LinearStruct) for name in ("gate_up", "down")),
    ]


class MixtureStruct(ctypes.Structure):
    """``Mixture`` of ``experts.h``."""

    _fields_ = [("routing", RoutingStruct), ("bias", P), ("router", LinearStruct), ("experts", ExpertsStruct)]


def routing_struct(routing: Routing) -> RoutingStruct:
    """Describe the rule of a router."""
    return RoutingStruct(*(getattr(routing, name) for name, *_ in RoutingStruct._fields_))


def experts_struct(
    experts: Experts, activation: str, *, weighs_inputs: bool, limits: GateLimits | None
) -> ExpertsStruct:
    """Describe the experts. The tensors are not copied and must outlive the result."""
    numbers = experts.count, ACTIVATIONS.index(activation), experts.is_gated, weighs_inputs
    limit_numbers = (0.0, 0.0) if limits is None else (limits.gate, limits.up)
    return ExpertsStruct(*numbers, *limit_numbers, linear_struct(experts.gate_up), linear_struct(experts.down))


def mixture_struct(mixture: Mixture, routing: Routing, activation: str, limits: GateLimits | None) -> MixtureStruct:
    """Describe a mixture. The tensors are not copied and must outlive the result."""
    return MixtureStruct(
        routing_struct(routing),
        address_of(mixture.bias),
        linear_struct(mixture.router),
        experts_struct(mixture.experts, activation, weighs_inputs=routing.weighs_inputs, limits=limits),
    )


def route(
    library: ctypes.CDLL, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row, int64 [T, chosen], and their weights, float32."""
    count, logits = len(logits), logits.contiguous()
    ids = torch.empty(count, routing.experts_per_token, dtype=torch.int64)
    weights = torch.empty(count, routing.experts_per_token + bool(routing.shared))
    struct = routing_struct(routing)
    library.route(
        logits.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        ctypes.addressof(struct),
        count,
        torch.get_num_threads(),
    )
    return ids, weights


def mix_experts(
    library: ctypes.CDLL,
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    activation: str,
    *,
    weighs_inputs: bool,
    limits: GateLimits | None,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' MLPs for bfloat16 rows x [T, hidden]: [T, hidden]."""
    struct = experts_struct(experts, activation, weighs_inputs=weighs_inputs, limits=limits)
    if x.shape[-1] != struct.gate_up.in_features:
        raise ValueError(f"rows of {x.shape[-1]} numbers for experts of {struct.gate_up.in_features}")
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    shared = None if shared is None else shared.contiguous()
    (count, chosen), out = ids.shape, torch.empty_like(x)
    address = ctypes.addressof(struct)
    workspace = torch.empty(library.experts_workspace(address, count, chosen), dtype=torch.uint8)
    library.experts(
        address,
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        0 if shared is None else shared.data_ptr(),
        out.data_ptr(),
        count,
        chosen,
        workspace.data_ptr(),
        torch.get_num_threads(),
    )
    return out
