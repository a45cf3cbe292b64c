"""The weights of one decoder layer. Plain data; ``model/networks/decoder.py`` computes with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parley.native.experts import Mixture
from parley.native.layer_shape import Norm
from parley.native.packed import PackedWeight


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer.

    ``head_norm``: the RMS norm of queries and keys, [heads + kv_heads, dim]. ``sinks`` float32 [heads]: of attention.
    ``gate_up``: outputs of gate and then of up, or of up alone. In a layer with a ``mixture`` of experts, ``gate_up``
    and ``down`` are the shared expert's, or None.
    """

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight | None
    down: PackedWeight | None
    attention_norm: Norm | None = None
    attention_after_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_after_norm: Norm | None = None
    head_norm: Norm | None = None
    sinks: torch.Tensor | None = None
    mixture: Mixture | None = None
