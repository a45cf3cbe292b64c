"""Reads checkpoints of torchao in safetensors, as Transformers saves them.

The header of a file has JSON for each weight under its name: ``_type``, a class of torchao, and ``_data``, its
attributes. A weight NAME.weight is in tensors NAME._weight_qdata, NAME._weight_scale and so on. Four classes store
numbers plainly; ``block_size`` says how many outputs and inputs share a scale.

* Int8Tensor, IntxUnpackedToInt8Tensor: ``qdata`` int8 [out, in], ``scale`` and ``zero_point`` [out, groups]; a number
  is (integer - zero point) * scale. Integers have the bits of ``target_dtype``, 8 for the first class.
* Float8Tensor: ``qdata`` float8_e4m3fn, times ``scale``.
* Int4Tensor: ``qdata`` [out, in / 2] has two signed integers in a byte, the first in the low bits; ``scale`` and
  ``zero_point`` [groups, out]; a number is integer * scale + zero point.

The weights of all experts may be one tensor, such as mlp.experts.NAME: the parts, mlp.experts._NAME_qdata and so on,
have one more dimension, the first. Activations are not quantized, even if the class quantizes them. The other classes
are layouts of GPU kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp8 import read_fp8
from parley.model.checkpoint.hqq import ZERO_CODES
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE, integer_bits
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

INTEGERS, FLOATS, NIBBLES = ("Int8Tensor", "IntxUnpackedToInt8Tensor"), "Float8Tensor", "Int4Tensor"
CLASSES = (*INTEGERS, FLOATS, NIBBLES)
PARTS = ("qdata", "scale", "zero_point")
UNUSED_PARTS = ("act_quant_scale", "act_quant_zero_point")


class TorchaoClass(NamedTuple):
    """``kind``: one of CLASSES. ``bits``: of an integer. ``outputs``, ``inputs``: that share a scale."""

    kind: str
    bits: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class TorchaoWeight:
    """A weight [out, in] in the tensors ``name`` stands for; with ``experts``, the weights of this number of experts,
    [experts, out, in]."""

    checkpoint: Checkpoint
    name: str
    out_features: int
    in_features: int
    experts: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor of that name."""
        return self.part("qdata") not in self.checkpoint

    def part(self, part: str) -> str:
        """Return the name of the tensor that holds a part."""
        module, _, own = self.name.rpartition(".")
        return f"{module}._{own}_{part}"

    def tensor_names(self) -> list[str]:
        """Return the names of the tensors that hold the weight."""
        if self.is_plain:
            return [self.name]
        return [name for name in map(self.part, (*PARTS, *UNUSED_PARTS)) if name in self.checkpoint]

    def view_parts(self) -> list[torch.Tensor]:
        """Return integers, scales and zero points if there are any, as views of the file. Raises LoadError."""
        stored, (qdata, scale, zero) = self.read_class(), map(self.part, PARTS)
        view = self._view_part
        out_features = self.out_features
        in_features = self.in_features
        groups = self.in_features // stored.inputs
        if stored.kind == FLOATS:
            rows = -(-out_features // stored.outputs), -(-in_features // stored.inputs)
            return [view(qdata, out_features, in_features, dtype=torch.float8_e4m3fn), view(scale, *rows)]
        if stored.kind == NIBBLES:
            values = view(qdata, out_features, in_features // 2, dtype=torch.int8)
            scales = view(scale, groups, out_features)
            if scales.dtype not in ZERO_CODES:
                dtype_name = str(scales.dtype).removeprefix("torch.")
                raise LoadError(f"Tensor {scale} holds {dtype_name}; only float16 and bfloat16 are supported.")
            return [values, scales, view(zero, groups, out_features, dtype=scales.dtype)]
        rows = out_features // stored.outputs, groups
        views = [view(qdata, out_features, in_features, dtype=torch.int8), view(scale, *rows)]
        return views + [view(zero, *rows, dtype=torch.int8)] * (zero in self.checkpoint)

    def _view_part(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        leading = () if self.experts is None else (self.experts,)
        return self.checkpoint.view_tensor(name, *leading, *shape, dtype=dtype)

    def read(self, values: torch.Tensor, scales: torch.Tensor, *zeros: torch.Tensor) -> LinearWeight:
        """Return the weight of one expert, or the only one, whose parts are these.

        Raises LoadError, also if an integer is not of the bits that the header names.
        """
        stored = self.read_class()
        if stored.kind == FLOATS:
            block = None if stored.inputs == self.in_features else (stored.outputs, stored.inputs)
            return read_fp8(values, scales, block, self.part("qdata"))
        if stored.kind == NIBBLES:
            packed = values.view(torch.uint8)
            codes = torch.stack((packed & 15, packed >> 4), -1).view(self.out_features, self.in_features) ^ 8
            shifts = zeros[0].t().contiguous()
            code = "shift4_" + ZERO_CODES[scales.dtype]
            return GroupedLinearWeight(GroupedWeight(codes, scales.t().contiguous(), shifts, stored.inputs, code=code))
        return self._read_integers(stored, values, scales, *zeros)

    def _read_integers(
        self, stored: TorchaoClass, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> LinearWeight:
        lowest, highest = -(1 << (stored.bits - 1)), (1 << (stored.bits - 1)) - 1
        width = integer_bits(stored.bits)
        middle, code = 1 << (width - 1), f"int{width}"
        zeros = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros
        for part, numbers in (("qdata", values), ("zero_point", zeros)):
            if ((numbers < lowest) | (numbers > highest)).any():
                raise LoadError(
                    f"Tensor {self.part(part)} has integers of more than {stored.bits} bits; the file is damaged."
                )
        unsigned = [
            (numbers.short() + middle).to(torch.uint8) for numbers in (values, zeros.expand(self.out_features, -1))
        ]
        float_scales = scales.float().expand(self.out_features, -1)
        if stored.inputs < self.in_features:
            return GroupedLinearWeight(GroupedWeight(unsigned[0], float_scales, unsigned[1], stored.inputs, code=code))
        # A scale of an output keeps all of its bits.
        ones, out_scales = torch.ones(self.out_features, 1), float_scales[:, 0].contiguous()
        return GroupedLinearWeight(
            GroupedWeight(unsigned[0], ones, unsigned[1], self.in_features, code=code, out_scales=out_scales)
        )

    def read_class(self) -> TorchaoClass:
        """Return the class of a weight. Raises LoadError if it is not supported."""
        try:
            entry = json.loads(self.checkpoint.metadata[self.name])
            kind, data = str(entry["_type"]), entry["_data"]
            if kind not in CLASSES:
                raise LoadError(
                    f"Tensor {self.name} is of torchao's class {kind[:80]}; only {', '.join(CLASSES)} are supported."
                )
            *leading, outputs, inputs = (int(size) for size in data["block_size"])
            bits = int(str(data["target_dtype"]["_data"]).removeprefix("int")) if "target_dtype" in data else 8
        except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
            raise LoadError(f"The header of the file does not describe tensor {self.name} as torchao does.") from None
        if self.part("act_pre_scale") in self.checkpoint:
            raise LoadError(f"Tensor {self.part('act_pre_scale')} scales inputs, which is not supported.")
        self._check_blocks(kind, leading, outputs, inputs)
        if not 1 <= bits <= 8:
            raise LoadError(f"Tensor {self.name} has integers of {bits} bits; only 1 to 8 are supported.")
        return TorchaoClass(kind, bits, outputs, inputs)

    def _check_blocks(self, kind: str, leading: list[int], outputs: int, inputs: int) -> None:
        """Raise LoadError unless weights share scales in a way that kernels have."""
        is_whole = inputs == self.in_features and outputs in (1, self.out_features) and kind != NIBBLES
        has_groups = 0 < inputs <= self.in_features and not inputs % GROUP_MULTIPLE
        if kind != FLOATS:
            has_groups = has_groups and outputs == 1 and not self.in_features % inputs
        fits = is_whole or (has_groups and outputs > 0)
        if leading != ([] if self.experts is None else [1]) or not fits:
            shared = "".join(f"{experts} experts, " for experts in leading)
            raise LoadError(
                f"Tensor {self.name} has blocks of {shared}{outputs} outputs and {inputs} inputs, which are not "
                "supported."
            )


class TorchaoFormat:
    """The format of a linear layer, described by JSON in the header of its file."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight."""
        return _weight_of(checkpoint, linear).tensor_names()

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return integers, scales and zero points if there are any, as views of the file. Raises LoadError."""
        return _weight_of(checkpoint, linear).view_parts()

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError, also if an integer is not of the bits that the header names."""
        return _weight_of(checkpoint, linear).read(*self.view_tensors(checkpoint, linear))


def _weight_of(checkpoint: Checkpoint, linear: LinearSpec) -> TorchaoWeight:
    return TorchaoWeight(checkpoint, linear.name + ".weight", linear.out_features, linear.in_features)


class StackedTorchaoFormat:
    """The format of a tensor that holds the weights of all experts: each part has one more dimension, the first."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weights."""
        return TorchaoWeight(checkpoint, linear.name, linear.out_features, linear.in_features).tensor_names()

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return integers, scales and zero points if there are any, as views of the file. Raises LoadError."""
        return TorchaoWeight(checkpoint, linear.name, linear.out_features, linear.in_features, experts).view_parts()

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one expert. Raises LoadError, also if an integer is not of the bits that the header
        names."""
        weight = TorchaoWeight(checkpoint, linear.name, linear.out_features, linear.in_features, experts)
        values, scales, *zeros = (part[expert] for part in weight.view_parts())
        return weight.read(values, scales, *zeros)


def read_torchao_config(config: dict[str, Any]) -> Callable[[str], TorchaoFormat]:
    """Return a function from layer name to format for a ``quantization_config``. Raises LoadError."""
    if config.get("include_input_output_embeddings"):
        raise LoadError(
            "The checkpoint's quantization_config.include_input_output_embeddings is true; only false is supported."
        )
    torchao = TorchaoFormat()
    return lambda name: torchao
