"""Which weights are quantised and how, from the checkpoint's own config and the setting at start.

A checkpoint's ``quantization_config`` names a method. The method's config reader returns a function from the name of a
linear layer to the ``WeightFormat`` of its weight, or None for a plain weight. A format reads a ``LinearWeight``; from
there on no code needs to know how it was stored. Every LoadError message names the unsupported field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parley.model.checkpoint import compressed_tensors, gptq_awq
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.weights import Int4, Int8, Linear, Plain, Weight

KINDS = ("none", "int8", "int4")  # values of the setting
BYTES = {"int8": 1.0, "int4": 0.53}  # the least bytes of a weight that is quantised while loading


class Format(Protocol):
    """The storage format of a linear layer's weight."""

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the names of the tensors that hold the weight, without the bias."""

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read the weight. Raises LoadError if shapes or types differ from the config."""


class Stored:
    """The plain format: one floating-point tensor [out, in]."""

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the name of the weight tensor."""
        return [linear.name + ".weight"]

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read the weight. Raises LoadError."""
        return Plain(checkpoint.tensor(linear.name + ".weight", linear.out, linear.into))


# The config reader of each quant_method. It raises LoadError.
METHODS: dict[str, Callable[[dict[str, Any]], Callable[[str], Format | None]]] = {
    "compressed-tensors": compressed_tensors.read,
    "gptq": gptq_awq.gptq,
    "awq": gptq_awq.awq,
}
HEAD = ("gptq", "awq")  # methods with a plain head; they may be combined with int4, which makes the head int8
STORED = Stored()


@dataclass(frozen=True)
class Quantisation:
    """The format of each linear layer, and whether plain layers are quantised while loading."""

    method: str | None  # the checkpoint's
    wanted: str  # one of QUANTIZATION_SETTINGS
    find: Callable[[str], Format | None]

    def __bool__(self) -> bool:
        return self.method is not None or self.wanted != "none"

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        return (self.find(linear.name) or STORED).tensors(checkpoint, linear)

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read a linear layer's weight. Raises LoadError."""
        return (self.find(linear.name) or STORED).read(checkpoint, linear)

    def convert(self, weight: Weight, *, head: bool) -> Weight:
        """Quantise a plain weight if requested. In a quantised checkpoint, layers other than the head stay plain.

        The head is never quantised to 4 bits, because it alone decides between tokens of nearly equal probability.
        """
        if not isinstance(weight, Plain) or self.wanted == "none" or (self.method is not None and not head):
            return weight
        return Int4.of(weight.values) if self.wanted == "int4" and not head else Int8.of(weight.values)

    @property
    def noise(self) -> float:
        """The extra tolerance of the numeric check, as a relative error of the logits.

        The check quantises activations as the decoder does, but if a number lies near the middle between two steps,
        the last bit of bfloat16 decides the rounding. This caused errors of 0.02 to 0.07 on models of 2 to 24 layers
        with random weights and 0.01 on a trained one; a layer that is read wrongly causes 0.5 and more.
        """
        return 0.15 if self else 0.0

    def least(self, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """Return the least bytes that the weights can take."""
        if self.method is not None:
            return checkpoint.size
        return int(checkpoint.parameters * BYTES.get(self.wanted, dtype.itemsize))


def read(config: dict[str, Any], wanted: str) -> Quantisation:
    """Return the quantisation for a config.json and ``setting``, one of QUANTIZATION_SETTINGS. Raises LoadError."""
    if wanted not in KINDS:
        raise LoadError(f"quantization {wanted} is unknown; it must be one of {', '.join(KINDS)}.")
    own = config.get("quantization_config") or config.get("compression_config")  # the latter's former name
    if not own:
        return Quantisation(None, wanted, lambda name: None)
    method = own.get("quant_method") if isinstance(own, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise LoadError(
            f"The checkpoint is quantised ({method or 'somehow'}), which is not supported; {', '.join(METHODS)} are."
        )
    if wanted != "none" and (wanted != "int4" or method not in HEAD):
        raise LoadError(f"The checkpoint is quantised already ({method}), so quantization must be none, not {wanted}.")
    return Quantisation(method, wanted, METHODS[method](own))
