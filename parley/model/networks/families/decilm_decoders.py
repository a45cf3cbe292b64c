"""DeciLM: Llama-Nemotron 49B, 51B and 253B (``nemotron-nas``) and DeciLM-7B (``deci``), Llamas whose layers differ.

A search over architectures chose for each layer how many heads of keys it has, how wide its MLP is, whether it has
either at all, and whether a linear layer replaces attention. ``block_configs`` says so in the published configs
(configuration_decilm.py of nvidia's repositories).
"""

from __future__ import annotations

from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import ATTENTION_BIASES, COMMON_FIELDS, MLP_BIASES, DecoderFamily
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.layer_shape import HeadSizes

WIDTH_UNIT = 256  # widths of MLPs are rounded up to multiples of it
LINEAR_ATTENTION = "attention", "replace_with_linear"


def decilm_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the heads and the MLP of each layer. Raises Unfusable."""
    heads, count = fields["num_attention_heads"], len(layer_types)
    dim = read_size(fields, "head_dim") if fields["head_dim"] else fields["hidden_size"] // heads
    blocks, listed_kv_heads = fields["block_configs"], fields["num_key_value_heads_per_layer"]
    if blocks is None:
        if listed_kv_heads is not None and (not isinstance(listed_kv_heads, list) or len(listed_kv_heads) != count):
            raise wrong_value("num_key_value_heads_per_layer", listed_kv_heads)
        if not listed_kv_heads:
            return [{}] * count
        return [_read_heads({"num_key_value_heads": kv_heads}, heads, dim) for kv_heads in listed_kv_heads]
    if not isinstance(blocks, list) or len(blocks) != count:
        raise Unfusable(f"its block_configs do not describe {count} layers")
    return [
        _read_heads(_read_part(block, "attention"), heads, dim) | _read_mlp(_read_part(block, "ffn"), fields)
        for block in blocks
    ]


def _read_part(block: Any, name: str) -> dict[str, Any]:
    """Return the description of a layer's attention or MLP. Raises Unfusable."""
    part = block.get(name) if isinstance(block, dict) else None
    if not isinstance(part, dict):
        raise Unfusable(f"its block_configs lack {name} of a layer")
    for option in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink"):
        if part.get(option) and (name, option) != LINEAR_ATTENTION:
            raise Unfusable(f"its block_configs give {name}.{option} as {str(part[option])[:100]}")
    return part


def _read_heads(attention: dict[str, Any], heads: int, dim: int) -> dict[str, Any]:
    """Return the fields of ``LayerShape`` for a layer's attention. Raises Unfusable."""
    if attention.get("no_op"):
        return {"has_mixer": False}
    if attention.get("replace_with_linear"):
        return {"has_linear_mixer": True}
    if attention.get("num_key_value_heads") is None:
        group = read_size(attention, "n_heads_in_group")
        if heads % group:
            raise wrong_value("n_heads_in_group", group)
        return {"head_sizes": HeadSizes(heads // group, dim)}
    kv_heads = read_size(attention, "num_key_value_heads")
    if heads % kv_heads:
        raise wrong_value("num_key_value_heads", kv_heads)
    return {"head_sizes": HeadSizes(kv_heads, dim)}


def _read_mlp(mlp: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``LayerShape`` for a layer's MLP. Raises Unfusable."""
    if mlp.get("no_op"):
        return {"has_mlp": False}
    if mlp.get("intermediate_size") is not None:
        return {"mlp_width": read_size(mlp, "intermediate_size")}
    factor = mlp.get("ffn_mult")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 1 << 20:
        raise wrong_value("ffn_mult", factor)
    return {"mlp_width": -(-int(2 * factor * fields["hidden_size"] / 3) // WIDTH_UNIT) * WIDTH_UNIT}


DECILM = DecoderFamily(
    COMMON_FIELDS
    | {
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "block_configs": None,
        "num_key_value_heads_per_layer": None,
    },
    biases=ATTENTION_BIASES | MLP_BIASES,
    tensors=TensorNames(published={"self_attn.linear_attn": "self_attn.o_proj"}),
    layer_variations=decilm_variations,
)
