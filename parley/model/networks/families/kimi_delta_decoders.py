"""The decoders with Kimi Delta Attention (arXiv 2510.26692) and multi-head latent attention in turn: one row each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.families.decoder_family import FULL
from parley.model.networks.families.latent_decoders import DEEPSEEK_V3, LATENT_TENSORS
from parley.model.networks.mixtures import BAILING_MIXTURE, KIMI_MIXTURE
from parley.model.networks.rope import RopeConfig
from parley.model.networks.state_layers import BAILING_STATES, KIMI_STATES


def kimi_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the lists of ``linear_attn_config``, which count from 1, or else each
    fourth layer but the first sees the whole context."""
    published = fields["linear_attn_config"] or {}
    if not {"full_attn_layers", "kda_layers"} <= set(published):
        return [FULL if i and i % 4 == 0 else KIMI_STATES.layer_type for i in range(count)]
    types = dict.fromkeys(published["full_attn_layers"], FULL)
    types |= dict.fromkeys(published["kda_layers"], KIMI_STATES.layer_type)
    return [types.get(i + 1, "") for i in range(count)]


def still_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return a rotary embedding that rotates nothing, for latents without positions. Raises Unfusable."""
    return {FULL: RopeConfig(1e4, read_size(fields, "qk_rope_head_dim"), "proportional", rotated_pairs=0)}


KIMI_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_local_experts": "num_experts",
}
KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    fields={
        **DEEPSEEK_V3.fields,
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "layer_types": None,
        "linear_attn_config": None,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    renamed={
        **KIMI_RENAMED,
        **dict.fromkeys(("rope_parameters", "rope_scaling", "tie_word_embeddings"), ""),  # not known
    },
    tensors=replace(LATENT_TENSORS, published={"block_sparse_moe": "mlp"}),
    layer_types=kimi_layers,
    is_rope_interleaved=False,
    ropes=still_ropes,
    mixture=KIMI_MIXTURE,
    extra_layers=None,
    state=KIMI_STATES,
)


def bailing_layers(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last of each ``layer_group_size`` sees the whole context."""
    group = read_size(fields, "layer_group_size")
    return [BAILING_STATES.layer_type if (i + 1) % group else FULL for i in range(count)]


# Ling 3
BAILING_HYBRID = replace(
    DEEPSEEK_V3,
    fields={
        **DEEPSEEK_V3.fields,
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 262144,
        "rope_theta": 6e6,
        "q_lora_rank": None,
        "head_dim": 128,
        "num_experts": 512,
        "first_k_dense_replace": 2,
        "mlp_layer_types": None,
        "layer_types": None,
        "layer_group_size": 6,
        "short_conv_kernel_size": 4,
        **dict.fromkeys(("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")),
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    },
    renamed={**KIMI_RENAMED, **dict.fromkeys(("q_lora_rank", "tie_word_embeddings"), "")},  # the latter are not known
    tensors=replace(
        LATENT_TENSORS,
        qkv=("self_attn.q_proj", "self_attn.g_proj", "self_attn.kv_a_proj_with_mqa"),
        published={
            "word_embeddings": "embed_tokens",
            "attention.dense": "self_attn.o_proj",
            "attention": "self_attn",
        },
    ),
    layer_types=bailing_layers,
    is_rope_interleaved=True,
    has_output_gate=True,
    has_head_gates=True,
    mixture=BAILING_MIXTURE,
    state=BAILING_STATES,
)
