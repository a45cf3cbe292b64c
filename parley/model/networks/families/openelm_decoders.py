"""OpenELM (arXiv 2404.14619): its layers have more heads and wider MLPs the later they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import COMMON_FIELDS, DecoderFamily
from parley.model.networks.rope import wrong_value
from parley.native.layer_shape import HeadSizes


def _read_list(fields: dict[str, Any], name: str, count: int) -> list[Any]:
    """Return the positive numbers of all layers. Raises Unfusable."""
    numbers = fields[name]
    if not isinstance(numbers, list) or len(numbers) != count or not all(0 < number < 1 << 20 for number in numbers):
        raise wrong_value(name, numbers)
    return numbers


def openelm_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the heads and the width of the MLP of each layer. Raises Unfusable."""
    count, dim = len(layer_types), read_size(fields, "head_dim")
    heads, kv_heads = (_read_list(fields, name, count) for name in ("num_query_heads", "num_kv_heads"))
    if any(queries % keys for queries, keys in zip(heads, kv_heads, strict=True)):
        raise wrong_value("num_kv_heads", kv_heads)
    divisor, hidden = read_size(fields, "ffn_dim_divisor"), read_size(fields, "hidden_size")
    widths = [_round_width(factor * hidden, divisor) for factor in _read_list(fields, "ffn_multipliers", count)]
    return [
        {"heads": queries, "head_sizes": HeadSizes(keys, dim), "mlp_width": width}
        for queries, keys, width in zip(heads, kv_heads, widths, strict=True)
    ]


def _round_width(width: float, divisor: int) -> int:
    """Return the nearest multiple of ``divisor``, or the next one if that is less than 9 / 10 of the width."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest if nearest >= 0.9 * width else nearest + divisor


def openelm_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config: with the heads of its widest layer, and the gates of MLPs apart in GGUF files."""
    sizes = {
        "num_attention_heads": max(config["num_query_heads"]),
        "num_key_value_heads": max(config["num_kv_heads"]),
    }
    row = replace(OPENELM, fields={**OPENELM.fields, **sizes})
    if (config.get("quantization_config") or {}).get("quant_method") != "gguf":
        return row
    return replace(row, tensors=replace(OPENELM.tensors, gate_up=("ffn.gate_proj", "ffn.up_proj")))


OPENELM = DecoderFamily(
    COMMON_FIELDS
    | {
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "intermediate_size": None,
        "num_query_heads": None,
        "num_kv_heads": None,
        "ffn_multipliers": None,
        "ffn_dim_divisor": 256,
        "ffn_with_glu": True,
        "normalize_qk_projections": True,
        "normalization_layer_name": "rms_norm",
    },
    renamed={
        "model_dim": "hidden_size",
        "num_transformer_layers": "num_hidden_layers",
        "max_context_length": "max_position_embeddings",
        "rope_freq_constant": "rope_theta",
        "activation_fn_name": "hidden_act",
        "share_input_output_layers": "tie_word_embeddings",
    },
    required={"ffn_with_glu": True, "normalize_qk_projections": True, "normalization_layer_name": "rms_norm"},
    tensors=TensorNames(
        embedding="transformer.token_embeddings",
        norm="transformer.norm",
        layer="transformer.layers.",
        qkv=("attn.qkv_proj",),
        output="attn.out_proj",
        gate_up=("ffn.proj_1",),
        down="ffn.proj_2",
        attention_norm="attn_norm",
        mlp_norm="ffn_norm",
        query_norm="attn.q_norm",
        key_norm="attn.k_norm",
    ),
    layer_variations=openelm_variations,
    variant=openelm_variant,
)
