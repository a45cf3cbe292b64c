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
from parley.model.checkpoint.weights import Int8, Linear, Weight

FORMATS = ("int-quantized", "naive-quantized")
# The supported values of a group's weights and activations. An absent field has the first value.
WEIGHTS = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel",),
    "dynamic": (False, None),
    "group_size": (None, -1),
    "block_structure": (None,),
    "actorder": (None, False),
}
ACTIVATIONS = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
    "group_size": (None, -1),
    "block_structure": (None,),
}
Test = Callable[[str], bool]


class Channels:
    """int8 weights with one scale per output."""

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the names of the weight and scale tensors."""
        return [linear.name + ".weight", linear.name + ".weight_scale"]

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read the weight, with one scale per output. Raises LoadError."""
        weight, scale = self.tensors(checkpoint, linear)
        values = checkpoint.tensor(weight, linear.out, linear.into, dtype=torch.int8)
        sizes = (linear.out,) if len(checkpoint.shape(scale)) == 1 else (linear.out, 1)
        return Int8(values, checkpoint.tensor(scale, *sizes).flatten().float())


CHANNELS = Channels()


def read(config: dict[str, Any]) -> Callable[[str], Channels | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _known(config, "format", FORMATS)
    _known(config, "quantization_status", ("compressed", None))
    for field in ("kv_cache_scheme", "transform_config"):
        if config.get(field):
            raise _unsupported(field, "something", "nothing")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config.format", sparsity["format"], "dense")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise LoadError("The checkpoint's quantization_config has no config_groups, so its layers cannot be read.")
    targets: list[Test] = []
    for name, group in groups.items():
        where = f"config_groups.{name}."
        _known(group, "format", (None, *FORMATS), where)
        if group.get("output_activations"):
            raise _unsupported(where + "output_activations", "something", "nothing")
        for part, fields in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
            if not isinstance(group.get(part), dict):
                raise _unsupported(where + part, "nothing", "int8")
            for field, allowed in fields.items():
                _known(group[part], field, allowed, f"{where}{part}.")
        targets += _tests(group.get("targets"), where + "targets")
    ignored = _tests(config.get("ignore") or [], "ignore")

    def find(name: str) -> Channels | None:
        if any(test(name) for test in ignored) or not any(test(name) for test in targets):
            return None
        return CHANNELS

    return find


def _tests(entries: Any, where: str) -> list[Test]:
    """Turn a list of names, ``re:`` patterns and classes into predicates over layer names."""
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise LoadError(f"The checkpoint's quantization_config.{where} is not a list of names.")
    names = {entry for entry in entries if not entry.startswith("re:")}
    tests: list[Test] = [lambda name: name in names or "Linear" in names]
    for entry in set(entries) - names:
        try:
            pattern = re.compile(entry.removeprefix("re:"))
        except re.error:
            raise LoadError(f"The checkpoint's quantization_config.{where} has a broken pattern {entry}.") from None
        tests.append(partial(_fits, pattern))
    return tests


def _fits(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.match(name) is not None


def _known(fields: dict[str, Any], field: str, allowed: tuple[Any, ...], where: str = "") -> None:
    value = fields.get(field, allowed[0])
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise _unsupported(where + field, value, " or ".join(str(each) for each in allowed if each is not None))


def _unsupported(field: str, value: Any, wanted: str) -> LoadError:
    return LoadError(f"The checkpoint's quantization_config.{field} is {value}; only {wanted or 'none'} is supported.")
