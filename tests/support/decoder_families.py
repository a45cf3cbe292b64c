"""Small configs of the families on the fused decoder, so that each variation of a layer is in one of them."""

from __future__ import annotations

from typing import Any

from support.tiny_models import ARCHITECTURES, LATENT_DECODERS, MIXTURES, STATE_DECODERS

HEADS = {"head_dim": 32}
OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
# Model type and fields of its config, beside those of BASE_CONFIG.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", HEADS | {"sliding_window": 45, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", HEADS | {"sliding_window": 33, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 25, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 29, "sliding_window_pattern": 2}),
    "glm": ("glm", HEADS),
    "glm4": ("glm4", HEADS),
    "ernie": ("ernie4_5", HEADS | {"use_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 37}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "phi": ("phi", {}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "falcon": ("falcon", {}),
    "falcon with biases and heads of their own": ("falcon", {"multi_query": False, "bias": True}),
    "falcon of two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon of one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "seed_oss": ("seed_oss", HEADS),
    "ministral": ("ministral", HEADS | {"sliding_window": 21, "layer_types": ["full_attention", "sliding_attention"]}),
    **{name: ARCHITECTURES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")},
    **MIXTURES,
    **LATENT_DECODERS,
    **STATE_DECODERS,
}
