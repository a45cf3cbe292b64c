"""Reads linear weights of 8-bit floating-point numbers (e4m3) with scales.

A quantized layer has ``weight`` float8_e4m3fn [out, in] and scales that the weight is multiplied by: one, one for each
output, or one for each block, [ceil(out / block_out), ceil(in / block_in)]. Their tensor is ``weight_scale``, or
``weight_scale_inv`` in the format of DeepSeek, and ``scale`` in that of DeepSeek V4. In the latter, weights of experts
may be MXFP4 (``fp4.py``) in bytes that are int8. Scales of uint8 (MXFP8: blocks of 1 x 32) are exponents: a byte means
2 to the power of byte - 127. Activations stay in the dtype of the model, so ``input_scale`` and the like are not read,
and results are closer to the original model than with 8-bit activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp4 import read_mxfp4, view_mxfp4
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

SCALE_NAMES = ("weight_scale_inv", "scale", "weight_scale")
# Scales of activations, which are not used.
ACTIVATION_NAMES = ("input_scale", "activation_scale", "input_scale_ub", "input_global_scale")
BLOCK_MULTIPLE = 8  # inputs of a block must be a multiple of this
MXFP8_BLOCK = (1, 32)


@dataclass(frozen=True)
class Fp8Format:
    """``block``: outputs and inputs that share a scale; None: a scale for each output, or one for all."""

    block: tuple[int, int] | None = None

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and its scales, and of the scales of activations that the file has."""
        scales = [f"{linear.name}.{name}" for name in SCALE_NAMES]
        scale = next((name for name in scales if name in checkpoint), scales[-1])
        unused = (f"{linear.name}.{name}" for name in ACTIVATION_NAMES)
        return [linear.name + ".weight", scale, *(name for name in unused if name in checkpoint)]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return weight and scales as views of the file. Raises LoadError."""
        weight, scale, *_ = self.tensor_names(checkpoint, linear)
        if checkpoint.tensor_form(weight)[0] == torch.int8:
            return view_mxfp4(checkpoint, linear, weight, scale)
        values = checkpoint.view_tensor(weight, linear.out_features, linear.in_features, dtype=torch.float8_e4m3fn)
        return [values, view_scales(checkpoint, scale, *self._scale_shape(checkpoint, linear, scale))]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError, also if a number of it is NaN."""
        values, scales = self.view_tensors(checkpoint, linear)
        if values.dtype == torch.int8:
            return read_mxfp4(values.view(torch.uint8), scales.view(torch.uint8))
        return read_fp8(values, scales, self.block, f"{linear.name}.weight")

    def _scale_shape(self, checkpoint: Checkpoint, linear: LinearSpec, name: str) -> tuple[int, ...]:
        """Return the shape that the scales must have; if several shapes mean the same, the one in the file."""
        if self.block is not None:
            return -(-linear.out_features // self.block[0]), -(-linear.in_features // self.block[1])
        shapes = ((), (1,), (1, 1), (linear.out_features,), (linear.out_features, 1))
        return next((shape for shape in shapes if shape == checkpoint.tensor_shape(name)), shapes[-1])


def view_scales(checkpoint: Checkpoint, name: str, *shape: int) -> torch.Tensor:
    """Return scales as a view of the file, bytes as the exponents that they are. Raises LoadError."""
    if checkpoint.tensor_form(name)[0] == torch.uint8:
        return checkpoint.view_tensor(name, *shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return checkpoint.view_tensor(name, *shape)


def read_fp8(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, name: str
) -> GroupedLinearWeight:
    """Return the weight of numbers float8_e4m3fn [out, in] with scales as in ``Fp8Format``. ``name``: of its tensor.

    Raises LoadError if a number is NaN.
    """
    bits, (out_features, in_features) = values.view(torch.uint8), values.shape
    if ((bits & 0x7F) == 0x7F).any():
        raise LoadError(f"Tensor {name} has numbers that are NaN; the file is damaged.")
    outputs, inputs = block or (1, in_features)
    if block is None:
        scales = scales.float().reshape(-1, 1).expand(out_features, 1)
    else:
        scales = scales.float().repeat_interleave(outputs, 0)[:out_features]
    return GroupedLinearWeight(GroupedWeight(bits, scales, None, min(inputs, in_features), code="e4m3"))


def read_fp8_config(config: dict[str, Any]) -> Callable[[str], Fp8Format]:
    """Return a function from layer name to format, for a ``quantization_config`` of fp8 (DeepSeek, Qwen), fbgemm_fp8
    or mxfp8.

    Raises LoadError.
    """
    if config.get("fmt") not in (None, "e4m3"):
        raise LoadError(f"The checkpoint's quantization_config.fmt is {config['fmt']}; only e4m3 is supported.")
    fp8 = Fp8Format(read_config_block(config))
    return lambda name: fp8


def read_config_block(config: dict[str, Any]) -> tuple[int, int] | None:
    """Return outputs and inputs of the blocks of a ``quantization_config``, None if it has none. Raises LoadError."""
    block = read_block(config.get("weight_block_size"), "weight_block_size")
    return MXFP8_BLOCK if block is None and config.get("quant_method") == "mxfp8" else block


def read_block(value: Any, field: str) -> tuple[int, int] | None:
    """Return outputs and inputs of a block, None if ``value`` is. Raises LoadError."""
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not is_pair or value[1] % BLOCK_MULTIPLE:
        raise LoadError(
            f"The checkpoint's quantization_config.{field} is {value}; only two sizes are supported, the second a "
            f"multiple of {BLOCK_MULTIPLE}."
        )
    return value[0], value[1]
