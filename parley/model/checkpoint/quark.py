"""Reads checkpoints of AMD's Quark. Its number formats have the same layouts as in other methods.

``layer_quant_config`` describes layers by name or glob, ``global_quant_config`` all others. Only their ``weight`` is
used: activations and the KV cache keep the dtype of the model. Plain layers need no entry.

FP8 and MXFP8: ``weight`` float8_e4m3fn with ``weight_scale``, as in ``fp8.py``. int8: ``weight`` int8 with
``weight_scale``: one, or one for each output. MXFP4: ``weight`` uint8 [out, in / 2] with ``weight_scale`` uint8 [out,
in / 32], as in ``fp4.py``; GPT-OSS keeps its experts as it is published. int4, in two's complement, and uint4:
``weight`` int32 [in, out / 8] with ``weight_scale`` [groups, out], and ``weight_zero_point`` [groups, out / 8] except
for symmetric int4; both packed as AWQ's or, with ``export.pack_method`` order, first value in the lowest bits.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any

from parley.model.checkpoint.compressed_tensors import IntegerFormat
from parley.model.checkpoint.files import LoadError
from parley.model.checkpoint.fp4 import MXFP4_GROUP, Fp4Format
from parley.model.checkpoint.fp8 import Fp8Format, read_block
from parley.model.checkpoint.gptq_awq import AWQ_ORDER, AwqFormat
from parley.model.checkpoint.name_patterns import NameRules, NameTest
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE

GLOB_MARKS = set("*?[")  # a name with any of these is a pattern
PACK_ORDERS = {"reorder": AWQ_ORDER, "order": tuple(range(8))}
INT4_PARTS = ("weight", "weight_zero_point", "weight_scale")
USUAL_BLOCK = [128, 128]
# The values of ch_axis: the dimension of a weight that scales belong to, or the one that is divided into groups
SCALED_AXES = {"per_channel": (0,), "per_group": (1, -1)}
QuarkFormat = Fp8Format | Fp4Format | IntegerFormat | AwqFormat


def read_quark_config(config: dict[str, Any]) -> Callable[[str], QuarkFormat | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    pack_order = _read_pack_order(config)
    rules = NameRules(
        (_compile_glob(name), _read_layer(entry, f"layer_quant_config.{name}", pack_order))
        for name, entry in _read_object(config.get("layer_quant_config"), "layer_quant_config").items()
    )
    by_type = _read_object(config.get("layer_type_quant_config"), "layer_type_quant_config")
    field = "layer_type_quant_config.Linear" if "Linear" in by_type else "global_quant_config"
    usual = _read_layer(by_type.get("Linear", config.get("global_quant_config")), field, pack_order)

    return lambda name: rules.find_value(name, usual)


def _compile_glob(entry: str) -> str | NameTest:
    return partial(fnmatch.fnmatchcase, pat=entry) if GLOB_MARKS & set(entry) else entry


def _read_pack_order(config: dict[str, Any]) -> tuple[int, ...]:
    method = _read_object(config.get("export"), "export").get("pack_method", "reorder")
    if not isinstance(method, str) or method not in PACK_ORDERS:
        raise _unsupported_option("export.pack_method", method, " or ".join(PACK_ORDERS))
    return PACK_ORDERS[method]


def _read_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise _unsupported_option(field, value, "an object")
    return value or {}


def _read_layer(entry: Any, field: str, pack_order: tuple[int, ...]) -> QuarkFormat | None:
    """Return the format that an entry of the config describes, None for plain weights. Raises LoadError."""
    weight = _read_object(_read_object(entry, field).get("weight"), field + ".weight")
    if not weight:
        return None
    field += ".weight"
    kind, scheme = str(weight.get("dtype")), str(weight.get("qscheme"))
    if (kind, scheme) not in READERS:
        supported = ", ".join(f"{dtype} {scheme}" for dtype, scheme in READERS)
        raise LoadError(
            f"The checkpoint's quantization_config.{field} has numbers of {kind} {scheme}; only {supported} are "
            "supported."
        )
    axis, axes = weight.get("ch_axis"), SCALED_AXES.get(scheme, ())
    if axes and axis is not None and axis not in axes:
        raise _unsupported_option(field + ".ch_axis", axis, " or ".join(map(str, axes)))
    if weight.get("scale_format") == "e5m3":  # its scales are bytes, too
        raise _unsupported_option(field + ".scale_format", "e5m3", "e8m0 or float")
    return READERS[kind, scheme](weight, field, pack_order)


def _read_fp8(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    return Fp8Format()


def _read_fp8_blocks(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    return Fp8Format(read_block(weight.get("block_size") or USUAL_BLOCK, field + ".block_size"))


def _read_fp8_groups(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    return Fp8Format((1, _read_group(weight, field)))


def _read_int8(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    if weight.get("symmetric") is not True:
        raise _unsupported_option(field + ".symmetric", weight.get("symmetric"), "true")
    return IntegerFormat(8, packed=False, group=None, symmetric=True, one_scale=weight["qscheme"] == "per_tensor")


def _read_mxfp4(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    if weight.get("scale_format") != "e8m0":
        raise _unsupported_option(field + ".scale_format", weight.get("scale_format"), "e8m0")
    if weight.get("group_size") != MXFP4_GROUP:
        raise _unsupported_option(field + ".group_size", weight.get("group_size"), str(MXFP4_GROUP))
    return Fp4Format(MXFP4_GROUP, "weight")


def _read_int4(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    is_symmetric = weight.get("symmetric")
    if not isinstance(is_symmetric, bool):
        raise _unsupported_option(field + ".symmetric", is_symmetric, "true or false")
    return AwqFormat(_read_group(weight, field), INT4_PARTS, pack_order, is_signed=True, has_zeros=not is_symmetric)


def _read_uint4(weight: dict[str, Any], field: str, pack_order: tuple[int, ...]) -> QuarkFormat:
    return AwqFormat(_read_group(weight, field), INT4_PARTS, pack_order)


def _read_group(weight: dict[str, Any], field: str) -> int:
    size = weight.get("group_size")
    if type(size) is not int or size < GROUP_MULTIPLE or size % GROUP_MULTIPLE:
        raise _unsupported_option(field + ".group_size", size, f"a multiple of {GROUP_MULTIPLE}")
    return size


# By the words for the numbers of a weight, and for what shares a scale
READERS: dict[tuple[str, str], Callable[[dict[str, Any], str, tuple[int, ...]], QuarkFormat]] = {
    ("fp8_e4m3", "per_tensor"): _read_fp8,
    ("fp8_e4m3", "per_channel"): _read_fp8,
    ("fp8_e4m3", "per_block"): _read_fp8_blocks,
    ("fp8_e4m3", "per_group"): _read_fp8_groups,
    ("int8", "per_tensor"): _read_int8,
    ("int8", "per_channel"): _read_int8,
    ("fp4", "per_group"): _read_mxfp4,
    ("int4", "per_group"): _read_int4,
    ("uint4", "per_group"): _read_uint4,
}


def _unsupported_option(field: str, value: Any, supported: str) -> LoadError:
    return LoadError(f"The checkpoint's quantization_config.{field} is {value}; only {supported} is supported.")
