"""MiniMax-M3: indexers that choose blocks of tokens for each key/value head, and the activation of GPT-OSS.

Published configs have the sizes of indexers in ``sparse_attention_config``, and list the layers that have them and
mixtures as 0 and 1; Transformers writes types of layers (modeling_minimax_m3_vl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.decoder_config import NormForm
from parley.model.networks.decoder_tensors import NORMED_HEADS
from parley.model.networks.families.decoder_family import COMMON_FIELDS, DecoderFamily
from parley.model.networks.indexers import BlockIndexerFamily
from parley.model.networks.mixtures import DEEPSEEK_NAMES, KIMI_NAMES, MixtureFamily, gguf_layout, sparse_or_all
from parley.model.networks.rope import wrong_value
from parley.native.layer_shape import SWIGLU_ALPHA, SWIGLU_LIMIT


def minimax_m3_mixtures(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: ``mlp_layer_types`` says so, or else ``moe_layer_freq``; without both, all have.
    Raises Unfusable."""
    listed = fields["moe_layer_freq"]
    if fields["mlp_layer_types"] is not None or listed is None:
        return sparse_or_all(fields, layer)
    count = fields["num_hidden_layers"]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in (0, 1) for kind in listed):
        raise wrong_value("moe_layer_freq", listed)
    return bool(listed[layer])


MINIMAX_M3_MIXTURE = MixtureFamily(
    (
        replace(KIMI_NAMES, choice_bias="mlp.e_score_correction_bias"),
        replace(
            DEEPSEEK_NAMES,
            gate_up=("mlp.experts.gate_up_proj",),
            down="mlp.experts.down_proj",
            shared_gate_up=("mlp.shared_experts.gate_up_proj",),
        ),
        gguf_layout(DEEPSEEK_NAMES),
    ),
    has_mixture=minimax_m3_mixtures,
    normalized=True,
    is_sigmoid=True,
    shared=1,
)
MINIMAX_M3 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 200064,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 3072,
        "shared_expert_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "partial_rotary_factor": None,
        "rope_theta": 5e6,
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "mlp_layer_types": None,
        "moe_layer_freq": None,
        "indexed_layers": None,
        "sparse_attention_config": None,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk_blocks": 16,
        "index_block_size": 128,
        "index_local_blocks": 1,
    },
    renamed={
        "num_local_experts": "num_experts",
        "intermediate_size": "moe_intermediate_size",
        "dense_intermediate_size": "intermediate_size",
        "shared_intermediate_size": "shared_expert_intermediate_size",
        "layer_types": "indexed_layers",
    },
    required={"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
    tensors=replace(
        NORMED_HEADS,
        merged_gate_up="mlp.gate_up_proj",
        published={
            "block_sparse_moe": "mlp",
            "self_attn.index_q_proj": "self_attn.indexer.q_proj",
            "self_attn.index_k_proj": "self_attn.indexer.k_proj",
            "self_attn.index_q_norm": "self_attn.indexer.q_norm",
            "self_attn.index_k_norm": "self_attn.indexer.k_norm",
        },
    ),
    norms=NormForm(offset=1.0),
    activation="clamped_swiglu",
    mixture=MINIMAX_M3_MIXTURE,
    indexer=BlockIndexerFamily(),
)
