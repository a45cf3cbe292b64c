"""DBRX: mixtures whose tensors hold the rows of all experts, and limits of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number
from parley.model.networks.decoder_config import LAYER_NORMS
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, DecoderFamily
from parley.model.networks.mixtures import MixtureFamily, MixtureNames
from parley.model.networks.rope import wrong_value

# Members of ``attn_config`` and ``ffn_config``, their defaults, and their names here
ATTENTION_FIELDS: dict[str, tuple[str, Any]] = {
    "kv_n_heads": ("num_key_value_heads", 1),
    "clip_qkv": ("clip_qkv", None),
    "rope_theta": ("rope_theta", 10000.0),
}
MLP_FIELDS: dict[str, tuple[str, Any]] = {
    "ffn_hidden_size": ("moe_intermediate_size", 3584),
    "moe_num_experts": ("num_experts", 4),
    "moe_top_k": ("num_experts_per_tok", 1),
}


def dbrx_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the limit of queries, keys and values, if there is one. Raises Unfusable."""
    return {} if fields["clip_qkv"] is None else {"qkv_limit": read_number(fields, "clip_qkv")}


def dbrx_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config, whose members about attention and about the MLP are two objects. Raises
    Unfusable."""
    fields = dict(DBRX.fields)
    sections: list[dict[str, Any]] = []
    for section, members in (("attn_config", ATTENTION_FIELDS), ("ffn_config", MLP_FIELDS)):
        content = config.get(section) or {}
        if not isinstance(content, dict):
            raise wrong_value(section, content)
        fields |= {name: content.get(member, default) for member, (name, default) in members.items()}
        sections.append(content)
    activation = sections[1].get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(activation, dict):
        raise wrong_value("ffn_act_fn", activation)
    power = sections[1].get("moe_normalize_expert_weights", 1.0)  # of the norm that divides weights
    if power not in (None, 1):
        raise wrong_value("moe_normalize_expert_weights", power)
    fields |= {"hidden_act": activation.get("name", "silu"), "intermediate_size": fields["moe_intermediate_size"]}
    return replace(DBRX, fields=fields, mixture=replace(DBRX_MIXTURE, normalized=power is not None))


DBRX_MIXTURE = MixtureFamily(
    (
        MixtureNames(
            router="ffn.router.layer",
            gate_up=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
            down="ffn.experts.mlp.w2",
            has_joined_rows=True,
        ),
        MixtureNames(  # of GGUF files
            gate_up=("mlp.experts.gate_exps.weight", "mlp.experts.up_exps.weight"),
            down="mlp.experts.down_exps.weight",
        ),
    ),
    normalized=True,
)
DBRX = DecoderFamily(
    COMMON_FIELDS
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 3584,
    },
    renamed={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        **dict.fromkeys(
            ("num_key_value_heads", "num_experts", "num_experts_per_tok", "intermediate_size", "rope_theta"), ""
        ),  # of attn_config and ffn_config
    },
    tensors=TensorNames(
        embedding="transformer.wte",
        norm="transformer.norm_f",
        layer="transformer.blocks.",
        qkv=("norm_attn_norm.attn.Wqkv",),
        output="norm_attn_norm.attn.out_proj",
        attention_norm="norm_attn_norm.norm_1",
        mlp_norm="norm_attn_norm.norm_2",
    ),
    norms=LAYER_NORMS,
    layer_factors=dbrx_factors,
    mixture=DBRX_MIXTURE,
    variant=dbrx_variant,
)
