"""SmallThinker (arXiv 2507.20984): mixtures whose routers read what enters the layer, and experts with ReLU.

Experts can so be fetched while attention is computed (modeling_smallthinker.py of PowerInfer's repositories).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, SLIDING, DecoderFamily
from parley.model.networks.mixtures import SMALL_THINKER_MIXTURE
from parley.model.networks.rope import wrong_value


def _read_layout(fields: dict[str, Any], name: str, count: int, default: int) -> list[int]:
    """Return 0 or 1 for each layer, ``default`` if the config lists none. Raises Unfusable."""
    layout = fields[name]
    if layout is None:
        return [default] * count
    if not isinstance(layout, list) or len(layout) != count or any(flag not in (0, 1) for flag in layout):
        raise wrong_value(name, layout)
    return layout


def laid_out_windows(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers, by ``sliding_window_layout``. Raises Unfusable."""
    return [SLIDING if has_window else FULL for has_window in _read_layout(fields, "sliding_window_layout", count, 0)]


def laid_out_ropes(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding, by ``rope_layout``. Raises Unfusable."""
    return [bool(flag) for flag in _read_layout(fields, "rope_layout", len(layer_types), 1)]


def early_routers(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the fields of ``LayerShape`` of each layer."""
    return [{"routes_early": True}] * len(layer_types)


def small_thinker_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config: the weights of experts are sigmoids or a softmax of the chosen logits."""
    is_sigmoid = not config.get("moe_primary_router_apply_softmax")
    return replace(SMALL_THINKER, mixture=replace(SMALL_THINKER_MIXTURE, is_sigmoid=is_sigmoid))


SMALL_THINKER = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_layout": None,
        "sliding_window": 4096,
        "sliding_window_layout": None,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "moe_enable_early_router": True,
        "moe_enable_secondary_experts": False,
        "use_qk_norm": False,
    },
    renamed={
        "sliding_window_size": "sliding_window",
        "moe_num_primary_experts": "num_experts",
        "moe_num_active_primary_experts": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    required={"moe_enable_early_router": True, "moe_enable_secondary_experts": False, "use_qk_norm": False},
    layer_types=laid_out_windows,
    rotated=laid_out_ropes,
    layer_variations=early_routers,
    activation="relu",
    mixture=SMALL_THINKER_MIXTURE,
    variant=small_thinker_variant,
)
