"""The decoders that read the text of multimodal models and have no model type of their own elsewhere: one row each.

All have RMS norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.model.networks.families.rms_norm_decoders import (
    ERNIE,
    GLM4,
    GRANITE,
    LLAMA,
    PHI3,
    QWEN2,
    QWEN3,
)
from parley.model.networks.rope import wrong_value

QWEN2_VL = replace(
    QWEN2,
    fields={
        **QWEN2.fields,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    mrope=(False, (16, 24, 24)),
)
QWEN2_5_OMNI = replace(
    QWEN2_VL,
    fields={
        **QWEN2_VL.fields,
        "rms_norm_eps": 1e-6,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "sliding_window": 32768,
    },
)
QWEN3_VL = replace(
    QWEN3,
    fields={**QWEN3.fields, "rope_theta": 5e5, "max_position_embeddings": 128000},
    mrope=(True, (24, 20, 20)),
)
PHI4_MULTIMODAL = replace(
    PHI3, fields={**PHI3.fields, "vocab_size": 200064, "num_key_value_heads": 8, "max_position_embeddings": 131072}
)
GLM4_V = replace(
    GLM4,
    fields={
        **{name: value for name, value in GLM4.fields.items() if name != "attention_bias"},
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    biases={"qkv": True},
    mrope=(False, (8, 12, 12)),
)
GLM_OCR = replace(
    GLM4_V,
    fields={
        **GLM4_V.fields,
        "vocab_size": 59392,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    biases={},
)
GRANITE_DOCLING = replace(
    GRANITE,
    fields={
        **GRANITE.fields,
        "vocab_size": 133800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
        "logits_scaling": 4.0,
    },
)
PADDLE_OCR = replace(ERNIE, is_rope_interleaved=False, mrope=(False, (16, 24, 24)))


def cross_attention_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the fields of ``LayerShape`` of layers: those in ``cross_attention_layers`` have nothing else. Raises
    Unfusable."""
    layers = fields["cross_attention_layers"]
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise wrong_value("cross_attention_layers", layers)
    cross = {"has_mixer": False, "has_mlp": False, "has_cross_attention": True}
    return [cross if layer in layers else {} for layer in range(len(layer_types))]


MLLAMA = replace(
    LLAMA,
    fields={
        **{name: value for name, value in LLAMA.fields.items() if name not in ("attention_bias", "mlp_bias")},
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    biases={},
    layer_variations=cross_attention_variations,
    extra_tokens=8,
)
