"""Reads checkpoints with linear weights of few bits that have a scale and a zero point for each group: GPTQ and AWQ.

GPTQ has 2, 3, 4 or 8 bits, packed into int32 along the inputs, first value in the lowest bits (32 values of 3 bits into
three integers, so that some cross them):
``qweight`` [in * bits / 32, out], ``qzeros`` [groups, out * bits / 32], ``scales`` [groups, out]; ``g_idx`` [in]
assigns inputs to groups. Its first format stores zero points minus one, subtracted from the packed integers as a whole;
``gptq_v2`` stores them unchanged. AWQ has 4 bits. Its version gemm packs along the outputs, in the order 0, 2, 4, 6, 1,
3, 5, 7: ``qweight`` [in, out / 8], the rest as in GPTQ but without ``g_idx``. Version gemv packs along the inputs and
groups, first value in the lowest bits: ``qweight`` [out, in / 8], ``qzeros`` [out, words], ``scales`` [out, 8 * words],
where more groups than there are may follow. Other layouts are refused with the name of the differing field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.name_patterns import BadPattern, NamePattern, NameRules, NameTest, PatternRules
from parley.model.checkpoint.packed_words import (
    GROUP_MULTIPLE,
    count_groups,
    input_order,
    packed_size,
    unpack_crossing,
    unpack_rows,
)
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight
from parley.native import GroupedWeight

ONE_IN_EACH = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # by bits
GPTQ_BITS = (2, 3, 4, 8)
AWQ_BITS = 4
SIGN_BIT = 1 << (AWQ_BITS - 1)
PLAIN_BITS = 16  # AutoRound's word for layers that are not quantized
PATTERN_MARKS = set("*+?^$()[]{}|\\")  # a name with any of these is a pattern
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # positions of values 0 to 7 within an integer
GEMV_INPUTS = 128  # groups of fewer inputs are padded, so that a row's groups are whole words for as many inputs


@dataclass(frozen=True)
class GptqFormat:
    """The GPTQ format. ``group`` None: all inputs are one group. ``minus_one``: zero points are stored minus one."""

    bits: int
    group: int | None
    minus_one: bool

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight's tensors, with ``g_idx`` last if the checkpoint has it."""
        names = [f"{linear.name}.{part}" for part in ("qweight", "qzeros", "scales")]
        index = linear.name + ".g_idx"
        return names + [index] * (index in checkpoint)

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return words, zero points and scales, and ``g_idx`` if there is one, as views of the file.

        Raises LoadError.
        """
        words, zeros, scales, *index = self.tensor_names(checkpoint, linear)
        groups = count_groups(self.group, linear.in_features)
        return [
            checkpoint.view_tensor(
                words, self._packed_size(linear.in_features), linear.out_features, dtype=torch.int32
            ),
            checkpoint.view_tensor(zeros, groups, self._packed_size(linear.out_features), dtype=torch.int32),
            checkpoint.view_tensor(scales, groups, linear.out_features),
            *(checkpoint.view_tensor(name, linear.in_features, dtype=torch.int32) for name in index),
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight, reordered group by group where ``g_idx`` requires it. Raises LoadError."""
        packed, zero_points, scales, *index = self.view_tensors(checkpoint, linear)
        group = min(self.group or linear.in_features, linear.in_features)
        order = input_order(linear.name + ".g_idx", group, *index) if index else None
        values = self._unpack_words(packed.t(), linear.in_features)
        if order is not None:
            values = values[:, order]
        if self.minus_one and self.bits in ONE_IN_EACH:
            zero_points = zero_points + ONE_IN_EACH[self.bits]
        zeros = self._unpack_words(zero_points, linear.out_features)
        if self.minus_one and self.bits not in ONE_IN_EACH:  # of numbers that cross words, each is stored less one
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return GroupedLinearWeight(
            GroupedWeight(
                values,
                scales.float().t().contiguous(),
                zeros.t().contiguous(),
                group,
                order,
                f"int{self.bits}",
            )
        )

    def _packed_size(self, numbers: int) -> int:
        return -(-numbers * 3 // 32) if self.bits == 3 else packed_size(numbers, self.bits)

    def _unpack_words(self, words: torch.Tensor, count: int) -> torch.Tensor:
        return (unpack_crossing if self.bits == 3 else unpack_rows)(words, count, self.bits)


@dataclass(frozen=True)
class AwqFormat:
    """The AWQ gemm format. ``group`` None: all inputs are one group. ``order``: positions of values within an integer.

    ``parts``: the name suffixes of words, zero points and scales. ``is_signed``: values and zero points are in
    two's complement. ``has_zeros``: zero points are used; else the file's are ignored and
    all are 0.
    """

    group: int | None
    parts: tuple[str, str, str] = ("qweight", "qzeros", "scales")
    order: tuple[int, ...] = AWQ_ORDER
    is_signed: bool = False
    has_zeros: bool = True

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight's tensors; zero points that are not used come last."""
        words, zeros, scales = (f"{linear.name}.{part}" for part in self.parts)
        return [words, scales] + [zeros] * (self.has_zeros or zeros in checkpoint)

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return words and scales, and zero points unless there are none, as views of the file. Raises LoadError."""
        words, scales, *zeros = self.tensor_names(checkpoint, linear)
        groups, packed = count_groups(self.group, linear.in_features), packed_size(linear.out_features, AWQ_BITS)
        views = [
            checkpoint.view_tensor(words, linear.in_features, packed, dtype=torch.int32),
            checkpoint.view_tensor(scales, groups, linear.out_features),
        ]
        return views + [
            checkpoint.view_tensor(name, groups, packed, dtype=torch.int32) for name in zeros if self.has_zeros
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        words, scales, *zeros = self.view_tensors(checkpoint, linear)
        float_scales, group = scales.float().t().contiguous(), min(self.group or linear.in_features, linear.in_features)
        values = _unpack_awq(words, linear.out_features, self.order)
        points = (
            _unpack_awq(zeros[0], linear.out_features, self.order)
            if zeros
            else torch.zeros_like(float_scales, dtype=torch.uint8)
        )
        if self.is_signed:  # both from 0 on
            values, points = values ^ SIGN_BIT, points ^ SIGN_BIT
        return GroupedLinearWeight(GroupedWeight(values, float_scales, points, group))


@dataclass(frozen=True)
class AwqGemvFormat:
    """The AWQ gemv format. ``group`` None: all inputs are one group."""

    group: int | None

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the weight's tensors."""
        return [f"{linear.name}.{part}" for part in ("qweight", "qzeros", "scales")]

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return words, zero points and scales as views of the file, the latter for more groups than there are.

        Raises LoadError.
        """
        words, zeros, scales = self.tensor_names(checkpoint, linear)
        multiple = max(1, GEMV_INPUTS // (self.group or linear.in_features))
        width = -(-packed_size(count_groups(self.group, linear.in_features), AWQ_BITS) // multiple) * multiple
        return [
            checkpoint.view_tensor(
                words, linear.out_features, packed_size(linear.in_features, AWQ_BITS), dtype=torch.int32
            ),
            checkpoint.view_tensor(zeros, linear.out_features, width, dtype=torch.int32),
            checkpoint.view_tensor(scales, linear.out_features, width * (32 // AWQ_BITS)),
        ]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        words, zeros, scales = self.view_tensors(checkpoint, linear)
        group = min(self.group or linear.in_features, linear.in_features)
        groups = count_groups(self.group, linear.in_features)
        values, float_scales = unpack_rows(words, linear.in_features, AWQ_BITS), scales[:, :groups].float()
        return GroupedLinearWeight(GroupedWeight(values, float_scales, unpack_rows(zeros, groups, AWQ_BITS), group))


AWQ_VERSIONS: dict[str, Callable[[int | None], AwqFormat | AwqGemvFormat]] = {"gemm": AwqFormat, "gemv": AwqGemvFormat}


def _unpack_awq(words: torch.Tensor, count: int, order: tuple[int, ...]) -> torch.Tensor:
    """Unpack ``count`` values along each row of int32 [m, n], eight per integer at ``order``: uint8 [count, m]."""
    parts = words.t().flatten().view(torch.uint8).view(words.shape[1], -1, 4)
    numbers = torch.empty(words.shape[1], len(order), words.shape[0], dtype=torch.uint8, device=words.device)
    for target, position in enumerate(order):
        part = parts[..., position // 2]
        numbers[:, target] = part >> 4 if position % 2 else part & 15
    return numbers.view(-1, words.shape[0])[:count]


def read_gptq_config(config: dict[str, Any]) -> Callable[[str], GptqFormat | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    bits = _known_option(config, ("bits",), *GPTQ_BITS)
    _known_option(config, ("pack_dtype",), "int32", None)
    _known_option(config, ("is_marlin_format",), False, None)
    layout = _known_option(config, ("checkpoint_format", "format"), "gptq", "gptq_v2", None)
    weight_format = GptqFormat(bits, _group_size(config, "group_size"), layout != "gptq_v2")
    rules: list[tuple[str, GptqFormat | None]] = []
    overrides = config.get("dynamic") or {}
    if not isinstance(overrides, dict):
        raise _unsupported_option("dynamic", overrides, "an object of rules")
    for rule, own in overrides.items():
        pattern = rule.removeprefix("-:").removeprefix("+:")
        if rule.startswith("-:"):
            rules.append((pattern, None))
        elif isinstance(own, dict):
            merged = {**config, **own}
            own_bits = _known_option(merged, ("bits",), *GPTQ_BITS)
            rules.append((pattern, GptqFormat(own_bits, _group_size(merged, "group_size"), weight_format.minus_one)))
        else:
            raise _unsupported_option("dynamic", own, "an object for each rule that does not begin with -:")
    try:
        overriding = PatternRules(rules)
    except BadPattern as error:
        raise _unsupported_option("dynamic", error, "a pattern") from None
    blocks = config.get("modules_in_block_to_quantize") or []
    suffixes = tuple("." + name for name in _flatten_names(blocks, "modules_in_block_to_quantize"))
    heads = ("lm_head",) * (config.get("lm_head") is True)

    def find_gptq_format(name: str) -> GptqFormat | None:
        usual = weight_format if not suffixes or name.endswith(suffixes) or name in heads else None
        return overriding.find_value(name, usual)

    return find_gptq_format


def read_awq_config(config: dict[str, Any]) -> Callable[[str], AwqFormat | AwqGemvFormat | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config``. Raises LoadError."""
    _known_option(config, ("bits", "w_bit"), 4)
    if config.get("zero_point") is False:
        raise LoadError(
            "The checkpoint has AWQ weights without zero points (quantization_config.zero_point is false), which "
            "are not supported; serve one with zero_point true, or the plain model with --quantization int4."
        )
    _known_option(config, ("zero_point",), True)
    version = _known_option(config, ("version", "format"), *AWQ_VERSIONS, None)
    weight_format = AWQ_VERSIONS[version or "gemm"](_group_size(config, "group_size", "q_group_size"))
    skipped = _flatten_names(config.get("modules_to_not_convert") or [], "modules_to_not_convert")
    return lambda name: None if any(part in name for part in skipped) else weight_format


def read_auto_round_config(config: dict[str, Any]) -> Callable[[str], GptqFormat | AwqFormat | None]:
    """Return a function from layer name to format, None if plain, for a ``quantization_config`` of AutoRound.

    Its tensors are those of GPTQ or AWQ. ``extra_config`` gives layers bits and groups of their own, by name or
    pattern; 16 bits are plain. Raises LoadError.
    """
    _known_option(config, ("data_type",), "int", None)
    packing = _known_option(
        config, ("packing_format",), "auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", None
    )

    def read_own(own: dict[str, Any]) -> GptqFormat | AwqFormat | None:
        if type(bits := own.get("bits")) is int and bits >= PLAIN_BITS:
            return None
        if packing == "auto_round:auto_awq":
            _known_option(own, ("bits",), AWQ_BITS)
            return AwqFormat(_group_size(own, "group_size"))
        return GptqFormat(_known_option(own, ("bits",), *GPTQ_BITS), _group_size(own, "group_size"), True)

    usual, extra = read_own(config), config.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(own, dict) for own in extra.values()):
        raise _unsupported_option("extra_config", extra, "an object of objects")
    rules: list[tuple[str | NameTest, GptqFormat | AwqFormat | None]] = []
    by_name = {name: read_own({**config, **own}) for name, own in extra.items()}
    rules += by_name.items()
    for name in by_name:
        try:
            rules += [(NamePattern(name).is_found, by_name[name])] if PATTERN_MARKS & set(name) else []
        except BadPattern:
            raise _unsupported_option("extra_config", name, "a name or a pattern") from None
    table = NameRules(rules)
    return lambda name: table.find_value(name, usual)


def _flatten_names(entries: Any, field: str) -> list[str]:
    """Flatten a name, a list of names or a list of such lists."""
    if isinstance(entries, str):
        return [entries]
    if not isinstance(entries, list):
        raise _unsupported_option(field, entries, "a list of names")
    return [name for entry in entries for name in _flatten_names(entry, field)]


def _group_size(config: dict[str, Any], *fields: str) -> int | None:
    field = next((field for field in fields if field in config), fields[0])
    value = config.get(field)
    if type(value) is not int or (value != -1 and (value < GROUP_MULTIPLE or value % GROUP_MULTIPLE)):
        raise _unsupported_option(field, value, f"-1 or a multiple of {GROUP_MULTIPLE}")
    return None if value == -1 else value


def _known_option(config: dict[str, Any], fields: tuple[str, ...], *allowed: Any) -> Any:
    """Return the value of the first field present, which must be one of ``allowed``. Raises LoadError."""
    field = next((field for field in fields if field in config), fields[0])
    value = config.get(field)
    value = value.lower() if isinstance(value, str) else value
    if not any(type(value) is type(option) and value == option for option in allowed):
        raise _unsupported_option(field, value, " or ".join(str(option) for option in allowed if option is not None))
    return value


def _unsupported_option(field: str, value: Any, supported: str) -> LoadError:
    return LoadError(f"The checkpoint's quantization_config.{field} is {value}; only {supported} is supported.")
