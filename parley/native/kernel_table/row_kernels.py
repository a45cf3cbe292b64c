"""Norms, activations and other operators that read one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parley.native.compiled_forms.compiled_int8 import Int8Packed
from parley.native.kernel_choice import form_for_rows
from parley.native.layer_shape import GateLimits, Norm
from parley.native.packed import PackedWeight
from parley.native.torch_forms import torch_kernels, torch_states, torch_streams
from parley.native.triton_forms.triton_packed import TritonInt8Packed


def _reads_int8(consumer: PackedWeight | None) -> bool:
    """Whether this layer multiplies int8 rows, so that the kernel before it can quantize them in the same pass."""
    return isinstance(consumer, Int8Packed | TritonInt8Packed | torch_kernels.TorchInt8Packed)


def norm_rows(x: torch.Tensor, norm: Norm | None, *, consumer: PackedWeight | None = None) -> Any:
    """Return the norm of rows x [..., hidden], or x itself without a norm.

    ``consumer``: the only linear layer that reads the result. If it multiplies int8 rows, the result is quantized:
    ``QuantizedRows``.
    """
    return form_for_rows("norm_rows", x).norm_rows(x, norm, int8=_reads_int8(consumer))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    after: Norm | None = None,
    scale: float = 1.0,
    total_scale: float = 1.0,
    consumer: PackedWeight | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return the norm of the new residual, and the new residual, total_scale * (residual + scale * after(x)).

    All are [T, hidden]. ``consumer`` is that of ``norm_rows``.
    """
    result: tuple[Any, torch.Tensor] = form_for_rows("add_norm", x).add_norm(
        x, residual, norm, after=after, scale=scale, total_scale=total_scale, int8=_reads_int8(consumer)
    )
    return result


def activate(
    rows: torch.Tensor,
    activation: str,
    *,
    is_gated: bool = True,
    factors: Sequence[float] = (),
    consumer: PackedWeight | None = None,
) -> Any:
    """Return activation(gate) * up for rows [T, 2 * width]. ``factors``: ``activation_factors`` of the layer.
    ``consumer`` is that of ``norm_rows``."""
    return form_for_rows("activate", rows).activate(
        rows, activation, is_gated=is_gated, factors=factors, int8=_reads_int8(consumer)
    )


def sparsify_gates(rows: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract a threshold from each gate in rows [T, 2 * width] and make those below it 0. The rows are overwritten
    and returned; ``torch_streams`` defines the threshold."""
    result: torch.Tensor = form_for_rows("sparsify_gates", rows).sparsify_gates(rows, deviations)
    return result


def limit_gates(rows: torch.Tensor, limits: GateLimits | None) -> torch.Tensor:
    """Limit gates and ups in rows [T, 2 * width], which are overwritten and returned."""
    return torch_streams.limit_gates(rows, limits)


def match_sizes(rows: torch.Tensor, models: torch.Tensor) -> torch.Tensor:
    """Return rows [T, width], scaled so that the mean square of each is that of the row of ``models`` [T, width]."""
    result: torch.Tensor = form_for_rows("match_sizes", rows).match_sizes(rows, models)
    return result


def gate_rows(rows: torch.Tensor, gates: torch.Tensor, *, has_softplus: bool = False) -> torch.Tensor:
    """Return rows * sigmoid(gates), or rows * softplus(gates): [T, width]. The rows may be overwritten."""
    if has_softplus:
        return torch_states.gate_rows(rows, gates, has_softplus=True)
    result: torch.Tensor = form_for_rows("gate_rows", rows).gate_rows(rows, gates)
    return result
