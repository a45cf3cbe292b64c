"""Kolibri 1 of Aleph Alpha: sandwich norms, and mixtures whose routers add their bias to logits."""

from __future__ import annotations

from dataclasses import replace

from parley.model.networks.decoder_tensors import NORMED_HEADS
from parley.model.networks.families.decoder_family import (
    COMMON_FIELDS,
    DecoderFamily,
    full_in_turn,
    rotated_beside_windows,
)
from parley.model.networks.mixtures import KOLIBRI_MIXTURE

KOLIBRI1 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 128000,
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "sliding_window_pattern": 5,
        "layer_types": None,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": False,
    },
    renamed={"num_local_experts": "num_experts", "sliding_window_pattern": ""},
    tensors=replace(
        NORMED_HEADS,
        attention_after_norm="post_self_attn_layernorm",
        mlp_after_norm="post_mlp_layernorm",
        published={"post_attn_norm": "post_self_attn_layernorm", "post_ffn_norm": "post_mlp_layernorm"},
    ),
    layer_types=full_in_turn,
    rotated=rotated_beside_windows,
    mixture=KOLIBRI_MIXTURE,
)
