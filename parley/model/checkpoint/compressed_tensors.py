"""Reads checkpoints in the compressed-tensors format: which layers are quantized, and how each is stored.

The config's groups select layers by name, pattern or class; ``ignore`` lists the layers that stay unquantized.
int-quantized: ``weight`` int8 [out, in]. float-quantized and mxfp8: ``fp8.py``. nvfp4 and mxfp4: ``fp4.py``.
pack-quantized: ``weight_packed`` int32, numbers of 2 to 8 bits along the inputs, first in the lowest bits. All have
``weight_scale``: one scale, [out, 1] or [out, groups]; asymmetric ones ``weight_zero_point``, of the same shape or
packed along the outputs; reordered ones ``weight_g_idx`` [in], the group of each input. Only in the scheme of int8
weights with dynamic int8 activations (W8A8) are activations quantized; in all others they keep the dtype of the model.
Other schemes of the format are refused with the name of the differing field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp4 import MXFP4_GROUP, NVFP4_GROUP, Fp4Format
from parley.model.checkpoint.fp8 import BLOCK_MULTIPLE, MXFP8_BLOCK, Fp8Format, read_block
from parley.model.checkpoint.name_patterns import BadPattern, NamePattern, NameRules, NameTest
from parley.model.checkpoint.packed_words import count_groups, input_order, integer_bits, packed_size, unpack_rows
from parley.model.checkpoint.weights import GroupedLinearWeight, Int8Weight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

PLAIN_INTEGERS, PACKED_INTEGERS, FLOATS = "int-quantized", "pack-quantized", "float-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
# The stored forms of the weight types that a format can have. naive-quantized stores any type unpacked.
STORED_FORMS = {
    PLAIN_INTEGERS: {"int": PLAIN_INTEGERS},
    "naive-quantized": {"int": PLAIN_INTEGERS, "float": FLOATS},
    PACKED_INTEGERS: {"int": PACKED_INTEGERS},
    FLOATS: {"float": FLOATS},
    NVFP4: {"float": NVFP4},
    MXFP4: {"float": MXFP4},
    MXFP8: {"float": MXFP8},
}
# The places of transforms that are already part of the weights in the file
STORED_TRANSFORMS = ("weight_input", "weight_output")
# The values of a group's activations that are computed as int8. An absent field has the first value.
INT8_ACTIVATIONS = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
}
LINEAR_CLASS = "Linear"


class PerChannelInt8:
    """int8 weights with one scale per output, for int8 activations."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and scale tensors."""
        return [linear.name + ".weight", linear.name + ".weight_scale"]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return weight and scale as views of the file. Raises LoadError."""
        weight, scale = self.tensor_names(checkpoint, linear)
        values = checkpoint.view_tensor(weight, linear.out_features, linear.in_features, dtype=torch.int8)
        sizes = (linear.out_features,) if len(checkpoint.tensor_shape(scale)) == 1 else (linear.out_features, 1)
        return [values, checkpoint.view_tensor(scale, *sizes)]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight, with one scale per output. Raises LoadError."""
        values, scale = self.view_tensors(checkpoint, linear)
        return Int8Weight(values, scale.flatten().float())


@dataclass(frozen=True)
class IntegerFormat:
    """Integers of ``bits`` in groups, packed into words or each as int8.

    ``group`` None: all inputs are one group. ``one_scale``: all outputs share it. ``indexed``: inputs were reordered.
    """

    bits: int
    packed: bool
    group: int | None
    symmetric: bool
    one_scale: bool = False
    indexed: bool = False

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and its scales, and of zero points and groups of inputs if it has them."""
        names = ["weight_packed" if self.packed else "weight", "weight_scale"]
        names += ["weight_zero_point"] * (not self.symmetric) + ["weight_g_idx"] * self.indexed
        unused = ["weight_shape", "input_scale", "input_zero_point"] + ["weight_zero_point"] * self.symmetric
        names += [name for name in unused if f"{linear.name}.{name}" in checkpoint]
        return [f"{linear.name}.{name}" for name in names]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return weight, scales, zero points and groups of inputs as views of the file. Raises LoadError."""
        weight, scale, *other_names = self.tensor_names(checkpoint, linear)
        shape = self._scale_shape(checkpoint, linear, scale)
        width, dtype = (
            (packed_size(linear.in_features, self.bits), torch.int32)
            if self.packed
            else (linear.in_features, torch.int8)
        )
        views = [
            checkpoint.view_tensor(weight, linear.out_features, width, dtype=dtype),
            checkpoint.view_tensor(scale, *shape),
        ]
        if not self.symmetric:
            zeros = other_names.pop(0)
            # Early versions did not pack zero points.
            if self.packed and len(shape) == 2 and checkpoint.tensor_shape(zeros) != shape:
                rows = packed_size(shape[0], self.bits)
                views.append(checkpoint.view_tensor(zeros, rows, *shape[1:], dtype=torch.int32))
            else:
                views.append(checkpoint.view_tensor(zeros, *shape, dtype=torch.int8))
        if self.indexed:
            views.append(checkpoint.view_tensor(other_names.pop(0), linear.in_features, dtype=torch.int32))
        return views

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight, reordered group by group where that is required. Raises LoadError."""
        stored, scales, *other_tensors = self.view_tensors(checkpoint, linear)
        name, _, *other_names = self.tensor_names(checkpoint, linear)
        if self.packed:
            values = unpack_rows(stored, linear.in_features, self.bits)
        else:
            self._check_range(stored, name)
            values = self._shift_range(stored)
        if not self.symmetric and other_tensors[0].dtype == torch.int8:
            self._check_range(other_tensors[0], other_names[0])
        scales = scales.float().reshape(-1, scales.shape[-1] if scales.dim() > 1 else 1)
        zeros = self._zero_points(scales, *other_tensors[: not self.symmetric])
        group = min(self.group or linear.in_features, linear.in_features)
        order = input_order(linear.name + ".weight_g_idx", group, other_tensors[-1]) if self.indexed else None
        if order is not None:
            values = values[:, order]
        shape, code = (linear.out_features, scales.shape[1]), f"int{integer_bits(self.bits)}"
        return GroupedLinearWeight(GroupedWeight(values, scales.expand(shape), zeros.expand(shape), group, order, code))

    def _check_range(self, numbers: torch.Tensor, name: str) -> None:
        """Raise LoadError if a number has more bits than the config says."""
        if self.bits < 8 and (numbers < -(1 << (self.bits - 1))).logical_or(numbers >= 1 << (self.bits - 1)).any():
            raise LoadError(f"Tensor {name} has integers of more than {self.bits} bits; the file is damaged.")

    def _shift_range(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return signed numbers, int8, as uint8 from 0 on."""
        return (numbers.short() + (1 << (self.bits - 1))).to(torch.uint8)

    def _zero_points(self, scales: torch.Tensor, stored: torch.Tensor | None = None) -> torch.Tensor:
        """Return a zero point for each scale: uint8."""
        if stored is None:
            return torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        if stored.dtype == torch.int8:
            return self._shift_range(stored).view(scales.shape)
        return unpack_rows(stored.t().contiguous(), len(scales), self.bits).t().contiguous()

    def _scale_shape(self, checkpoint: Checkpoint, linear: LinearSpec, name: str) -> tuple[int, ...]:
        """Return the shape that the scales must have; if several shapes mean the same, the one in the file."""
        rows, groups = 1 if self.one_scale else linear.out_features, count_groups(self.group, linear.in_features)
        shapes: list[tuple[int, ...]] = [(rows, groups)]
        if groups == 1:
            shapes += [(rows,)] + [()] * self.one_scale
        return next((shape for shape in shapes if shape == checkpoint.tensor_shape(name)), shapes[0])


WeightFormat = PerChannelInt8 | IntegerFormat | Fp8Format | Fp4Format
PER_CHANNEL = PerChannelInt8()


def read_compressed_tensors(config: dict[str, Any]) -> Callable[[str], WeightFormat | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _require_known(config, "quantization_status", ("compressed", None))
    _require_stored_transforms(config.get("transform_config"))
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _unsupported_field("sparsity_config.format", sparsity["format"], "dense")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise LoadError("The checkpoint's quantization_config has no config_groups, so its layers cannot be read.")
    by_name: list[tuple[str | NameTest, WeightFormat]] = []
    by_class: list[WeightFormat] = []
    for name, group in groups.items():
        where = f"config_groups.{name}."
        weight_format = _read_group(config, group, where)
        targets = _read_entries(group.get("targets"), where + "targets")
        by_name += [(_compile_entry(entry, where + "targets"), weight_format) for entry in targets]
        by_class += [weight_format] * (LINEAR_CLASS in targets)
    ignored = _read_entries(config.get("ignore") or [], "ignore")
    if LINEAR_CLASS in ignored:
        return lambda name: None
    is_ignored = NameRules((_compile_entry(entry, "ignore"), True) for entry in ignored)
    formats = NameRules[WeightFormat | None](by_name)
    usual = by_class[0] if by_class else None
    return lambda name: None if is_ignored.find_value(name, False) else formats.find_value(name, usual)


def _require_stored_transforms(transforms: Any) -> None:
    """Raise LoadError if a ``transform_config`` changes numbers while the model runs."""
    if not transforms:
        return
    try:
        groups = transforms["config_groups"].values()
        locations = {place["location"] for group in groups for place in group["apply"]}
    except (TypeError, KeyError, AttributeError):
        raise _unsupported_field("transform_config", "not an object of groups", "one") from None
    for place in sorted(locations - set(STORED_TRANSFORMS), key=str):
        raise _unsupported_field("transform_config", f"at {place}", " or ".join(STORED_TRANSFORMS))


def _read_group(config: dict[str, Any], group: dict[str, Any], where: str) -> WeightFormat:
    """Return the format of a group's layers. Raises LoadError."""
    stored_as = group.get("format")
    if stored_as is None:
        where_format, stored_as = "format", config.get("format", PLAIN_INTEGERS)
    else:
        where_format = where + "format"
    forms = STORED_FORMS.get(stored_as) if isinstance(stored_as, str) else None
    if forms is None:
        raise _unsupported_field(where_format, stored_as, ", ".join(STORED_FORMS))
    if group.get("output_activations"):
        raise _unsupported_field(where + "output_activations", "something", "nothing")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _unsupported_field(where + "weights", "nothing", "a description")
    where += "weights."
    _require_known(weights, "type", tuple(forms), where)
    _require_known(weights, "dynamic", (False, None), where)
    form = forms[weights.get("type", next(iter(forms)))]
    if form == FLOATS:
        return _read_floats(weights, where)
    if form in (NVFP4, MXFP4):
        size = NVFP4_GROUP if form == NVFP4 else MXFP4_GROUP
        _require_known(weights, "num_bits", (4,), where)
        _require_known(weights, "group_size", (size,), where)
        return Fp4Format(size)
    if form == MXFP8:
        _require_known(weights, "num_bits", (8,), where)
        _require_known(weights, "group_size", MXFP8_BLOCK[1:], where)
        return Fp8Format(MXFP8_BLOCK)
    integers = _read_integers(weights, form == PACKED_INTEGERS, where)
    if _has_int8_activations(group) and integers == IntegerFormat(8, False, None, True):
        return PER_CHANNEL
    return integers


def _has_int8_activations(group: dict[str, Any]) -> bool:
    fields = group.get("input_activations")
    return isinstance(fields, dict) and all(
        fields.get(field, allowed[0]) in allowed for field, allowed in INT8_ACTIVATIONS.items()
    )


def _read_floats(weights: dict[str, Any], where: str) -> Fp8Format:
    _require_known(weights, "num_bits", (8,), where)
    _require_known(weights, "symmetric", (True,), where)
    strategy = weights.get("strategy", "tensor")
    if strategy == "block":
        return Fp8Format(read_block(weights.get("block_structure"), where + "block_structure"))
    if strategy == "group":
        return Fp8Format((1, _group_size(weights, where)))
    _require_known(weights, "strategy", ("tensor", "channel", "block", "group"), where)
    return Fp8Format()


def _read_integers(weights: dict[str, Any], packed: bool, where: str) -> IntegerFormat:
    _require_known(weights, "num_bits", tuple(range(2, 9)), where)
    _require_known(weights, "symmetric", (True, False), where)
    _require_known(weights, "strategy", ("channel", "group", "tensor"), where)
    actorder = weights.get("actorder")
    if isinstance(actorder, str):
        actorder = actorder.lower()
    if actorder not in (None, False, "weight", "static", "group", "dynamic"):
        raise _unsupported_field(where + "actorder", actorder, "weight or group")
    strategy = weights.get("strategy", "channel")
    return IntegerFormat(
        bits=weights.get("num_bits", 8),
        packed=packed,
        group=_group_size(weights, where) if strategy == "group" else None,
        symmetric=weights.get("symmetric", True),
        one_scale=strategy == "tensor",
        indexed=actorder in ("group", "dynamic") and strategy == "group",
    )


def _group_size(weights: dict[str, Any], where: str) -> int:
    size = weights.get("group_size")
    if type(size) is not int or size < BLOCK_MULTIPLE or size % BLOCK_MULTIPLE:
        raise _unsupported_field(where + "group_size", size, f"a multiple of {BLOCK_MULTIPLE}")
    return size


def _read_entries(entries: Any, where: str) -> list[str]:
    """Return a list of names, ``re:`` patterns and classes. Raises LoadError if it is none."""
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise LoadError(f"The checkpoint's quantization_config.{where} is not a list of names.")
    return entries


def _compile_entry(entry: str, where: str) -> str | NameTest:
    """Turn a ``re:`` pattern into a predicate over names of linear layers. Raises LoadError if it is broken."""
    if not entry.startswith("re:"):
        return entry
    try:
        return NamePattern(entry.removeprefix("re:")).matches_start
    except BadPattern:
        raise LoadError(
            f"The checkpoint's quantization_config.{where} has a broken or unsupported pattern {entry}."
        ) from None


def _require_known(fields: dict[str, Any], field: str, allowed: tuple[Any, ...], where: str = "") -> None:
    value = fields.get(field, allowed[0])
    if not any(value is option or (type(value) is type(option) and value == option) for option in allowed):
        raise _unsupported_field(
            where + field, value, " or ".join(str(option) for option in allowed if option is not None)
        )


def _unsupported_field(field: str, value: Any, supported: str) -> LoadError:
    return LoadError(
        f"The checkpoint's quantization_config.{field} is {value}; only {supported or 'none'} is supported."
    )
