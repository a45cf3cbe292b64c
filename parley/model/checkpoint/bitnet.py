"""Reads checkpoints of BitNet b1.58 (arXiv 2402.17764) as Transformers packs them: linear weights of -1, 0 and 1.

``weight`` uint8 [out / 4, in] has four numbers in a byte, each plus one: that of output r in the lowest bits, then
those of r + out / 4 and so on. ``weight_scale``, one number, divides them, or multiplies them if the config's
``linear_class`` is autobitlinear. Only weights are quantized: activations keep the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

IN_BYTE = 4  # numbers in a byte
# The supported values of config fields; an absent field has the first
FIELDS: dict[str, tuple[Any, ...]] = {
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline",),
    "use_rms_norm": (False,),
}


@dataclass(frozen=True)
class BitNetFormat:
    """``is_multiplied``: the scale multiplies the numbers; else it divides them."""

    is_multiplied: bool

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the numbers and of their scale."""
        return [linear.name + ".weight", linear.name + ".weight_scale"]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return numbers and scale as views of the file. Raises LoadError."""
        weight, scale = self.tensor_names(checkpoint, linear)
        if linear.out_features % IN_BYTE:
            raise LoadError(
                f"Tensor {weight} has {linear.out_features} outputs, which are not a multiple of {IN_BYTE}."
            )
        shape = (1,) if len(checkpoint.tensor_shape(scale)) else ()
        return [
            checkpoint.view_tensor(weight, linear.out_features // IN_BYTE, linear.in_features, dtype=torch.uint8),
            checkpoint.view_tensor(scale, *shape),
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError, also if a number is none of the three."""
        packed, scale = self.view_tensors(checkpoint, linear)
        values = torch.cat([packed >> (2 * place) & 3 for place in range(IN_BYTE)])
        if (values == 3).any():
            raise LoadError(f"Tensor {linear.name}.weight has numbers other than -1, 0 and 1; the file is damaged.")
        factor = scale.float().reshape(1)
        factors = (factor if self.is_multiplied else factor.reciprocal()).expand(linear.out_features)
        ones = torch.ones(linear.out_features, 1)
        return GroupedLinearWeight(
            GroupedWeight(values, ones, ones.to(torch.uint8), linear.in_features, code="int2", out_scales=factors)
        )


def read_bitnet_config(config: dict[str, Any]) -> Callable[[str], BitNetFormat]:
    """Return a function from layer name to format for a ``quantization_config``. Raises LoadError."""
    for field, allowed in FIELDS.items():
        if (value := config.get(field, allowed[0])) not in allowed:
            supported = " and ".join(str(option) for option in allowed)
            raise LoadError(
                f"The checkpoint's quantization_config.{field} is {value}; only {supported} "
                f"{'is' if len(allowed) == 1 else 'are'} supported."
            )
    bitnet = BitNetFormat(config.get("linear_class") == "autobitlinear")
    return lambda name: bitnet
