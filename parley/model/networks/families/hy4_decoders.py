"""Hy4: latent attention with sinks, gates and indexers, between residual streams (modeling_hy_v4.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.families.decoder_family import DecoderFamily
from parley.model.networks.families.latent_decoders import INDEXER_FIELDS, LATENT_FIELDS, LATENT_TENSORS
from parley.model.networks.indexers import IndexerFamily, listed_indexers
from parley.model.networks.mixtures import GLM4_LITE_MIXTURE
from parley.model.networks.rope import wrong_value
from parley.native.layer_shape import GateLimits, HyperShape


def hy4_indexers(fields: Mapping[str, Any], count: int) -> list[bool]:
    """Return whether each of ``count`` layers has an indexer: ``indexer_types`` says so; without it, the first, the
    second and then each fourth have. Raises Unfusable."""
    if fields["indexer_types"] is None:
        return [layer == 0 or layer % 4 == 1 for layer in range(count)]
    return listed_indexers(fields, count)


def hy4_streams(fields: dict[str, Any]) -> HyperShape:
    """Return the residual streams. Raises Unfusable."""
    eps = read_number(fields, "hc_eps")
    return HyperShape(read_size(fields, "hc_mult"), read_number(fields, "hc_magnitude"), eps, eps)


def hy4_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the limits of the chosen experts of each layer. Raises Unfusable."""
    limit = read_number(fields, "swiglu_limit")
    if limit == 0:
        raise wrong_value("swiglu_limit", fields["swiglu_limit"])
    return [{"expert_limits": GateLimits(limit, limit)} for _ in layer_types]


HY4 = DecoderFamily(
    LATENT_FIELDS
    | INDEXER_FIELDS
    | {
        "vocab_size": 120832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": "heads",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "num_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "mlp_layer_types": None,
        "indexer_types": None,
        "index_n_heads": 16,
        "hc_mult": 4,
        "hc_magnitude": 2.0,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
    },
    renamed={"n_routed_experts": "num_experts", "num_local_experts": "num_experts", "num_key_value_heads": ""},
    required={"attention_bias": False},
    tensors=replace(
        LATENT_TENSORS,
        qkv=("self_attn.q_a_proj", "self_attn.gate_proj", "self_attn.kv_a_proj_with_mqa"),
        sinks="self_attn.sinks",
        # Published files, and those that Transformers writes, which have other names in another order
        published={
            "self_attn.linear_gate": "self_attn.gate_proj",
            "mlp.linear_gate": "mlp.gate_proj",
            "mlp.shared_experts.linear_gate": "mlp.shared_experts.gate_proj",
            "self_attn.learnable_sink_param": "self_attn.sinks",
            **{
                old.format(f"hc_{name}"): new
                for name, new in (("attn_layer", "attn_hc"), ("mlp_layer", "ffn_hc"), ("head", "hc_head"))
                for old in ("{}.hc_pre", "hc_pre.{}")
            },
            **{
                f"{module}.hc_{name}": f"{module}.{name}"
                for module in ("hc_attn_layer", "hc_mlp_layer", "attn_hc", "ffn_hc")
                for name in ("fn", "base", "scale")
            },
            "hc_attn_layer": "attn_hc",
            "hc_mlp_layer": "ffn_hc",
            **{f"hc_head.hc_head_{name}": f"hc_head.hc_{name}" for name in ("fn", "base", "scale")},
        },
    ),
    has_output_gate=True,
    layer_variations=hy4_variations,
    mixture=GLM4_LITE_MIXTURE,
    indexer=IndexerFamily(is_last_rotated=True, has_own_eps=False, has_indexer=hy4_indexers),
    hyper=hy4_streams,
)
