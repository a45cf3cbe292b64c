"""Reads linear weights of 4-bit floating-point numbers (e2m1): NVFP4 and MXFP4 of compressed-tensors.

Two numbers are in a byte along the inputs, the first in the low bits: uint8 [out, in / 2]. Each 16 inputs of an output
(NVFP4) share a scale of float8_e4m3fn [out, in / 16], and the whole weight is divided by one of float32; each 32
(MXFP4) share a scale of two to the power of byte - 127, [out, in / 32]. Activations keep the dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

NVFP4_GROUP, MXFP4_GROUP = 16, 32
ACTIVATION_NAMES = ("input_global_scale", "input_scale")


@dataclass(frozen=True)
class Fp4Format:
    """``group``: inputs that share a scale, NVFP4_GROUP or MXFP4_GROUP. ``numbers``: the end of the numbers' name."""

    group: int
    numbers: str = "weight_packed"

    @property
    def has_global_scale(self) -> bool:
        """Whether the whole weight is also divided by a single scale."""
        return self.group == NVFP4_GROUP

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of numbers and scales, and of the scales of activations that the file has."""
        names = [self.numbers, "weight_scale"] + ["weight_global_scale"] * self.has_global_scale
        unused = [name for name in ACTIVATION_NAMES if f"{linear.name}.{name}" in checkpoint]
        return [f"{linear.name}.{name}" for name in names + unused]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return numbers and scales as views of the file. Raises LoadError."""
        packed, scale, *other_names = self.tensor_names(checkpoint, linear)
        if self.has_global_scale:
            return view_nvfp4(checkpoint, linear, packed, scale, other_names[0])
        return _view_groups(checkpoint, linear, packed, scale, MXFP4_GROUP, torch.uint8)

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        packed, scales, *tensor_scales = self.view_tensors(checkpoint, linear)
        if not tensor_scales:
            return read_mxfp4(packed, scales)
        return read_nvfp4(packed, scales, tensor_scales[0].float().reciprocal())


def view_nvfp4(
    checkpoint: Checkpoint, linear: LinearSpec, packed: str, scale: str, whole_scale: str
) -> list[torch.Tensor]:
    """Return the three tensors of an NVFP4 weight as views of the file, by their names. Raises LoadError."""
    views = _view_groups(checkpoint, linear, packed, scale, NVFP4_GROUP, torch.float8_e4m3fn)
    shape = (1,) if len(checkpoint.tensor_shape(whole_scale)) else ()
    return [*views, checkpoint.view_tensor(whole_scale, *shape)]


def view_mxfp4(checkpoint: Checkpoint, linear: LinearSpec, packed: str, scale: str) -> list[torch.Tensor]:
    """Return both tensors of an MXFP4 weight as DeepSeek stores it, as views of the file, by their names: int8, and
    float8_e8m0fnu. Raises LoadError."""
    return _view_groups(checkpoint, linear, packed, scale, MXFP4_GROUP, torch.float8_e8m0fnu, torch.int8)


def _view_groups(
    checkpoint: Checkpoint,
    linear: LinearSpec,
    packed: str,
    scale: str,
    group: int,
    dtype: torch.dtype,
    packed_dtype: torch.dtype = torch.uint8,
) -> list[torch.Tensor]:
    """Return packed numbers and the scales of groups, of ``dtype``, as views of the file. Raises LoadError."""
    if linear.in_features % group:
        raise LoadError(f"Tensor {packed} has {linear.in_features} inputs, which are not whole groups of {group}.")
    return [
        checkpoint.view_tensor(packed, linear.out_features, linear.in_features // 2, dtype=packed_dtype),
        checkpoint.view_tensor(scale, linear.out_features, linear.in_features // group, dtype=dtype),
    ]


def read_nvfp4(packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> GroupedLinearWeight:
    """Return an NVFP4 weight. ``packed`` uint8 [out, in / 2], ``scales`` float8_e4m3fn [out, in / NVFP4_GROUP];
    ``factor`` float32, one number: multiplies all."""
    out_scales = factor.expand(len(packed))
    return GroupedLinearWeight(
        GroupedWeight(_unpack_nibbles(packed), scales.float(), None, NVFP4_GROUP, code="e2m1", out_scales=out_scales)
    )


def read_mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> GroupedLinearWeight:
    """Return an MXFP4 weight. ``packed`` uint8 [out, in / 2], ``scales`` uint8 [out, in / MXFP4_GROUP]: exponents."""
    float_scales = scales.view(torch.float8_e8m0fnu).float()
    return GroupedLinearWeight(GroupedWeight(_unpack_nibbles(packed), float_scales, None, MXFP4_GROUP, code="e2m1"))


def _unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit numbers of bytes uint8 [out, in / 2]: uint8 [out, in]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
