"""The decoders of Gemma: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.families.decoder_family import (
    ATTENTION_BIASES,
    COMMON_FIELDS,
    DecoderFamily,
    TensorNames,
    every_second_full,
    full_in_turn,
)

GEMMA_TENSORS = TensorNames(
    attention_after_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after_norm="post_feedforward_layernorm",
)


def gemma_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config of the first Gemma. Its files say gelu, and mean the approximation by tanh."""
    return replace(GEMMA, activation="gelu_tanh") if config.get("hidden_act") == "gelu" else GEMMA


GEMMA = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
    required={"use_bidirectional_attention": False},
    biases=ATTENTION_BIASES,
    norm_offset=1.0,
    has_embedding_scale=True,
    variant=gemma_variant,
)
GEMMA2 = replace(
    GEMMA,
    fields={
        **GEMMA.fields,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    renamed={"hidden_activation": "hidden_act"},
    tensors=GEMMA_TENSORS,
    layer_types=every_second_full,
    variant=None,
)
VAULT_GEMMA = replace(
    GEMMA2,
    required={},
    tensors=replace(GEMMA_TENSORS, attention_after_norm=None, mlp_after_norm=None),
)
GEMMA3 = replace(
    GEMMA2,
    fields={
        **GEMMA2.fields,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    # Transformers reads attn_logit_softcapping, but its attention ignores it.
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    tensors=replace(GEMMA_TENSORS, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    layer_types=full_in_turn,
    local_theta="rope_local_base_freq",
)
