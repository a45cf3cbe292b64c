"""A decoder layer as data: what it computes. ``layer.py`` has its weights.

The config reader, the reference, the torch form and ``layers.cpp`` read this description, so a variation is a field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")  # numbered as in kernels.h; relu2 is the square of ReLU


@dataclass(frozen=True)
class LayerShape:
    """What one decoder layer computes, apart from its sizes and weights. The defaults are those of Llama.

    With ``norm`` as the norm that the weights hold for this place, or nothing where they hold none:

        residual += residual_scale * attention_after_norm(attention(attention_norm(residual)))
        residual += residual_scale * mlp_after_norm(mlp(mlp_norm(residual)))

    ``is_parallel``: both read the residual as it is before the layer.

    Attention multiplies scores by ``score_scale``; then a ``softcap`` c makes them c * tanh(score / c). A token sees
    ``window`` tokens, itself included; None: all. ``rope``: the number of the model's rotary embedding that turns
    queries and keys; None: none does. ``has_whole_qk_norm``: the norm of queries and that of keys is over all heads of
    a token at once, not over each head.

    The MLP is down(activation(gate(x)) * up(x)), or down(activation(up(x))) unless it ``is_gated``. ``activation`` is
    one of ACTIVATIONS.
    """

    score_scale: float
    window: int | None = None
    rope: int | None = 0
    softcap: float | None = None
    has_whole_qk_norm: bool = False
    activation: str = "silu"
    is_gated: bool = True
    is_parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Norm:
    """A norm of rows: x / sqrt(mean(x²) + eps) * weight + bias. ``is_centered``: x is x - mean(x), as in LayerNorm.

    ``weight`` and ``bias`` are float32 [width], whatever the dtype of the model.
    """

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None
    is_centered: bool = False
