"""Reads checkpoints in the compressed-tensors format with int8 weights and dynamic int8 activations (W8A8).

A quantised linear layer has ``weight`` int8 [out, in] and ``weight_scale`` [out, 1] or [out], and no zero points. The
config's groups select layers by name, pattern or class; ``ignore`` lists the layers that stay unquantised. Other
schemes of the format are refused with the name of the differing field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import Int8Weight, LinearSpec, LinearWeight

SUPPORTED_FORMATS = ("int-quantized", "naive-quantized")
# The supported values of a group's weights and activations. An absent field has the first value.
WEIGHT_FIELDS = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel",),
    "dynamic": (False, None),
    "group_size": (None, -1),
    "block_structure": (None,),
    "actorder": (None, False),
}
ACTIVATION_FIELDS = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
    "group_size": (None, -1),
    "block_structure": (None,),
}
NameTest = Callable[[str], bool]


class PerChannelInt8:
    """int8 weights with one scale per output."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight and scale tensors."""
        return [linear.name + ".weight", linear.name + ".weight_scale"]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return weight and scale as views of the file. Raises LoadError."""
        weight, scale = self.tensor_names(checkpoint, linear)
        values = checkpoint.view_tensor(weight, linear.out, linear.into, dtype=torch.int8)
        sizes = (linear.out,) if len(checkpoint.tensor_shape(scale)) == 1 else (linear.out, 1)
        return [values, checkpoint.view_tensor(scale, *sizes)]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight, with one scale per output. Raises LoadError."""
        values, scale = self.view_tensors(checkpoint, linear)
        return Int8Weight(values, scale.flatten().float())


PER_CHANNEL = PerChannelInt8()


def read_compressed_tensors(config: dict[str, Any]) -> Callable[[str], PerChannelInt8 | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _require_known(config, "format", SUPPORTED_FORMATS)
    _require_known(config, "quantization_status", ("compressed", None))
    for field in ("kv_cache_scheme", "transform_config"):
        if config.get(field):
            raise _unsupported_field(field, "something", "nothing")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _unsupported_field("sparsity_config.format", sparsity["format"], "dense")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise LoadError("The checkpoint's quantization_config has no config_groups, so its layers cannot be read.")
    targets: list[NameTest] = []
    for name, group in groups.items():
        where = f"config_groups.{name}."
        _require_known(group, "format", (None, *SUPPORTED_FORMATS), where)
        if group.get("output_activations"):
            raise _unsupported_field(where + "output_activations", "something", "nothing")
        for part, fields in (("weights", WEIGHT_FIELDS), ("input_activations", ACTIVATION_FIELDS)):
            if not isinstance(group.get(part), dict):
                raise _unsupported_field(where + part, "nothing", "int8")
            for field, allowed in fields.items():
                _require_known(group[part], field, allowed, f"{where}{part}.")
        targets += _compile_tests(group.get("targets"), where + "targets")
    ignored = _compile_tests(config.get("ignore") or [], "ignore")

    def find_channel_format(name: str) -> PerChannelInt8 | None:
        if any(test(name) for test in ignored) or not any(test(name) for test in targets):
            return None
        return PER_CHANNEL

    return find_channel_format


def _compile_tests(entries: Any, where: str) -> list[NameTest]:
    """Turn a list of names, ``re:`` patterns and classes into predicates over layer names."""
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise LoadError(f"The checkpoint's quantization_config.{where} is not a list of names.")
    names = {entry for entry in entries if not entry.startswith("re:")}
    tests: list[NameTest] = [lambda name: name in names or "Linear" in names]
    for entry in set(entries) - names:
        try:
            pattern = re.compile(entry.removeprefix("re:"))
        except re.error:
            raise LoadError(f"The checkpoint's quantization_config.{where} has a broken pattern {entry}.") from None
        tests.append(partial(_matches_name, pattern))
    return tests


def _matches_name(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.match(name) is not None


def _require_known(fields: dict[str, Any], field: str, allowed: tuple[Any, ...], where: str = "") -> None:
    value = fields.get(field, allowed[0])
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise _unsupported_field(where + field, value, " or ".join(str(each) for each in allowed if each is not None))


def _unsupported_field(field: str, value: Any, supported: str) -> LoadError:
    return LoadError(
        f"The checkpoint's quantization_config.{field} is {value}; only {supported or 'none'} is supported."
    )
