"""Reads checkpoints of bitsandbytes: 4-bit indices into a table (nf4, fp4), or int8 with a scale for each output.

nf4 and fp4: ``weight`` uint8 [numbers / 2, 1] has two numbers in a byte, the first in the high bits, of a weight
[out, in] read row by row; ``weight.absmax`` has the scale of each ``blocksize`` of them. Scales may be quantized as
well: then they are uint8 and select numbers of ``weight.nested_quant_map`` float32 [256], which are multiplied by one
number of ``weight.nested_absmax`` for each ``nested_blocksize`` scales; ``nested_offset`` is added. JSON in bytes
(``weight.quant_state.bitsandbytes__nf4``, or ``__fp4``) has these sizes. int8 (LLM.int8): ``weight`` int8 [out, in],
times ``SCB`` float32 [out] / 127. Layers without these tensors are plain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight
from parley.native.torch_forms.torch_grouped import FP4_NUMBERS, NF4_NUMBERS

# By the name of a table: the kernel's numbers, and their divisor
TABLES = {"nf4": (NF4_NUMBERS, 1.0), "fp4": (FP4_NUMBERS, 12.0)}
BITS8_TENSORS = ("SCB", "weight_format")
STATE_BYTES = 1 << 16  # the most bytes of a weight's JSON


@dataclass(frozen=True)
class QuantState:
    """The JSON of a 4-bit weight: how many numbers share a scale, and how many scales share one, 0 if they are plain.
    ``table``: a name of TABLES."""

    table: str
    block: int
    nested_block: int = 0
    nested_offset: float = 0.0


class BitsAndBytesFormat:
    """The format of a quantized linear layer: nf4, fp4 or int8, depending on which tensors it has."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and of all that describes it."""
        weight = linear.name + ".weight"
        if (table := self._find_table(checkpoint, linear)) is not None:
            parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
            present = [f"{weight}.{part}" for part in parts if f"{weight}.{part}" in checkpoint]
            return [weight, self._state_name(linear, table), *present]
        return [weight] + [name for part in BITS8_TENSORS if (name := f"{linear.name}.{part}") in checkpoint]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return the weight and the tensors of its scales as views of the file. Raises LoadError."""
        weight, table = linear.name + ".weight", self._find_table(checkpoint, linear)
        if table is None:
            return [
                checkpoint.view_tensor(weight, linear.out_features, linear.in_features, dtype=torch.int8),
                checkpoint.view_tensor(f"{linear.name}.SCB", linear.out_features),
            ]
        state = self._read_state(checkpoint, linear, table)
        self._check_numbers(checkpoint, weight + ".quant_map", table)
        scales = linear.out_features * linear.in_features // state.block
        views = [checkpoint.view_tensor(weight, linear.out_features * linear.in_features // 2, 1, dtype=torch.uint8)]
        if not state.nested_block:
            return [*views, checkpoint.view_tensor(weight + ".absmax", scales)]
        return [
            *views,
            checkpoint.view_tensor(weight + ".absmax", scales, dtype=torch.uint8),
            checkpoint.view_tensor(weight + ".nested_absmax", -(-scales // state.nested_block)),
            checkpoint.view_tensor(weight + ".nested_quant_map", 256),
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        values, *scales = self.view_tensors(checkpoint, linear)
        table = self._find_table(checkpoint, linear)
        if table is None:
            zeros = torch.full((linear.out_features, 1), 128, dtype=torch.uint8)
            numbers = (values.short() + 128).to(torch.uint8)
            return GroupedLinearWeight(
                GroupedWeight(numbers, scales[0].float()[:, None] / 127, zeros, linear.in_features, code="int8")
            )
        state = self._read_state(checkpoint, linear, table)
        codes = torch.stack((values >> 4, values & 15), -1).view(linear.out_features, linear.in_features)
        float_scales = self._widen_scales(state, *scales).view(linear.out_features, -1) / TABLES[table][1]
        return GroupedLinearWeight(GroupedWeight(codes, float_scales, None, state.block, code=table))

    @staticmethod
    def _widen_scales(
        state: QuantState,
        scales: torch.Tensor,
        nested_scales: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the scales of all groups: float32 [groups]."""
        if nested_scales is None or numbers is None:
            return scales.float()
        spread = nested_scales.float().repeat_interleave(state.nested_block)[: len(scales)]
        return numbers.float()[scales.int()] * spread + state.nested_offset

    @staticmethod
    def _check_numbers(checkpoint: Checkpoint, name: str, table: str) -> None:
        """Raise LoadError unless the file's table is the one of this name."""
        numbers, divisor = TABLES[table]
        if name in checkpoint and not torch.allclose(
            checkpoint.view_tensor(name, 16).float(), torch.tensor(numbers) / divisor
        ):
            raise LoadError(f"Tensor {name} does not hold the numbers of {table}.")

    def _find_table(self, checkpoint: Checkpoint, linear: LinearSpec) -> str | None:
        """Return the name of the table of a weight, None if it is not of 4 bits."""
        return next((table for table in TABLES if self._state_name(linear, table) in checkpoint), None)

    @staticmethod
    def _state_name(linear: LinearSpec, table: str) -> str:
        return f"{linear.name}.weight.quant_state.bitsandbytes__{table}"

    def _read_state(self, checkpoint: Checkpoint, linear: LinearSpec, table: str) -> QuantState:
        """Read the JSON of a weight. Raises LoadError."""
        name = self._state_name(linear, table)
        size = checkpoint.tensor_shape(name)
        try:
            if len(size) != 1 or size[0] > STATE_BYTES:
                raise ValueError
            fields = json.loads(bytes(checkpoint.view_tensor(name, *size, dtype=torch.uint8).tolist()))
            state = QuantState(
                table,
                int(fields["blocksize"]),
                int(fields.get("nested_blocksize") or 0),
                float(fields.get("nested_offset") or 0),
            )
            shape = [int(size) for size in fields["shape"]]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise LoadError(f"Tensor {name} does not hold the JSON that describes a weight.") from None
        if shape != [linear.out_features, linear.in_features]:
            raise LoadError(
                f"Tensor {name} is of shape {shape}; the config asks for {[linear.out_features, linear.in_features]}."
            )
        if state.block < 1 or state.nested_block < 0 or linear.in_features % state.block:
            raise LoadError(
                f"Tensor {name} has groups of {state.block} numbers, which do not fill {linear.in_features} inputs."
            )
        if state.block % GROUP_MULTIPLE:
            raise LoadError(
                f"Tensor {name} has groups of {state.block} numbers; only multiples of {GROUP_MULTIPLE} are supported."
            )
        return state


def read_bitsandbytes_config(config: dict[str, Any]) -> Callable[[str], BitsAndBytesFormat | None]:
    """Return a function from layer name to format for a ``quantization_config``. Raises LoadError."""
    kind, is_4bit = config.get("bnb_4bit_quant_type", "fp4"), config.get("load_in_4bit") or config.get("_load_in_4bit")
    if is_4bit and not (isinstance(kind, str) and kind in TABLES):
        raise LoadError(
            f"The checkpoint's quantization_config.bnb_4bit_quant_type is {kind}; only {' and '.join(TABLES)} are "
            "supported."
        )
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        storage = config["bnb_4bit_quant_storage"]
        raise LoadError(
            f"The checkpoint's quantization_config.bnb_4bit_quant_storage is {storage}; only uint8 is supported."
        )
    weight_format = BitsAndBytesFormat()
    return lambda name: weight_format
