"""What a layer of a decoder is made of. Plain data: what is computed with it is said in ``model/decoder.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.packed import Packed


@dataclass(frozen=True)
class Layer:
    """Weights of one layer. ``head_norm`` [heads + kv_heads, dim]: norm of queries and keys, if the model has one."""

    input_norm: torch.Tensor
    qkv: Packed
    head_norm: torch.Tensor | None
    output: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    window: int | None
