"""Reads checkpoints of HQQ (half-quadratic quantization): integers of 1 to 8 bits, with floats as zero points.

``W_q`` has the integers of groups [groups, group] of adjacent inputs, output by output: uint8 with 8 / bits numbers in
a byte, the first groups in the high bits and the last ones in the low bits; 3 bits are ten numbers in an int32,
likewise. ``scale`` and ``zero`` [groups, 1] are float16 or bfloat16; a number is (integer - zero) * scale. Small
tensors next to them have ``nbits``, ``group_size``, ``axis`` and more. Layers without ``W_q`` are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

# Tensors that describe a weight, besides the three above; those that are not read follow from the others
DESCRIPTION = (
    "nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero", "shape", "packing", "compute_dtype",
    "unpack_view_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
)  # fmt: skip
BITS = (1, 2, 3, 4, 8)
NUMBERS_IN_WORD = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
ZERO_CODES = {torch.float16: "f16", torch.bfloat16: "bf16"}  # the end of a code's name


class HqqSizes(NamedTuple):
    """The bits of a number, and the inputs of a group."""

    bits: int
    group: int


class HqqFormat:
    """The format of a quantized linear layer of HQQ."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and of all that describes it."""
        described = (f"{linear.name}.{part}" for part in DESCRIPTION)
        names = [f"{linear.name}.{part}" for part in ("W_q", "scale", "zero")]
        return names + [name for name in described if name in checkpoint]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return packed integers, scales and zeros as views of the file. Raises LoadError."""
        names = self.tensor_names(checkpoint, linear)
        sizes = self._read_sizes(checkpoint, linear)
        groups = linear.out_features * linear.in_features // sizes.group
        rows, dtype = -(-groups // NUMBERS_IN_WORD[sizes.bits]), torch.int32 if sizes.bits == 3 else torch.uint8
        scales = checkpoint.view_tensor(names[1], groups, 1)
        if scales.dtype not in ZERO_CODES:
            dtype_name = str(scales.dtype).removeprefix("torch.")
            raise LoadError(f"Tensor {names[1]} holds {dtype_name}; only float16 and bfloat16 are supported.")
        return [
            checkpoint.view_tensor(names[0], rows, sizes.group, dtype=dtype),
            scales,
            checkpoint.view_tensor(names[2], groups, 1, dtype=scales.dtype),
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        packed, *meta_tensors = self.view_tensors(checkpoint, linear)
        sizes, (scales, zeros) = (
            self._read_sizes(checkpoint, linear),
            (tensor.view(linear.out_features, -1) for tensor in meta_tensors),
        )
        code = f"zero{sizes.bits}_{ZERO_CODES[scales.dtype]}"
        values = unpack_planes(packed, scales.numel(), sizes.bits).view(linear.out_features, linear.in_features)
        return GroupedLinearWeight(GroupedWeight(values, scales, zeros, sizes.group, code=code))

    def _read_sizes(self, checkpoint: Checkpoint, linear: LinearSpec) -> HqqSizes:
        """Return the sizes of a weight. Raises LoadError if it is of another layout."""
        bits, group, axis = (self._read_number(checkpoint, linear, part) for part in ("nbits", "group_size", "axis"))
        if bits not in BITS:
            raise LoadError(f"Tensor {linear.name}.nbits is {bits}; only {', '.join(map(str, BITS))} are supported.")
        if axis != 1:
            raise LoadError(f"Tensor {linear.name}.axis is {axis}; only groups of inputs, 1, are supported.")
        if group < 1 or linear.in_features % group or group % GROUP_MULTIPLE:
            raise LoadError(
                f"Tensor {linear.name}.group_size is {group}; it must be a multiple of {GROUP_MULTIPLE} that divides "
                f"the {linear.in_features} inputs."
            )
        for part in ("view_as_float", "quant_scale", "quant_zero"):
            name = f"{linear.name}.{part}"
            if name in checkpoint and checkpoint.view_tensor(name, dtype=torch.uint8).item():
                raise LoadError(f"Tensor {name} is 1; only 0 is supported.")
        return HqqSizes(bits, group)

    @staticmethod
    def _read_number(checkpoint: Checkpoint, linear: LinearSpec, part: str) -> int:
        return int(checkpoint.view_tensor(f"{linear.name}.{part}", dtype=torch.int32).item())


def unpack_planes(packed: torch.Tensor, rows: int, bits: int) -> torch.Tensor:
    """Unpack integers whose first rows lie in the highest bits of words [m, n]: uint8 [rows, n]."""
    count, mask = NUMBERS_IN_WORD[bits], (1 << bits) - 1
    planes = [packed >> (bits * (count - 1 - plane)) & mask for plane in range(count)]
    return torch.cat(planes)[:rows].to(torch.uint8)


def read_hqq_config(config: dict[str, Any]) -> Callable[[str], HqqFormat]:
    """Return a function from layer name to format for a ``quantization_config``. The layers' tensors describe them."""
    hqq = HqqFormat()
    return lambda name: hqq
