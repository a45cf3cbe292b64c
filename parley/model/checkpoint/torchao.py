"""Reads checkpoints of torchao in safetensors, as Transformers saves them.

The header of a file has JSON for each weight under its name: ``_type``, a class of torchao, and ``_data``, its
attributes. A weight NAME.weight is in tensors NAME._weight_qdata, NAME._weight_scale and so on. Four classes store
numbers plainly; ``block_size`` says how many outputs and inputs share a scale.

* Int8Tensor, IntxUnpackedToInt8Tensor: ``qdata`` int8 [out, in], ``scale`` and ``zero_point`` [out, groups]; a number
  is (integer - zero point) * scale. Integers have the bits of ``target_dtype``, 8 for the first class.
* Float8Tensor: ``qdata`` float8_e4m3fn, times ``scale``.
* Int4Tensor: ``qdata`` [out, in / 2] has two signed integers in a byte, the first in the low bits; ``scale`` and
  ``zero_point`` [groups, out]; a number is integer * scale + zero point.

Activations are not quantised, even if the class quantises them. The other classes are layouts of GPU kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp8 import read_fp8
from parley.model.checkpoint.hqq import ZERO_CODES
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight, PlainWeight
from parley.native import GroupedWeight

INTEGERS, FLOATS, NIBBLES = ("Int8Tensor", "IntxUnpackedToInt8Tensor"), "Float8Tensor", "Int4Tensor"
CLASSES = (*INTEGERS, FLOATS, NIBBLES)
PLAIN_CLASS = "Tensor"
PARTS = ("qdata", "scale", "zero_point")
UNUSED_PARTS = ("act_quant_scale", "act_quant_zero_point")


class TorchaoClass(NamedTuple):
    """``kind``: one of CLASSES. ``bits``: of an integer. ``outputs``, ``inputs``: that share a scale."""

    kind: str
    bits: int
    outputs: int
    inputs: int


class TorchaoFormat:
    """The format of a linear layer, which the header of its file tells."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight."""
        if self._is_plain(checkpoint, linear):
            return [linear.name + ".weight"]
        names = (self._part(linear, part) for part in (*PARTS, *UNUSED_PARTS))
        return [name for name in names if name in checkpoint]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return integers, scales and zero points if there are any, or a plain weight, as views of the file.

        Raises LoadError.
        """
        if self._is_plain(checkpoint, linear):
            plain = checkpoint.view_tensor(linear.name + ".weight", *linear.stored_shape)
            return [plain.T if linear.transposed else plain]
        stored, (qdata, scale, zero) = (
            self._read_class(checkpoint, linear),
            (self._part(linear, each) for each in PARTS),
        )
        groups = linear.into // stored.inputs
        if stored.kind == FLOATS:
            rows = -(-linear.out // stored.outputs), -(-linear.into // stored.inputs)
            values = checkpoint.view_tensor(qdata, linear.out, linear.into, dtype=torch.float8_e4m3fn)
            return [values, checkpoint.view_tensor(scale, *rows)]
        if stored.kind == NIBBLES:
            values = checkpoint.view_tensor(qdata, linear.out, linear.into // 2, dtype=torch.int8)
            scales = checkpoint.view_tensor(scale, groups, linear.out)
            if scales.dtype not in ZERO_CODES:
                held = str(scales.dtype).removeprefix("torch.")
                raise LoadError(f"Tensor {scale} holds {held}; only float16 and bfloat16 are supported.")
            return [values, scales, checkpoint.view_tensor(zero, groups, linear.out, dtype=scales.dtype)]
        rows = linear.out // stored.outputs, groups
        views = [checkpoint.view_tensor(qdata, linear.out, linear.into, dtype=torch.int8)]
        views.append(checkpoint.view_tensor(scale, *rows))
        return views + [checkpoint.view_tensor(zero, *rows, dtype=torch.int8)] * (zero in checkpoint)

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError, also if an integer is not of the bits that the header names."""
        values, *rest = self.view_tensors(checkpoint, linear)
        if not rest:
            return PlainWeight(values)
        stored, (scales, *zeros) = self._read_class(checkpoint, linear), rest
        if stored.kind == FLOATS:
            block = None if stored.inputs == linear.into else (stored.outputs, stored.inputs)
            return read_fp8(values, scales, block, self._part(linear, "qdata"))
        if stored.kind == NIBBLES:
            packed = values.view(torch.uint8)
            codes = torch.stack((packed & 15, packed >> 4), -1).view(linear.out, linear.into) ^ 8
            shifts = zeros[0].t().contiguous()
            code = "shift4_" + ZERO_CODES[scales.dtype]
            return GroupedLinearWeight(GroupedWeight(codes, scales.t().contiguous(), shifts, stored.inputs, code=code))
        return self._read_integers(linear, stored, values, scales, *zeros)

    def _read_integers(
        self,
        linear: LinearSpec,
        stored: TorchaoClass,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
    ) -> LinearWeight:
        least, most = -(1 << (stored.bits - 1)), (1 << (stored.bits - 1)) - 1
        middle, code = (8, "int4") if stored.bits <= 4 else (128, "int8")
        zeros = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros
        for part, numbers in (("qdata", values), ("zero_point", zeros)):
            if ((numbers < least) | (numbers > most)).any():
                name = self._part(linear, part)
                raise LoadError(f"Tensor {name} has integers of more than {stored.bits} bits; the file is damaged.")
        unsigned = [(numbers.short() + middle).to(torch.uint8) for numbers in (values, zeros.expand(linear.out, -1))]
        wide = scales.float().expand(linear.out, -1)
        if stored.inputs < linear.into:
            return GroupedLinearWeight(GroupedWeight(unsigned[0], wide, unsigned[1], stored.inputs, code=code))
        # A scale of an output keeps all of its bits.
        ones, out_scales = torch.ones(linear.out, 1), wide[:, 0].contiguous()
        return GroupedLinearWeight(
            GroupedWeight(unsigned[0], ones, unsigned[1], linear.into, code=code, out_scales=out_scales)
        )

    def _is_plain(self, checkpoint: Checkpoint, linear: LinearSpec) -> bool:
        return self._part(linear, "qdata") not in checkpoint

    @staticmethod
    def _part(linear: LinearSpec, part: str) -> str:
        return f"{linear.name}._weight_{part}"

    def _read_class(self, checkpoint: Checkpoint, linear: LinearSpec) -> TorchaoClass:
        """Return the class of a weight. Raises LoadError if it is not supported."""
        name = linear.name + ".weight"
        try:
            entry = json.loads(checkpoint.metadata[name])
            kind, data = str(entry["_type"]), entry["_data"]
            if kind not in CLASSES:
                raise LoadError(
                    f"Tensor {name} is of torchao's class {kind[:80]}; only {', '.join(CLASSES)} are supported."
                )
            outputs, inputs = (int(size) for size in data["block_size"])
            bits = int(str(data["target_dtype"]["_data"]).removeprefix("int")) if "target_dtype" in data else 8
        except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
            raise LoadError(f"The header of the file does not describe tensor {name} as torchao does.") from None
        if self._part(linear, "act_pre_scale") in checkpoint:
            raise LoadError(f"Tensor {self._part(linear, 'act_pre_scale')} scales inputs, which is not supported.")
        self._check_blocks(linear, kind, outputs, inputs)
        if not 1 <= bits <= 8:
            raise LoadError(f"Tensor {name} has integers of {bits} bits; only 1 to 8 are supported.")
        return TorchaoClass(kind, bits, outputs, inputs)

    @staticmethod
    def _check_blocks(linear: LinearSpec, kind: str, outputs: int, inputs: int) -> None:
        """Raise LoadError unless weights share scales in a way that kernels have."""
        is_whole = inputs == linear.into and outputs in (1, linear.out) and kind != NIBBLES
        has_groups = 0 < inputs <= linear.into and not inputs % GROUP_MULTIPLE
        if kind == FLOATS:
            fits = has_groups and outputs > 0
        else:
            fits = has_groups and outputs == 1 and not linear.into % inputs
        if not is_whole and not fits:
            raise LoadError(
                f"Tensor {linear.name}.weight has blocks of {outputs} outputs and {inputs} inputs, which are not "
                "supported."
            )


def read_torchao_config(config: dict[str, Any]) -> Callable[[str], TorchaoFormat]:
    """Return a function from layer name to format for a ``quantization_config``. Raises LoadError."""
    if config.get("include_input_output_embeddings"):
        raise LoadError(
            "The checkpoint's quantization_config.include_input_output_embeddings is true; only false is supported."
        )
    torchao = TorchaoFormat()
    return lambda name: torchao
