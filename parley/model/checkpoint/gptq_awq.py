"""Reads checkpoints with 4-bit linear weights that have a scale and a zero point for each group: GPTQ and AWQ.

Eight values are packed into an int32. GPTQ packs along the inputs, first value in the lowest bits: ``qweight``
[in / 8, out], ``qzeros`` [groups, out / 8], ``scales`` [groups, out]; ``g_idx`` [in] assigns inputs to groups. Its
first format stores zero points minus one, subtracted from the packed integers as a whole; ``gptq_v2`` stores them
unchanged. AWQ (gemm) packs along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7: ``qweight`` [in, out / 8], the
rest as in GPTQ but without ``g_idx``. Other layouts are refused with the name of the differing field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import Int4, Linear, Weight
from parley.native import Grouped

EIGHT = 8  # values in an int32
ONES = 0x11111111
PLAIN = [0, 1, 2, 3, 4, 5, 6, 7]  # positions of values 0 to 7 within an integer
MIXED = [0, 4, 1, 5, 2, 6, 3, 7]  # the same for AWQ
UNIT = 8  # group sizes must be multiples of this


@dataclass(frozen=True)
class Gptq:
    """The GPTQ format. ``group`` None: all inputs are one group. ``minus_one``: zero points are stored minus one."""

    group: int | None
    less: bool

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the names of the weight's tensors, with ``g_idx`` last if the checkpoint has it."""
        names = [f"{linear.name}.{part}" for part in ("qweight", "qzeros", "scales")]
        index = linear.name + ".g_idx"
        return names + [index] * (index in checkpoint)

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read the weight, reordered group by group where ``g_idx`` requires it. Raises LoadError."""
        group = min(self.group or linear.into, linear.into)
        groups = -(-linear.into // group)
        words, zeros, scales = self.tensors(checkpoint, linear)[:3]
        packed = checkpoint.tensor(words, _words(linear.into), linear.out, dtype=torch.int32)
        points = checkpoint.tensor(zeros, groups, _words(linear.out), dtype=torch.int32)
        order = self._order(checkpoint, linear, group)
        values = _rows(packed, linear.into)
        if order is not None:
            values = values[:, order]
        return Int4(
            Grouped(
                values,
                checkpoint.tensor(scales, groups, linear.out).float().t().contiguous(),
                _columns(points + ONES if self.less else points, linear.out, PLAIN),
                group,
                order,
            )
        )

    def _order(self, checkpoint: Checkpoint, linear: Linear, group: int) -> torch.Tensor | None:
        """Return the inputs in group order, int64 [in], or None if they already are in that order."""
        name = linear.name + ".g_idx"
        if name not in checkpoint:
            return None
        index = checkpoint.tensor(name, linear.into, dtype=torch.int32)
        plain = torch.arange(linear.into, dtype=torch.int32) // group
        if torch.equal(index, plain) or not index.any():  # some writers leave zeros if nothing was reordered
            return None
        order = index.argsort(stable=True)
        if not torch.equal(index[order], plain):
            raise LoadError(f"Tensor {name} does not put {group} inputs into each group, so the weight cannot be read.")
        return order


@dataclass(frozen=True)
class Awq:
    """The AWQ gemm format. ``group`` None: all inputs are one group."""

    group: int | None

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the names of the weight's tensors."""
        return [f"{linear.name}.{part}" for part in ("qweight", "qzeros", "scales")]

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read the weight. Raises LoadError."""
        group = min(self.group or linear.into, linear.into)
        groups = -(-linear.into // group)
        words, zeros, scales = self.tensors(checkpoint, linear)
        values, points = (
            _columns(checkpoint.tensor(name, count, _words(linear.out), dtype=torch.int32), linear.out, MIXED)
            for name, count in ((words, linear.into), (zeros, groups))
        )
        factors = checkpoint.tensor(scales, groups, linear.out).float().t().contiguous()
        return Int4(Grouped(values, factors, points, group))


def _words(numbers: int) -> int:
    return -(-numbers // EIGHT)


def _rows(words: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack ``count`` values down each column of int32 [m, n], eight per integer: uint8 [n, count]."""
    parts = words.t().flatten().view(torch.uint8)
    return torch.stack((parts & 15, parts >> 4), -1).view(words.shape[1], -1)[:, :count]


def _columns(words: torch.Tensor, count: int, places: list[int]) -> torch.Tensor:
    """Unpack ``count`` values along each row of int32 [m, n], eight per integer at ``places``: uint8 [count, m]."""
    parts = words.t().flatten().view(torch.uint8).view(words.shape[1], -1, 4)
    numbers = torch.empty(words.shape[1], EIGHT, words.shape[0], dtype=torch.uint8)
    for number, place in enumerate(places):
        part = parts[..., place // 2]
        numbers[:, number] = part >> 4 if place % 2 else part & 15
    return numbers.view(-1, words.shape[0])[:count]


def gptq(config: dict[str, Any]) -> Callable[[str], Gptq | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _known(config, ("bits",), 4)
    _known(config, ("pack_dtype",), "int32", None)
    _known(config, ("is_marlin_format",), False, None)
    layout = _known(config, ("checkpoint_format", "format"), "gptq", "gptq_v2", None)
    form = Gptq(_group(config, "group_size"), layout != "gptq_v2")
    skipped: list[re.Pattern[str]] = []
    overrides = config.get("dynamic") or {}
    for rule in overrides if isinstance(overrides, dict) else [str(overrides)]:
        if not rule.startswith("-:"):
            raise _unsupported("dynamic", rule, "rules that begin with -:")
        try:
            skipped.append(re.compile(rule.removeprefix("-:")))
        except re.error:
            raise _unsupported("dynamic", rule, "a pattern") from None
    blocks = config.get("modules_in_block_to_quantize") or []
    inner = tuple("." + name for name in _names(blocks, "modules_in_block_to_quantize"))
    head = config.get("lm_head") is True

    def find(name: str) -> Gptq | None:
        if any(rule.match(name) for rule in skipped):
            return None
        if "layers." not in name:
            return form if head else None
        return form if not inner or name.endswith(inner) else None

    return find


def awq(config: dict[str, Any]) -> Callable[[str], Awq | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _known(config, ("bits", "w_bit"), 4)
    _known(config, ("zero_point",), True)
    _known(config, ("version", "format"), "gemm", None)
    form = Awq(_group(config, "group_size", "q_group_size"))
    skipped = _names(config.get("modules_to_not_convert") or [], "modules_to_not_convert")

    def find(name: str) -> Awq | None:
        return None if "layers." not in name or any(part in name for part in skipped) else form

    return find


def _names(entries: Any, field: str) -> list[str]:
    """Flatten a name, a list of names or a list of such lists."""
    if isinstance(entries, str):
        return [entries]
    if not isinstance(entries, list):
        raise _unsupported(field, entries, "a list of names")
    return [name for entry in entries for name in _names(entry, field)]


def _group(config: dict[str, Any], *fields: str) -> int | None:
    field = next((field for field in fields if field in config), fields[0])
    value = config.get(field)
    if type(value) is not int or (value != -1 and (value < UNIT or value % UNIT)):
        raise _unsupported(field, value, f"-1 or a multiple of {UNIT}")
    return None if value == -1 else value


def _known(config: dict[str, Any], fields: tuple[str, ...], *allowed: Any) -> Any:
    """Return the value of the first field present, which must be one of ``allowed``. Raises LoadError."""
    field = next((field for field in fields if field in config), fields[0])
    value = config.get(field)
    value = value.lower() if isinstance(value, str) else value
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise _unsupported(field, value, " or ".join(str(each) for each in allowed if each is not None))
    return value


def _unsupported(field: str, value: Any, wanted: str) -> LoadError:
    return LoadError(f"The checkpoint's quantization_config.{field} is {value}; only {wanted} is supported.")
