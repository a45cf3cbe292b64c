"""The weights of one decoder layer. Plain data; ``model/networks/decoder.py`` computes with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.packed import Packed


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. ``head_norm`` [heads + kv_heads, dim] is the norm of queries and keys, if there is one."""

    input_norm: torch.Tensor
    qkv: Packed
    head_norm: torch.Tensor | None
    output: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    window: int | None
