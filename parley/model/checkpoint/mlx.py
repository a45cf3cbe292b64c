"""Reads folders that converters for MLX, Apple's framework, write (mlx-lm, mlx-vlm).

A quantized weight [out, in] has ``weight`` uint32 [out, in * bits / 32]: numbers along the inputs as one stream of
bits, the first number in the lowest bits. The other tensors of the weight decide what the bits mean. The config gives
bits and group size for all layers, and lists layers with other values; a weight with different values is damaged.

* affine: ``scales`` and ``biases`` [out, in / group], float16 or bfloat16; a number is scale * integer + bias.
  Integers have 1 to 8 bits.
* mxfp4, mxfp8, nvfp4: ``scales`` uint8 [out, in / group], no ``biases``. Numbers are e2m1 or e4m3; scales of groups of
  32 are exponents, those of groups of 16 are e4m3.

Embeddings are quantized like linear layers, and so are the weights of all experts in one tensor [experts, out, ...].
The layer that makes keys and values of latents is stored as two weights of each head: ``embed_q`` [heads, rank, key],
the transposed part of keys, and ``unembed_out`` [heads, value, rank], the part of values.

Convolutions have their last two axes swapped. Where they are, weights of norms are stored plus one if the model's code
adds one to them; and Falcon-H1's other weights are multiplied by factors of the config.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.fp4 import MXFP4_GROUP, NVFP4_GROUP, read_mxfp4, read_nvfp4
from parley.model.checkpoint.fp8 import MXFP8_BLOCK, read_fp8
from parley.model.checkpoint.hqq import ZERO_CODES
from parley.model.checkpoint.packed_words import GROUP_MULTIPLE, unpack_crossing, unpack_rows
from parley.model.checkpoint.weights import GroupedLinearWeight, LinearSpec, LinearWeight, PlainWeight
from parley.native import GroupedWeight

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
MAX_BITS = 8
Pairs = frozenset[tuple[int, int]]  # bits and group
FLOAT_MODES = {(4, MXFP4_GROUP), (8, MXFP8_BLOCK[1]), (4, NVFP4_GROUP)}
UNPACKED_AT_ONCE = 1 << 22  # numbers unpacked at a time; bounds the memory of intermediates
HEAD_PARTS = ("embed_q", "unembed_out")
MLX_FIELDS = "bits", "group_size"


def is_mlx_section(section: Any) -> bool:
    """Whether a member of a config describes the weights of MLX: it names no method, but bits and groups."""
    return isinstance(section, dict) and section.get("quant_method") is None and section.keys() >= set(MLX_FIELDS)


@dataclass(frozen=True)
class MlxRows:
    """Rows of a weight as they are stored: int32 words [out, in * bits / 32], scales and biases [out, in / group].

    ``name``: of the weight, for errors.
    """

    words: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None
    in_features: int
    name: str

    @property
    def bits(self) -> int:
        """The bits of a number."""
        return 32 * self.words.shape[1] // self.in_features

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.in_features // self.scales.shape[1]

    def select_outputs(self, outputs: torch.Tensor) -> MlxRows:
        """Return these rows only (int64 indices)."""
        biases = None if self.biases is None else self.biases[outputs]
        return MlxRows(self.words[outputs], self.scales[outputs], biases, self.in_features, self.name)

    def decode_into(self, target: torch.Tensor) -> torch.Tensor:
        """Write the numbers to ``target`` [out_features, in_features], rounded to its dtype, and return it."""
        for start in range(0, len(self.words), step := max(1, UNPACKED_AT_ONCE // self.in_features)):
            outputs = torch.arange(start, min(start + step, len(self.words)), device=self.words.device)
            target[start : start + step] = self.select_outputs(outputs).to_weight().to_float()
        return target

    def to_weight(self) -> GroupedLinearWeight:
        """Return the weight in a form that kernels read, without rounding. Raises LoadError if a number is NaN."""
        if self.biases is None:
            return self._read_floats()
        width = 4 if self.bits <= 4 else 8
        code = f"least{width}_{ZERO_CODES[self.scales.dtype]}"
        return GroupedLinearWeight(
            GroupedWeight(self._unpack_integers(), self.scales, self.biases, self.group, code=code)
        )

    def _read_floats(self) -> GroupedLinearWeight:
        packed = self.words.contiguous().view(torch.uint8)
        if self.bits == 8:
            values = packed.view(torch.float8_e4m3fn)
            return read_fp8(values, self.scales.view(torch.float8_e8m0fnu), MXFP8_BLOCK, self.name + ".weight")
        if self.group == MXFP4_GROUP:
            return read_mxfp4(packed, self.scales)
        return read_nvfp4(packed, self.scales.view(torch.float8_e4m3fn), torch.ones(1))

    def _unpack_integers(self) -> torch.Tensor:
        """Return the integers, uint8 [out_features, in_features]."""
        if 8 % self.bits == 0:
            return unpack_rows(self.words, self.in_features, self.bits)
        batches = self.words.split(max(1, UNPACKED_AT_ONCE // self.in_features))
        return torch.cat([unpack_crossing(words, self.in_features, self.bits) for words in batches])


@dataclass(frozen=True)
class MlxFormat:
    """The format of a quantized linear layer or embedding. ``pairs``: bits and group sizes in the config."""

    pairs: Pairs

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight."""
        return _tensor_names(checkpoint, linear.name)

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return words, scales and biases if there are any, as views of the file. Raises LoadError."""
        return _view_parts(checkpoint, linear.name, (), linear.out_features, linear.in_features, self.pairs)

    def view_rows(self, checkpoint: Checkpoint, linear: LinearSpec) -> MlxRows:
        """Return the weight as views of the file. Raises LoadError."""
        return _rows_of(self.view_tensors(checkpoint, linear), linear.in_features, linear.name)

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight. Raises LoadError."""
        return self.view_rows(checkpoint, linear).to_weight()


@dataclass(frozen=True)
class StackedMlxFormat:
    """Weights of all experts in one tensor, NAME.weight, [experts, out, in * bits / 32]. ``linear`` has that name.

    ``pairs``: bits and groups that the config names.
    """

    pairs: Pairs

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight, without the bias."""
        if not linear.name.endswith(".weight"):  # of another layout, whose tensors are plain
            return [linear.name]
        return _tensor_names(checkpoint, linear.name.removesuffix(".weight"))

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int) -> list[torch.Tensor]:
        """Return words, scales and biases if there are any, as views of the file. Raises LoadError."""
        name = linear.name.removesuffix(".weight")
        return _view_parts(checkpoint, name, (experts,), linear.out_features, linear.in_features, self.pairs)

    def read_expert(self, checkpoint: Checkpoint, linear: LinearSpec, experts: int, expert: int) -> LinearWeight:
        """Read the weight of one expert. Raises LoadError, also if a number of it is NaN."""
        name = linear.name.removesuffix(".weight")
        parts = _view_parts(checkpoint, name, (experts,), linear.out_features, linear.in_features, self.pairs, expert)
        return _rows_of(parts, linear.in_features, name).to_weight()


@dataclass(frozen=True)
class SplitHeadsFormat:
    """The layer that computes keys and values from latents, stored as two tensors HEAD_PARTS, quantized or not.

    ``pairs``: bits and groups that the config names.
    """

    pairs: Pairs = frozenset()

    def is_stored(self, checkpoint: Checkpoint, linear: LinearSpec) -> bool:
        """Whether the checkpoint has a layer in this format."""
        if linear.name + ".weight" in checkpoint:
            return False
        return all(f"{name}.weight" in checkpoint for name in self._part_names(linear))

    def tensor_names(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold the weight."""
        names = []
        for name in self._part_names(linear):
            is_plain = checkpoint.has_plain_numbers(name + ".weight")
            names += [name + ".weight"] if is_plain else _tensor_names(checkpoint, name)
        return names

    def view_tensors(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[torch.Tensor]:
        """Return the tensors as views of the file. Raises LoadError."""
        return [part for parts in self._view_heads(checkpoint, linear) for part in parts]

    def read_weight(self, checkpoint: Checkpoint, linear: LinearSpec) -> LinearWeight:
        """Read the weight as plain numbers. Raises LoadError."""
        keys, values = self._view_heads(checkpoint, linear)
        head_weights = _decode_heads(keys, self._key_size(checkpoint, linear), linear.name).transpose(1, 2)
        return PlainWeight(
            torch.cat((head_weights, _decode_heads(values, linear.in_features, linear.name)), 1).flatten(0, 1)
        )

    def _view_heads(self, checkpoint: Checkpoint, linear: LinearSpec) -> list[list[torch.Tensor]]:
        """Return the tensors of keys and those of values."""
        keys, values = self._part_names(linear)
        key_size = self._key_size(checkpoint, linear)  # which checks the number of axes
        heads, value_size = checkpoint.tensor_shape(values + ".weight")[:2]
        shapes = (keys, linear.in_features, key_size), (values, value_size, linear.in_features)
        return [
            [checkpoint.view_tensor(name + ".weight", heads, out_features, in_features)]
            if checkpoint.has_plain_numbers(name + ".weight")
            else _view_parts(checkpoint, name, (heads,), out_features, in_features, self.pairs)
            for name, out_features, in_features in shapes
        ]

    def _key_size(self, checkpoint: Checkpoint, linear: LinearSpec) -> int:
        """Return the numbers of a head's key. Raises LoadError if the tensors have too few axes."""
        name = self._part_names(linear)[1] + ".weight"
        shape = checkpoint.tensor_shape(name)
        if len(shape) != 3 or not 0 < shape[0] * shape[1] < linear.out_features or linear.out_features % shape[0]:
            raise LoadError(
                f"Tensor {name} has shape {list(shape)}; the config asks for {linear.out_features} outputs."
            )
        return linear.out_features // shape[0] - shape[1]

    @staticmethod
    def _part_names(linear: LinearSpec) -> list[str]:
        return [f"{linear.name.rpartition('.')[0]}.{part}" for part in HEAD_PARTS]


def _tensor_names(checkpoint: Checkpoint, name: str) -> list[str]:
    biases = name + ".biases"
    return [name + ".weight", name + ".scales"] + [biases] * (biases in checkpoint)


def _view_parts(
    checkpoint: Checkpoint,
    name: str,
    leading: tuple[int, ...],
    out_features: int,
    in_features: int,
    pairs: Pairs,
    item: int | None = None,
) -> list[torch.Tensor]:
    """Return the tensors of a weight [*leading, out_features, in_features], or of one ``item`` of its first axis, as
    views of the file: int32 words first. Raises LoadError, also if kernels cannot read its bits and group, or if these
    are not in ``pairs``."""

    def view(part: str, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = *leading, out_features, width
        if item is None:
            return checkpoint.view_tensor(part, *shape, dtype=dtype)
        return checkpoint.view_item(part, item, shape, dtype)

    words, scales, *biases = _tensor_names(checkpoint, name)
    row_words, groups = (checkpoint.tensor_shape(part)[-1:] or (0,) for part in (words, scales))
    bits, bits_rest = divmod(32 * row_words[0], in_features)
    group, group_rest = divmod(in_features, groups[0]) if groups[0] else (0, 0)
    fits = not bits_rest and 1 <= bits <= MAX_BITS and not group_rest and group and not group % GROUP_MULTIPLE
    if not fits or (not biases and (bits, group) not in FLOAT_MODES):
        raise LoadError(
            f"Tensor {words} has {row_words[0]} words and {groups[0]} scales for {in_features} inputs, which is none "
            f"of MLX's formats that are read ({', '.join(MODES)}; groups are multiples of {GROUP_MULTIPLE})."
        )
    if (bits, group) not in pairs:
        raise LoadError(
            f"Tensor {words} has numbers of {bits} bits in groups of {group}, which the config's quantization does not "
            "name; the file is damaged."
        )
    viewed_words = view(words, row_words[0], torch.uint32).view(torch.int32)
    if not biases:
        return [viewed_words, view(scales, groups[0], torch.uint8)]
    viewed_scales = view(scales, groups[0])
    if viewed_scales.dtype not in ZERO_CODES:
        dtype_name = str(viewed_scales.dtype).removeprefix("torch.")
        raise LoadError(f"Tensor {scales} holds {dtype_name}; only float16 and bfloat16 are supported.")
    return [viewed_words, viewed_scales, view(biases[0], groups[0], viewed_scales.dtype)]


def _rows_of(parts: list[torch.Tensor], in_features: int, name: str) -> MlxRows:
    words, scales, *biases = parts
    return MlxRows(words, scales, biases[0] if biases else None, in_features, name)


def _decode_heads(parts: list[torch.Tensor], in_features: int, name: str) -> torch.Tensor:
    """Return the numbers of a weight of each head, in one plain tensor or several: float32 [heads,
    out_features, in_features]."""
    if len(parts) == 1:
        return parts[0].float()
    heads = zip(*parts, strict=True)
    return torch.stack([_rows_of(list(head), in_features, name).to_weight().to_float() for head in heads])


def read_mlx_pairs(section: dict[str, Any]) -> Pairs:
    """Return the bits and groups that the ``quantization`` of a config names: of all layers, and of those it lists.

    Which layer has which is not compared, because names of layers in a config may differ from those in the file. Raises
    LoadError if it names a mode that is not read, or something else than numbers.
    """
    pairs = set()
    for fields in (section, *(value for value in section.values() if isinstance(value, dict))):
        mode = fields.get("mode") or MODES[0]
        if mode not in MODES:
            raise LoadError(
                f"The checkpoint's quantization.mode is {str(mode)[:100]}; only {', '.join(MODES)} are supported."
            )
        numbers = [fields.get(name, section[name]) for name in MLX_FIELDS]
        for name, number in zip(MLX_FIELDS, numbers, strict=True):
            if type(number) is not int:
                raise LoadError(f"The checkpoint's quantization.{name} is {reprlib.repr(number)}; it must be a number.")
        pairs.add((numbers[0], numbers[1]))
    return frozenset(pairs)


def read_mlx_config(section: dict[str, Any]) -> Callable[[str], MlxFormat]:
    """Return a function from layer name to format for the ``quantization`` of a config. Raises LoadError."""
    mlx = MlxFormat(read_mlx_pairs(section))
    return lambda name: mlx


def has_mlx_layout(checkpoint: Checkpoint) -> bool:
    """Whether tensors have MLX's layout: convolutions are [channels, size, 1] instead of [channels, 1, size].

    For checkpoints without such convolutions, the header of the file decides.
    """
    for name in checkpoint.tensor_names:
        if name.endswith("conv1d.weight") and len(shape := checkpoint.tensor_shape(name)) == 3:
            return shape[2] == 1 < shape[1]
    return checkpoint.metadata.get("format") == "mlx"
