"""Reads checkpoints of NVIDIA's Model Optimizer: weights of FP8, MXFP8 or NVFP4 with scales.

FP8: ``weight`` float8_e4m3fn [out, in], times ``weight_scale``: one, or one for each output. MXFP8: as FP8, but
``weight_scale`` uint8 [out, in / 32] has exponents. NVFP4: ``weight`` uint8
[out, in / 2] has two numbers in a byte as ``fp4.py`` says; each 16 inputs of an output share a scale, ``weight_scale``
float8_e4m3fn [out, in / 16], and the whole weight is multiplied by ``weight_scale_2``. Only weights count: activations
keep the dtype of the model.

The config is ``quantization_config`` in config.json, or in older files ``quantization`` in hf_quant_config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp4 import NVFP4_GROUP, read_nvfp4, view_nvfp4
from parley.model.checkpoint.fp8 import MXFP8_BLOCK, Fp8Format
from parley.model.checkpoint.weights import LinearSpec, LinearWeight

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


class ModelOptFormat(Fp8Format):
    """The format of a linear layer: FP8, MXFP8 or NVFP4, depending on which tensors it has."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight, its scales, and of the scales of activations that the file has."""
        names, factor = super().tensor_names(checkpoint, linear), linear.name + ".weight_scale_2"
        return names[:2] + [factor] * (factor in checkpoint) + names[2:]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return the weight and its scales as views of the file. Raises LoadError."""
        names = self.tensor_names(checkpoint, linear)
        if not self._is_nvfp4(names):
            return self._fp8_format(checkpoint, names).view_tensors(checkpoint, linear)
        return view_nvfp4(checkpoint, linear, *names[:3])

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        names = self.tensor_names(checkpoint, linear)
        if not self._is_nvfp4(names):
            return self._fp8_format(checkpoint, names).read_weight(checkpoint, linear)
        packed, scales, factor = self.view_tensors(checkpoint, linear)
        return read_nvfp4(packed, scales, factor.float())

    @staticmethod
    def _fp8_format(checkpoint: Checkpoint, names: list[str]) -> Fp8Format:
        has_exponents = checkpoint.tensor_form(names[1])[0] == torch.uint8
        return Fp8Format(MXFP8_BLOCK if has_exponents else None)

    @staticmethod
    def _is_nvfp4(names: list[str]) -> bool:
        return len(names) > 2 and names[2].endswith(".weight_scale_2")


def read_modelopt_config(config: dict[str, Any]) -> Callable[[str], ModelOptFormat]:
    """Return a function from layer name to format for a ``quantization_config``. Raises LoadError."""
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
        raise LoadError(
            f"The checkpoint's quantization_config.quant_algo is {algorithm}; only {', '.join(ALGORITHMS)} are "
            "supported."
        )
    if (group := config.get("group_size")) not in (None, NVFP4_GROUP) and "NVFP4" in algorithm.upper():
        raise LoadError(f"The checkpoint's quantization_config.group_size is {group}; only {NVFP4_GROUP} is supported.")
    model_opt = ModelOptFormat()
    return lambda name: model_opt
