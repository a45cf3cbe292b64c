"""Which weights are quantized and how, from the checkpoint's own config and the setting at start.

A checkpoint's ``quantization_config`` names a method. The method's config reader returns a function from the name of a
linear layer to the ``WeightFormat`` of its weight, or None for a plain weight. A format reads a ``LinearWeight``; from
there on no code needs to know how it was stored. Every LoadError message names the unsupported field.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from parley.model.checkpoint import (
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq_awq,
    hqq,
    mlx,
    modelopt,
    quark,
    torchao,
)
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.gguf_blocks import grouped_bits
from parley.model.checkpoint.stacked import StackedFormat, StackedFp8Format, StackedMxfp4Format
from parley.model.checkpoint.weights import (
    GgufBlockWeight,
    GroupedLinearWeight,
    Int8Weight,
    LinearSpec,
    LinearWeight,
    PlainWeight,
)

QUANTIZATION_SETTINGS = ("none", "int8", "int4")  # values of the setting
MLX_METHOD = "mlx"  # MLX's configs have no name of a method
MAX_RULES = 1 << 14  # entries of a list or object of a config; each may be tried for each layer
MAX_ALL_RULES = 2 * MAX_RULES  # names and patterns in all of them
GGUF_METHOD = "gguf"  # each tensor of a GGUF file has its own format, which the file states
MIN_WEIGHT_BYTES = {"int8": 1.0, "int4": 0.53}  # the least bytes of a weight that is quantized while loading


class WeightFormat(Protocol):
    """The storage format of a linear layer's weight."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight, without the bias."""

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return the weight's tensors as views of the file. Raises LoadError if shapes or types are not as expected."""

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""


def read_plain_weight(
    checkpoint: Checkpoint, name: str, out_features: int, in_features: int
) -> PlainWeight | GgufBlockWeight:
    """Read a weight that is one tensor [out_features, in_features], of numbers or of blocks. Raises LoadError."""
    if (blocks := checkpoint.block_type(name)) is not None:
        return GgufBlockWeight(checkpoint.view_blocks(name, out_features, in_features), blocks)
    return PlainWeight(checkpoint.view_tensor(name, out_features, in_features))


class PlainFormat:
    """The plain format: one tensor [out, in] of floating-point numbers, or of a GGUF file's blocks of them."""

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the name of the weight tensor."""
        return [linear.name + ".weight"]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        if linear.transposed:
            return PlainWeight(checkpoint.view_tensor(linear.name + ".weight", *linear.stored_shape).T)
        return read_plain_weight(checkpoint, linear.name + ".weight", linear.out_features, linear.in_features)


# The config reader of each quant_method. It raises LoadError.
METHOD_READERS: dict[str, Callable[[dict[str, Any]], Callable[[str], WeightFormat | None]]] = {
    "compressed-tensors": compressed_tensors.read_compressed_tensors,
    "gptq": gptq_awq.read_gptq_config,
    "awq": gptq_awq.read_awq_config,
    "auto-round": gptq_awq.read_auto_round_config,
    "modelopt": modelopt.read_modelopt_config,
    "quark": quark.read_quark_config,
    "bitnet": bitnet.read_bitnet_config,
    "bitsandbytes": bitsandbytes.read_bitsandbytes_config,
    "hqq": hqq.read_hqq_config,
    "torchao": torchao.read_torchao_config,
    "fp8": fp8.read_fp8_config,
    "fbgemm_fp8": fp8.read_fp8_config,
    "mxfp8": fp8.read_fp8_config,
    "mxfp4": lambda section: lambda name: None,  # quantizes experts only
    MLX_METHOD: mlx.read_mlx_config,
    GGUF_METHOD: lambda section: lambda name: None,
}
# The format of tensors that hold the weights of all experts, for each quant_method that quantizes them.
STACKED_FORMATS: dict[str, Callable[[dict[str, Any]], StackedFormat]] = {
    "mxfp4": lambda section: StackedMxfp4Format(),
    "quark": lambda section: StackedMxfp4Format(),
    "torchao": lambda section: torchao.StackedTorchaoFormat(),
    MLX_METHOD: lambda section: mlx.StackedMlxFormat(mlx.read_mlx_pairs(section)),
    "fp8": lambda section: StackedFp8Format(fp8.read_config_block(section)),
    "mxfp8": lambda section: StackedFp8Format(fp8.read_config_block(section)),
}
PLAIN_FORMAT = PlainFormat()


@dataclass(frozen=True)
class Quantization:
    """The format of each linear layer, and whether plain layers are quantized while loading.

    ``stacked_format``: of tensors that hold the weights of all experts; None: they are plain. ``split_heads``: of the
    layer that projects latents to keys and values, if it is stored as two.
    """

    method: str | None  # quant_method of the checkpoint's config
    setting: str  # one of QUANTIZATION_SETTINGS
    find_format: Callable[[str], WeightFormat | None]
    stacked_format: StackedFormat | None = None
    split_heads: mlx.SplitHeadsFormat = field(default_factory=mlx.SplitHeadsFormat)

    def __bool__(self) -> bool:
        return self.method is not None or self.setting != "none"

    def _stored_format(self, checkpoint: Checkpoint, linear: LinearSpec) -> WeightFormat | None:
        """Return the format of a linear layer, None if its weight is plain.

        Configs list unquantized layers by names that may differ from those in the file, for example because of another
        prefix. So a weight of plain numbers is plain whatever the config says.
        """
        if checkpoint.has_plain_numbers(linear.name + ".weight"):
            return None
        return self.split_heads if self.split_heads.is_stored(checkpoint, linear) else self.find_format(linear.name)

    def stored_tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        return (self._stored_format(checkpoint, linear) or PLAIN_FORMAT).tensor_names(checkpoint, linear)

    def check_stored_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> None:
        """Check shapes and types of a linear layer's weight without reading it. Raises LoadError."""
        if (stored_format := self._stored_format(checkpoint, linear)) is not None:
            stored_format.view_tensors(checkpoint.without_data(), linear)
        else:
            checkpoint.check_tensor(linear.name + ".weight", *linear.stored_shape)

    def read_stored_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read a linear layer's weight. Raises LoadError."""
        return (self._stored_format(checkpoint, linear) or PLAIN_FORMAT).read_weight(checkpoint, linear)

    def read_embedding(self, checkpoint: Checkpoint, table: LinearSpec) -> PlainWeight | GgufBlockWeight | mlx.MlxRows:
        """Return an embedding table as it is stored. Raises LoadError."""
        stored_format = self._stored_format(checkpoint, table)
        if isinstance(stored_format, mlx.MlxFormat):
            return stored_format.view_rows(checkpoint, table)
        return read_plain_weight(checkpoint, table.name + ".weight", table.out_features, table.in_features)

    def quantize_plain(self, weight: LinearWeight, *, head: bool) -> LinearWeight:
        """Quantize a plain weight if requested. In a quantized checkpoint, that is the head alone.

        The head is never quantized to 4 bits, because its errors change directly which of several likely tokens is
        best.
        """
        if not isinstance(weight, PlainWeight) or self.setting == "none" or (self.method is not None and not head):
            return weight
        return (
            GroupedLinearWeight.from_float(weight.values)
            if self.setting == "int4" and not head
            else Int8Weight.from_float(weight.values)
        )

    @property
    def extra_tolerance(self) -> float:
        """The extra tolerance of the numeric check, as a relative error of the logits.

        The check quantizes activations as the decoder does, but if a number lies near the middle between two steps,
        the last bit of bfloat16 decides the rounding. This caused errors of 0.02 to 0.07 on models of 2 to 24 layers
        with random weights and of 0.01 on a trained one; a wrongly read layer causes errors of 0.5 and more.
        """
        return 0.15 if self else 0.0

    @property
    def subject(self) -> str:
        """The name of the weights in a refusal."""
        return "The weights of a GGUF file" if self.method == GGUF_METHOD else "Quantized weights"

    def min_bytes(self, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """Return a lower bound of the memory of the packed weights, in bytes."""
        if self.method == GGUF_METHOD:
            return sum(_least_tensor_bytes(checkpoint, name, dtype) for name in checkpoint.tensor_names)
        if self.method is not None:
            return checkpoint.total_bytes
        return int(checkpoint.parameter_count * MIN_WEIGHT_BYTES.get(self.setting, dtype.itemsize))


def _least_tensor_bytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> int:
    """Return the bytes of a GGUF file's tensor in the form that kernels read: in groups, or else of ``dtype``."""
    blocks = checkpoint.block_type(name)
    bits = grouped_bits(blocks.name) if blocks is not None and dtype == torch.bfloat16 else None
    return int(math.prod(checkpoint.tensor_shape(name)) * (bits or 8 * dtype.itemsize) / 8)


def read_quantization(config: dict[str, Any], setting: str) -> Quantization:
    """Return the quantization for a config.json and ``setting``, one of QUANTIZATION_SETTINGS. Raises LoadError."""
    if setting not in QUANTIZATION_SETTINGS:
        raise LoadError(f"quantization {setting} is unknown; it must be one of {', '.join(QUANTIZATION_SETTINGS)}.")
    section = config.get("quantization_config") or config.get("compression_config")  # the latter's former name
    described = next(filter(mlx.is_mlx_section, (config.get("quantization"), section)), None)
    if described is not None:
        section = {**described, "quant_method": MLX_METHOD}
    if not section:
        return Quantization(None, setting, lambda name: None)
    method = section.get("quant_method") if isinstance(section, dict) else None
    if not isinstance(method, str) or method not in METHOD_READERS:
        raise LoadError(
            f"The checkpoint is quantized ({method or 'somehow'}), which is not supported; serve the model that it was "
            f"made of, with --quantization int8 or int4 if it is too large, or one of these forms of it: "
            f"{', '.join(METHOD_READERS)}."
        )
    _check_rule_counts(section)
    find_format = functools.cache(METHOD_READERS[method](section))  # called several times for each layer
    stacked_format = STACKED_FORMATS[method](section) if method in STACKED_FORMATS else None
    split_heads = mlx.SplitHeadsFormat(mlx.read_mlx_pairs(section) if method == MLX_METHOD else frozenset())
    return Quantization(method, setting, find_format, stacked_format, split_heads)


def _check_rule_counts(section: dict[str, Any]) -> None:
    """Raise LoadError if a list or object in a ``quantization_config``, or all its names and patterns together, have
    more entries than any model needs. Names are texts in lists, and members that are objects."""
    pending: list[tuple[str, Any]] = [
        (name, value) for name, value in section.items() if isinstance(value, dict | list)
    ]
    rules = 0
    while pending:
        path, value = pending.pop()
        if len(value) > MAX_RULES:
            raise LoadError(
                f"The checkpoint's quantization_config.{path} has {len(value)} entries; at most {MAX_RULES} are read."
            )
        rule_type = dict if isinstance(value, dict) else str
        members = list(value.items() if isinstance(value, dict) else enumerate(value))
        rules += sum(isinstance(member, rule_type) for _, member in members)
        if rules > MAX_ALL_RULES:
            raise LoadError(
                f"The checkpoint's quantization_config has more than {MAX_ALL_RULES} names and patterns in all; "
                "no more are read."
            )
        pending += [(f"{path}.{name}"[:200], member) for name, member in members if isinstance(member, dict | list)]
