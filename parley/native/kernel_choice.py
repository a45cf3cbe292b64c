"""Which implementation of a kernel runs: the compiled one, the one in Triton, or torch's.

The choice is made at each call, by operator, device and dtype (``find_form``). bfloat16 on the CPU runs on the compiled
kernels, if there are any; bfloat16 and float16 on a GPU run on those in Triton. Everything else (float32, a machine
without a compiler, operators without a kernel for the GPU) runs on the torch implementations.
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import Any

import torch

from parley.native import library, memory
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.experts import Experts
from parley.native.packed import COMPILED_WEIGHTS, TRITON_WEIGHTS, PackedWeight
from parley.native.pool import LayerPages, PageFormat
from parley.native.torch_forms import (
    torch_experts,
    torch_kernels,
    torch_latent,
    torch_mamba,
    torch_selective,
    torch_states,
    torch_streams,
    torch_vocabulary,
)

log = logging.getLogger("parley.engine")

# The torch form of each operator, for every device and dtype.
TORCH_FORMS: dict[str, ModuleType] = {
    name: module
    for module, names in (
        (torch_kernels, torch_kernels.__all__),
        (torch_experts, ("mix_experts", "route")),
        (torch_latent, ("absorb_queries", "linear_heads", "write_latents")),
        (torch_mamba, ("scan_mamba2",)),
        (torch_selective, ("convolve_channels", "scan_channels")),
        (torch_states, ("convolve_gated", "gate_rows", "scan_gated_delta", "scan_kimi_delta")),
        (torch_streams, ("match_sizes", "sparsify_gates")),
        (torch_vocabulary, ("apply_mask", "argmax", "masked_argmax", "softmax_totals", "top_k")),
    )
    for name in names
}
# The compiled kernels read bfloat16 rows, except for these, which read float32 logits.
LOGIT_OPERATORS = frozenset(
    ("apply_mask", "argmax", "masked_argmax", "route", "scale_logits", "softmax_totals", "top_k")
)
TRITON_DTYPES = (torch.bfloat16, torch.float16)
TRITON_HEAD_DIM = 256  # numbers of a key or value, at most
TRITON_LATENT_DIM = 512  # numbers of a latent, at most


@functools.cache
def compiled_kernels() -> CompiledKernels | None:
    """Return the kernels for this CPU; None if there are none, or if ``PARLEY_NATIVE`` is "off"."""
    kernel_library = library.load_kernels()
    return None if kernel_library is None else CompiledKernels(kernel_library)


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return the kernels for GPUs, or None if Triton is missing or ``PARLEY_NATIVE`` is "off"."""
    if os.environ.get("PARLEY_NATIVE", "") == "off":
        return None
    try:
        from parley.native.triton_forms import triton_kernels as kernels
    except ImportError as error:
        log.warning("Using torch's operators on the GPU, which are slower: %s.", error)
        return None
    return kernels


def kernels_in_use(dtype: torch.dtype, device: torch.device) -> str:
    """Return the kernels for this dtype and device: the level of the compiled kernels, "triton" or "torch"."""
    kernels = own_kernels(device, dtype)
    if kernels is None:
        return "torch"
    return kernels.level if isinstance(kernels, CompiledKernels) else "triton"


def own_kernels(device: torch.device, dtype: torch.dtype, compiled_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return parley's own kernels for a device and dtype; None if there are none."""
    if device.type == "cpu":
        return compiled_kernels() if dtype == compiled_dtype else None
    return triton_kernels() if device.type == "cuda" and dtype in TRITON_DTYPES else None


def find_form(operator: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the implementation of an operator for rows of this dtype on this device."""
    kernels = own_kernels(device, dtype, torch.float32 if operator in LOGIT_OPERATORS else torch.bfloat16)
    return kernels if hasattr(kernels, operator) else TORCH_FORMS[operator]


def packing_form(operator: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the implementation of an operator that packs weights. Weights on the meta device are packed as on the CPU,
    but without data."""
    return find_form(operator, memory.CPU if device.type == "meta" else device, dtype)


def form_for_rows(operator: str, x: torch.Tensor) -> Any:
    """Return the implementation of an operator for this tensor."""
    return find_form(operator, x.device, x.dtype)


def form_of_weight(operator: str, packed: PackedWeight) -> Any:
    """Return the implementation of an operator that packed this weight."""
    if isinstance(packed, COMPILED_WEIGHTS):
        return compiled_kernels()
    return triton_kernels() if isinstance(packed, TRITON_WEIGHTS) else TORCH_FORMS[operator]


def form_of_stacked(operator: str, packed: PackedWeight) -> Any:
    """Return the implementation of an operator with the weights of several experts or heads.

    On a GPU they are multiplied in Triton even where cuBLAS multiplies those of linear layers.
    """
    if isinstance(packed, torch_kernels.TorchPacked) and not packed.onednn:
        kernels = own_kernels(packed.weight.device, packed.weight.dtype)
        if isinstance(kernels, ModuleType):
            return kernels
    return form_of_weight(operator, packed)


def has_gpu_experts(experts: Experts) -> bool:
    """Whether a mixture of these experts runs in Triton, which never waits for the GPU."""
    forms = (form_of_stacked("mix_experts", weights) for weights in (experts.gate_up, experts.down))
    return all(isinstance(form, ModuleType) and form is not torch_experts for form in forms)


def packed_layout_id() -> str | None:
    """Return a name for the layout of packed weights, or None if torch decides it."""
    kernels = compiled_kernels()
    return None if kernels is None else kernels.library_name


def has_quantized_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether quantized weights can be loaded. Torch's forms dequantize them, and only on the CPU."""
    return device.type == "cpu" or own_kernels(device, dtype) is not None


def kernels_of_parts(dtype: torch.dtype, device: torch.device) -> CompiledKernels | None:
    """Return the kernels that pack several weights as one without copying them first, for rows of ``dtype``; None if
    there are none: then parts are merged first, and weights in groups are dequantized."""
    return compiled_kernels() if dtype == torch.bfloat16 and device.type in ("cpu", "meta") else None


def tiled_kernels(pool: LayerPages) -> CompiledKernels | None:
    """Return the compiled kernels if the pages have their layout, else None."""
    return compiled_kernels() if pool.page_format.tiled else None


def has_table_attention(page_format: PageFormat, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention over these pages reads page tables and positions from the device (``BatchTables``)."""
    layer = page_format.layer
    is_small = max(layer.dim, layer.value_dim) <= TRITON_HEAD_DIM
    if layer.has_latents:
        is_small = layer.value_dim <= TRITON_LATENT_DIM and page_format.dtype != torch.int8
    return is_small and hasattr(own_kernels(device, dtype), "attend") and not page_format.tiled
