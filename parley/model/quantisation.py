"""Which weights are quantised and how: what the checkpoint says of itself, and what was asked for at the start.

A checkpoint's ``quantization_config`` names a method. The method's reader makes of it a function from the name of a
linear layer to the ``Format`` its weight is stored in, or None where it is stored plainly. What a ``Format`` reads is a
``Weight``, and from there on nobody asks how it was stored. Every message of LoadError names the field that is
not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from parley.model import compressed, grouped
from parley.model.checkpoint import Checkpoint, LoadError
from parley.model.weights import Int4, Int8, Linear, Plain, Weight

KINDS = ("none", "int8", "int4")  # of the setting
BYTES = {"int8": 1.0, "int4": 0.53}  # that a weight takes at least when it is quantised at load


class Format(Protocol):
    """How the weight of a linear layer is stored."""

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        """The names of the tensors that hold it, without the bias."""

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        """Read it. Raises LoadError where shapes or types are not what the config promises."""


class Stored:
    """The usual way: one tensor of floating numbers, [out, in]."""

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        return [linear.name + ".weight"]

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        return Plain(checkpoint.tensor(linear.name + ".weight", linear.out, linear.into))


# Of each quant_method: the reader of its config. A reader raises LoadError.
METHODS: dict[str, Callable[[dict[str, Any]], Callable[[str], Format | None]]] = {
    "compressed-tensors": compressed.read,
    "gptq": grouped.gptq,
    "awq": grouped.awq,
}
HEAD = ("gptq", "awq")  # methods that leave the head plain, for which int4 can be asked: it makes the head int8
STORED = Stored()


@dataclass(frozen=True)
class Quantisation:
    """The format of each linear layer, and what becomes of those that are stored plainly."""

    method: str | None  # of the checkpoint
    wanted: str  # one of KINDS
    find: Callable[[str], Format | None]

    def __bool__(self) -> bool:
        return self.method is not None or self.wanted != "none"

    def tensors(self, checkpoint: Checkpoint, linear: Linear) -> list[str]:
        return (self.find(linear.name) or STORED).tensors(checkpoint, linear)

    def read(self, checkpoint: Checkpoint, linear: Linear) -> Weight:
        return (self.find(linear.name) or STORED).read(checkpoint, linear)

    def convert(self, weight: Weight, *, head: bool) -> Weight:
        """Quantise what is plain, if that was asked for; in a quantised checkpoint layers are plain by intent.

        The head is never made 4 bits: it alone decides between tokens that are nearly as likely.
        """
        if not isinstance(weight, Plain) or self.wanted == "none" or (self.method is not None and not head):
            return weight
        return Int4.of(weight.values) if self.wanted == "int4" and not head else Int8.of(weight.values)

    @property
    def noise(self) -> float:
        """What the proof allows beyond its usual tolerance, as a relative error of the logits.

        It quantises rows as the decoder does, but where a number of a row lies near the middle of two steps, a last bit
        of bfloat16 decides to which it goes. Such steps made 0.02 to 0.07 on models of 2 to 24 layers with random
        weights, 0.01 on a trained one; a layer that is read wrongly makes 0.5 and more.
        """
        return 0.15 if self else 0.0

    def least(self, checkpoint: Checkpoint, dtype: torch.dtype) -> int:
        """Bytes that the weights will take at the very least."""
        if self.method is not None:
            return checkpoint.size
        return int(checkpoint.parameters * BYTES.get(self.wanted, dtype.itemsize))


def read(config: dict[str, Any], wanted: str) -> Quantisation:
    """What holds for a model with this config.json when ``wanted``, one of KINDS, was asked for. Raises LoadError."""
    if wanted not in KINDS:
        raise LoadError(f"quantization {wanted} is unknown; it can be {', '.join(KINDS)}.")
    own = config.get("quantization_config") or config.get("compression_config")  # as the first of them had it
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
