"""DeepSeek V4: attention to a window and to compressed entries, between residual streams that mix, and mixtures whose
first layers have experts for each token (modeling_deepseek_v4.py).

Published configs list numbers of tokens of entries (``compress_ratios``) where Transformers writes types of layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.core.sequence import PAGE_SIZE
from parley.model.networks.config_fields import read_number, read_size, read_token_count
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, SLIDING, DecoderFamily
from parley.model.networks.mixtures import DEEPSEEK_NAMES, KIMI_NAMES, SIZE_UNIT, MixtureFamily
from parley.model.networks.rope import RopeConfig, Unfusable, read_rope, rope_parameters, wrong_value
from parley.native.layer_shape import CompressionShape, EntryShape, GateLimits, HyperShape

WINDOW_ONLY, CHOSEN, ALL_SEEN = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_TYPES = {0: WINDOW_ONLY, 4: CHOSEN, 128: ALL_SEEN}  # of ``compress_ratios``
OLD_RATES = {CHOSEN: "compress_rate_csa", ALL_SEEN: "compress_rate_hca"}
MAX_SINKHORN_STEPS = 1000  # published models have 20
HASHED_LAYERS = 3  # with experts for each token, if the config does not say it
SCORES = {"sqrtsoftplus": {"sqrt_softplus": True}, "sigmoid": {"sigmoid": True}, "softmax": dict[str, bool]()}

DEEPSEEK_V4_MIXTURE = MixtureFamily(
    (KIMI_NAMES, replace(DEEPSEEK_NAMES, gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")),
    normalized=True,
    shared=1,
)


def _read_kinds(fields: dict[str, Any], count: int) -> list[str]:
    """Return WINDOW_ONLY, CHOSEN or ALL_SEEN for each layer. Raises Unfusable."""
    name, listed = "layer_types", fields["attention_types"]
    if listed is None:
        name, listed = "compress_ratios", fields["compress_ratios"]
        kinds: dict[Any, str] = dict(RATIO_TYPES)
    else:
        kinds = {kind: kind for kind in RATIO_TYPES.values()}
    if listed is None:
        return [CHOSEN if layer > 2 and layer % 2 else ALL_SEEN for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(kind in kinds for kind in listed[:count]):
        raise wrong_value(name, listed)
    return [kinds[kind] for kind in listed[:count]]


def layer_types(fields: dict[str, Any], count: int) -> list[str]:
    """Return SLIDING for layers without entries, FULL for others. Raises Unfusable."""
    return [SLIDING if kind == WINDOW_ONLY else FULL for kind in _read_kinds(fields, count)]


def _rotary_share(fields: dict[str, Any]) -> float:
    """Return the share of a head's numbers that are rotated. Raises Unfusable."""
    if fields["partial_rotary_factor"] is not None:
        return read_number(fields, "partial_rotary_factor")
    if fields["qk_rope_head_dim"] is not None:
        return read_size(fields, "qk_rope_head_dim") / read_size(fields, "head_dim")
    return 64 / 512


def layer_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings of layers with entries and of those without. Raises Unfusable.

    Configs that do not give both describe the first, whose YaRN has no factor of its own by default.
    """
    fields = fields | {"partial_rotary_factor": _rotary_share(fields)}
    parameters = rope_parameters(fields)
    by_type = {FULL: parameters.get("compress"), SLIDING: parameters.get("main")}
    if not all(isinstance(value, dict) for value in by_type.values()):
        scaled = {name: value for name, value in parameters.items() if name not in ("main", "compress", "rope_theta")}
        if (scaled.get("rope_type") or scaled.get("type")) == "yarn":
            scaled = {"attention_factor": 1.0} | scaled
        by_type = {FULL: scaled, SLIDING: {}}
    bases = {FULL: fields | {"rope_theta": fields["compress_rope_theta"]}, SLIDING: fields}
    head_dim = read_size(fields, "head_dim")
    return {name: read_rope(bases[name], by_type[name] or {}, head_dim) for name in (FULL, SLIDING)}


def read_compression(fields: dict[str, Any]) -> CompressionShape:
    """Return the sizes of attention. Raises Unfusable."""
    names = "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim"
    query_rank, groups, output_rank, index_heads, index_dim = (read_size(fields, name) for name in names)
    top_k = read_token_count(fields, "index_topk")
    rotary, heads = layer_ropes(fields)[FULL].rotary, read_size(fields, "num_attention_heads")
    if heads % groups or any(size % SIZE_UNIT for size in (query_rank, output_rank, fields["head_dim"])):
        raise Unfusable(
            f"its {heads} heads of {fields['head_dim']} numbers in {groups} groups of rank {output_rank}, with latents "
            f"of {query_rank}, have sizes that are no multiples of {SIZE_UNIT}, or do not divide"
        )
    if index_dim < rotary:
        raise Unfusable(f"its indexers have {index_dim} numbers in a key, of which {rotary} turn")
    return CompressionShape(query_rank, rotary, groups, output_rank, index_heads, index_dim, top_k)


def _read_entries(fields: dict[str, Any], kind: str) -> EntryShape | None:
    """Return the entries of a layer of this kind, None if it has none. Raises Unfusable."""
    if kind == WINDOW_ONLY:
        return None
    rates = fields["compress_rates"] or {CHOSEN: 4, ALL_SEEN: 128}
    if not isinstance(rates, dict):
        raise wrong_value("compress_rates", rates)
    old = fields[OLD_RATES[kind]]
    tokens = read_size({"compress_rates": rates.get(kind) if old is None else old}, "compress_rates")
    entries = EntryShape(tokens, kind == CHOSEN)
    if PAGE_SIZE % tokens and tokens % PAGE_SIZE:
        raise Unfusable(
            f"its entries of {tokens} tokens neither divide pages of {PAGE_SIZE} nor are made of whole ones"
        )
    dims = [fields["head_dim"]] + [fields["index_head_dim"]] * entries.is_chosen
    if any(dim * entries.page_entries(PAGE_SIZE) % PAGE_SIZE for dim in dims):
        raise Unfusable(f"its entries of {dims} numbers do not divide between the {PAGE_SIZE} tokens of a page")
    return entries


def streams(fields: dict[str, Any]) -> HyperShape:
    """Return the residual streams. Raises Unfusable."""
    count, steps = read_size(fields, "hc_mult"), read_size(fields, "hc_sinkhorn_iters")
    if steps > MAX_SINKHORN_STEPS:  # each runs in every layer
        raise wrong_value("hc_sinkhorn_iters", steps)
    return HyperShape(count, 2.0, read_number(fields, "hc_eps"), 0.0, steps)


def variations(fields: dict[str, Any], types: list[str]) -> list[dict[str, Any]]:
    """Return the window, entries, limits of MLPs and routing of each layer. Raises Unfusable."""
    limit, count = read_number(fields, "swiglu_limit"), len(types)
    if limit == 0:
        raise wrong_value("swiglu_limit", fields["swiglu_limit"])
    if not isinstance(fields["scoring_func"], str) or fields["scoring_func"] not in SCORES:
        raise wrong_value("scoring_func", fields["scoring_func"])
    listed = fields["mlp_layer_types"]
    if listed is None:
        hashed = HASHED_LAYERS if fields["num_hash_layers"] is None else fields["num_hash_layers"]
        if type(hashed) is not int or hashed < 0:
            raise wrong_value("num_hash_layers", hashed)
        listed = ["hash_moe" if layer < hashed else "moe" for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not set(listed[:count]) <= {"hash_moe", "moe"}:
        raise wrong_value("mlp_layer_types", listed)
    routing, limits = DEEPSEEK_V4_MIXTURE.read_routing(fields), GateLimits(limit, limit)
    window = read_token_count(fields, "sliding_window")
    return [
        {
            "window": window,
            "entries": _read_entries(fields, kind),
            "mlp_limits": limits,
            "expert_limits": limits,
            "routing": replace(routing, is_hashed=mixture == "hash_moe", **SCORES[fields["scoring_func"]]),
        }
        for kind, mixture in zip(_read_kinds(fields, count), listed, strict=False)
    ]


DEEPSEEK_V4 = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": None,
        "partial_rotary_factor": None,
        "num_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576,
        "attention_types": None,
        "compress_ratios": None,
        "compress_rates": None,
        "compress_rate_csa": None,
        "compress_rate_hca": None,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "mlp_layer_types": None,
        "num_hash_layers": None,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "mlp_bias": False,
    },
    renamed={
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "intermediate_size": "moe_intermediate_size",
        "layer_types": "attention_types",
    },
    required={"num_key_value_heads": 1, "n_shared_experts": 1, "mlp_bias": False},
    tensors=TensorNames(
        qkv=("self_attn.q_a_proj", "self_attn.kv_proj"),
        output="self_attn.o_b_proj",
        query_latent_norm="self_attn.q_a_norm",
        latent_norm="self_attn.kv_norm",
        query_up="self_attn.q_b_proj",
        sinks="self_attn.sinks",
        published={
            "model.head": "lm_head",
            "head": "lm_head",
            "embed": "embed_tokens",
            "attn": "self_attn",
            "ffn": "mlp",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_sink": "sinks",
            "indexer.compressor": "compressor.indexer",
            "indexer.wq_b": "compressor.indexer.q_b_proj",
            "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
            "self_attn.norm": "self_attn.kv_norm",
            "compressor.norm": "compressor.kv_norm",
            "compressor.indexer.norm": "compressor.indexer.kv_norm",
            "ape": "position_bias",
            "wq_a": "q_a_proj",
            "wq_b": "q_b_proj",
            "wkv": "kv_proj",
            "wgate": "gate_proj",
            "wo_a": "o_a_proj",
            "wo_b": "o_b_proj",
            "q_norm": "q_a_norm",
            "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
            "shared_experts.w1": "shared_experts.gate_proj",
            "shared_experts.w2": "shared_experts.down_proj",
            "shared_experts.w3": "shared_experts.up_proj",
            **{
                f"hc_{part}_{name}": f"{module}.{name}"
                for part, module in (("attn", "attn_hc"), ("ffn", "ffn_hc"))
                for name in ("fn", "base", "scale")
            },
            **{f"hc_head_{name}": f"hc_head.hc_{name}" for name in ("fn", "base", "scale")},
        },
    ),
    layer_types=layer_types,
    is_rope_interleaved=True,
    ropes=layer_ropes,
    layer_variations=variations,
    mixture=DEEPSEEK_V4_MIXTURE,
    compression=read_compression,
    hyper=streams,
)
