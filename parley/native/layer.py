"""The weights of one decoder layer. Plain data; ``model/networks/decoder.py`` computes with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.packed import PackedWeight


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer. ``head_norm`` [heads + kv_heads, dim] is the norm of queries and keys, if there is one."""

    input_norm: torch.Tensor
    qkv: PackedWeight
    head_norm: torch.Tensor | None
    output: PackedWeight
    post_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight
    window: int | None
