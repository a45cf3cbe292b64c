"""Activations: their names, those that Transformers gives them in configs, and torch's functions for them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
import torch.nn.functional as F

SILU, GELU, GELU_TANH, RELU, RELU2, TANH = "silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh"
# Transformers' names (ACT2FN in transformers/activations.py), to those here and in ``native/layer_shape.py``.
ACTIVATION_NAMES = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
    "relu2": RELU2,
    "tanh": TANH,
}
ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: F.silu,
    GELU: F.gelu,
    GELU_TANH: partial(F.gelu, approximate="tanh"),
    RELU: F.relu,
    TANH: torch.tanh,
}


def find_activation(name: object, known: Collection[str]) -> str | None:
    """Return the activation that a config gives by Transformers' ``name``; None if it is not one of ``known``."""
    activation = ACTIVATION_NAMES.get(name) if isinstance(name, str) else None
    return activation if activation in known else None
