"""Reads the config of a fused decoder from config.json, without importing Transformers (which takes seconds).

A config with an unknown option is never guessed at: the model is *unfusable* and runs through Transformers.
``families/`` lists the config fields of each model type.
"""

from __future__ import annotations

import reprlib
from dataclasses import astuple, replace
from typing import Any

from parley.model.networks.activations import find_activation
from parley.model.networks.config_fields import read_flag, read_number, read_size, read_token_count
from parley.model.networks.decoder_config import (
    DecoderConfig,
    LayerInputShape,
    LinearLayout,
    MixtureShape,
    QueryScaling,
)
from parley.model.networks.decoder_tensors import TensorNames
from parley.model.networks.families.decoder_family import CHUNKED, FULL, MIXTURE, MLP, SLIDING, DecoderFamily
from parley.model.networks.families.table import FAMILIES
from parley.model.networks.layer_ropes import read_layer_ropes
from parley.model.networks.mixtures import SIZE_UNIT
from parley.model.networks.rope import (
    RopeConfig,
    Unfusable,
    latent_score_factor,
    rope_parameters,
    wrong_value,
)
from parley.model.networks.sinusoids import Sinusoids
from parley.native.layer_shape import ACTIVATIONS, LatentShape, LayerShape

LATENT_QUERIES = "self_attn.q_proj"  # the layer that makes queries in models with no latent for them
# Names of layer types in older configs of models with layers that keep a state, to those of newer ones.
OLD_LAYER_TYPES = {"attention": FULL, "mamba": "linear_attention"}


def read_decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read the config of a fused decoder. Raises Unfusable, also for a field of a wrong type."""
    try:
        return _read_fusable_config(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The readers of families check the fields that decide whether a model can be fused, not the type of each field
        raise Unfusable(f"a field of its config has a wrong type or value ({str(error)[:200]})") from error


def _read_fusable_config(config: dict[str, Any]) -> DecoderConfig:
    """Read the config of a fused decoder. Raises Unfusable, and built-in exceptions for fields of a wrong type."""
    family = _find_family(config)
    fields = _known_fields(family, config)
    hidden, heads, layer_count = (
        read_size(fields, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    _fill_default_sizes(fields, hidden, heads)
    kv_heads = read_size(fields, "num_key_value_heads")
    latent = _read_latent(fields, hidden // heads, heads, kv_heads)
    head_dim = _read_head_dim(fields, hidden // heads) if latent is None else latent.head_dim
    if heads % kv_heads or head_dim % 2:
        raise Unfusable(f"{heads} heads of {head_dim} over {kv_heads} key/value heads do not divide")
    layer_types = _read_layer_types(family, fields, layer_count)
    ropes, numbers = read_layer_ropes(family, fields, head_dim if latent is None else latent.rotary_dim, layer_types)
    if latent is not None and ropes[0].rotary != latent.rotary_dim:
        raise Unfusable(f"it rotates {ropes[0].rotary} of {latent.rotary_dim} dimensions")
    scaling = _read_query_scaling(family, fields, ropes)
    return DecoderConfig(
        vocab_size=read_size(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_size(fields, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_len=read_size(fields, "max_position_embeddings"),
        eps=read_number(fields, "rms_norm_eps"),
        ropes=ropes,
        layers=_read_layers(family, fields, layer_types, numbers, head_dim, scaling),
        tied=bool(fields["tie_word_embeddings"]),
        biases=_read_biases(family, fields),
        tensors=_read_tensor_names(family, fields),
        linear_layout=_check_linear_layout(family, heads),
        norms=family.norms,
        after_norm_eps=_read_optional(fields, "post_norm_eps"),
        position_offset=family.position_offset,
        sinusoids=_read_sinusoids(family, fields, hidden),
        query_scaling=scaling,
        embedding_scale=_read_embedding_scale(family, fields, hidden),
        scales_media=family.scales_media,
        logit_scale=_read_factor(fields, "logit_scale") / _read_factor(fields, "logits_scaling"),
        logit_softcap=_read_optional(fields, "final_logit_softcapping"),
        latent=latent,
        indexer=None if family.indexer is None else family.indexer.read_shape(fields, latent, ropes[0].rotary),
        state_layouts=() if family.state is None else (family.state.names, *family.state.others),
        mixture=_read_mixture(family, fields),
        extra_tokens=family.extra_tokens,
        extra_layers=_read_extra_layers(family, fields),
        layer_inputs=_read_layer_inputs(family, fields, layer_count),
        norm_gate_rank=_read_gate_rank(family, fields),
        compression=None if family.compression is None else family.compression(fields),
        hyper=None if family.hyper is None else family.hyper(fields),
        altup=None if family.altup is None else family.altup(fields),
        media_vocabularies=() if family.media_vocabularies is None else family.media_vocabularies(fields),
    )


def _find_family(config: dict[str, Any]) -> DecoderFamily:
    """Return the family of a config's model type, adapted to the config. Raises Unfusable if there is none."""
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise Unfusable(f"model type {kind} has no fused decoder")
    family = FAMILIES[kind]
    if family.variant is not None:
        family = family.variant(config)
    if (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        # llama.cpp's converter stores all weights [out, in], and queries, keys and values one after the other
        linear_layout = replace(family.linear_layout, has_grouped_qkv=False, is_transposed=False)
        family = replace(family, linear_layout=linear_layout)
    return family


def _read_query_scaling(
    family: DecoderFamily, fields: dict[str, Any], ropes: tuple[RopeConfig, ...]
) -> QueryScaling | None:
    """Return how queries are scaled by their positions; None: they are not. Raises Unfusable."""
    scaling = None if family.query_scaling is None else family.query_scaling(fields)
    if scaling is not None and (ropes[0].mrope_section or ropes[0].kind == "longrope"):
        raise Unfusable("its queries are scaled, but its rotary embedding has three axes or two sets of factors")
    return scaling


def _fill_default_sizes(fields: dict[str, Any], hidden: int, heads: int) -> None:
    """Set the sizes that a config may leave to others: key/value heads and the width of the MLP."""
    if fields["num_key_value_heads"] in ("heads", None):
        fields["num_key_value_heads"] = heads
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * hidden
    if "mlp_widths" in fields and isinstance(fields["intermediate_size"], list):  # one for each layer
        fields["mlp_widths"] = fields["intermediate_size"]
        fields["intermediate_size"] = max(fields["mlp_widths"])


def _read_head_dim(fields: dict[str, Any], default: int) -> int:
    """Return the width of a head in numbers. Raises Unfusable."""
    return default if fields["head_dim"] is None else read_size(fields, "head_dim")


def _check_linear_layout(family: DecoderFamily, heads: int) -> LinearLayout:
    """Return ``DecoderConfig.linear_layout``. Raises Unfusable."""
    shards = family.linear_layout.qkv_shards
    if shards and heads % shards:
        raise Unfusable(f"its {heads} heads do not divide into {shards} parts")
    return family.linear_layout


def _read_biases(family: DecoderFamily, fields: dict[str, Any]) -> frozenset[str]:
    """Return the groups of linear layers with a bias."""
    flags = dict(family.biases)
    if family.state is not None and family.state.has_bias is not None:
        flags["state"] = family.state.has_bias
    if family.state is not None and family.state.has_convolution_bias is not None:
        flags["convolution"] = family.state.has_convolution_bias
    return frozenset(name for name, flag in flags.items() if read_flag(fields, flag))


def _read_mixture(family: DecoderFamily, fields: dict[str, Any]) -> MixtureShape:
    """Return the sizes of mixtures of experts. Raises Unfusable."""
    mixture = family.mixture
    if mixture is None:
        return MixtureShape()
    return MixtureShape(
        mixture.read_expert_width(fields),
        mixture.read_shared_width(fields),
        mixture.layouts,
        mixture.read_latent_size(fields),
    )


def _read_gate_rank(family: DecoderFamily, fields: dict[str, Any]) -> int:
    """Return the numbers inside the gates of norms, 0 for types without them. Raises Unfusable."""
    if family.tensors.attention_norm_gate is None:
        return 0
    rank = read_size(fields, "gated_norm_rank")
    if rank % SIZE_UNIT:
        raise Unfusable(f"the gates of its norms have {rank} numbers inside, which is no multiple of {SIZE_UNIT}")
    return rank


def _read_extra_layers(family: DecoderFamily, fields: dict[str, Any]) -> int:
    """Return the number of unused layers in the checkpoint; 0 if the config gives no number."""
    extra_layers = fields.get(family.extra_layers or "")
    return extra_layers if type(extra_layers) is int else 0


def _read_layer_inputs(family: DecoderFamily, fields: dict[str, Any], count: int) -> LayerInputShape:
    """Return the sizes of inputs of layers. Raises Unfusable."""
    if family.tensors.layer_inputs is None:
        return LayerInputShape()
    width = read_size(fields, "hidden_size_per_layer_input")
    if not family.tensors.layer_inputs:
        return LayerInputShape(width, count)
    vocab = read_size(fields, "vocab_size_per_layer_input")
    if vocab < fields["vocab_size"] and not family.has_partial_inputs:
        raise Unfusable(f"only {vocab} of its {fields['vocab_size']} tokens have inputs of layers")
    padding = 0 if family.has_partial_inputs else fields["pad_token_id"] or 0
    if type(padding) is not int or not 0 <= padding < vocab:
        raise wrong_value("pad_token_id", padding)
    return LayerInputShape(width, count, vocab, padding)


def _read_latent(fields: dict[str, Any], value_dim: int, heads: int, kv_heads: int) -> LatentShape | None:
    """Return the sizes of latent attention, None for types without it. ``value_dim``: if the config has none.

    Raises Unfusable.
    """
    if "kv_lora_rank" not in fields:
        return None
    if kv_heads != heads:
        raise Unfusable(f"{heads} heads over {kv_heads} key/value heads do not share latents")
    sizes = LatentShape(
        rank=read_size(fields, "kv_lora_rank"),
        rotary_dim=read_size(fields, "qk_rope_head_dim"),
        plain_dim=read_size(fields, "qk_nope_head_dim"),
        value_dim=value_dim if fields["v_head_dim"] is None else read_size(fields, "v_head_dim"),
        query_rank=0 if fields["q_lora_rank"] is None else read_size(fields, "q_lora_rank"),
    )
    if any(size % SIZE_UNIT for size in astuple(sizes)):
        raise Unfusable(f"its latents, queries and values have sizes that are no multiples of {SIZE_UNIT}")
    return sizes


def _read_tensor_names(family: DecoderFamily, fields: dict[str, Any]) -> TensorNames:
    """Return the names of tensors, without norms that the config turns off."""
    names = family.tensors
    if not fields.get("use_qk_norm", True):
        names = replace(names, query_norm=None, key_norm=None)
    if names.query_latent_norm is not None and fields["q_lora_rank"] is None:
        names = replace(names, qkv=(LATENT_QUERIES, *names.qkv[1:]), query_latent_norm=None, query_up=None)
    return names


def _known_fields(family: DecoderFamily, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the config that its type knows, by Llama's names, with defaults. Raises Unfusable."""
    named = {name: value for name, value in config.items() if name not in family.renamed}
    named |= {family.renamed[name]: value for name, value in config.items() if name in family.renamed}
    fields = {name: named.get(name, default) for name, default in family.fields.items()}
    for name, value in family.required.items():
        configured = fields[name]
        if configured is not None and (configured != value or isinstance(configured, bool) != isinstance(value, bool)):
            raise wrong_value(name, fields[name])
    return fields


def _read_sinusoids(family: DecoderFamily, fields: dict[str, Any], hidden: int) -> Sinusoids | None:
    """Return how embeddings of positions are computed, None if they are not. Raises Unfusable."""
    if not family.has_sinusoidal_positions:
        return None
    padding = fields["pad_token_id"]
    if hidden < 4 or (padding is not None and type(padding) is not int):
        raise Unfusable(
            f"its config gives pad_token_id as {reprlib.repr(padding)} and {hidden} numbers in a hidden state"
        )
    return Sinusoids(hidden, padding)


def _read_optional(fields: dict[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else read_number(fields, name)


def _read_factor(fields: dict[str, Any], name: str) -> float:
    """Return a positive factor, 1 if the type does not know it."""
    value = read_number({name: 1.0} | fields, name)
    if value == 0:
        raise Unfusable(f"its config gives {name} as 0")
    return value


def _read_embedding_scale(family: DecoderFamily, fields: dict[str, Any], hidden: int) -> float:
    if read_flag(fields, family.has_embedding_scale):
        return float(hidden**0.5)
    return _read_factor(fields, "embedding_multiplier")


def _read_score_scale(fields: dict[str, Any], head_dim: int) -> float:
    if "kv_lora_rank" in fields:
        return float(head_dim**-0.5 * latent_score_factor(rope_parameters(fields)))
    if fields.get("attention_multiplier") is not None:
        return _read_factor(fields, "attention_multiplier")
    if "query_pre_attn_scalar" in fields:
        return float(_read_factor(fields, "query_pre_attn_scalar") ** -0.5)
    return float(head_dim**-0.5)


def _read_layers(
    family: DecoderFamily,
    fields: dict[str, Any],
    layer_types: list[str],
    ropes: list[int | None],
    head_dim: int,
    scaling: QueryScaling | None,
) -> tuple[LayerShape, ...]:
    """Return the computation of each layer. ``ropes``: the number of each layer's rotary embedding."""
    activation = family.activation or find_activation(fields["hidden_act"], ACTIVATIONS)
    if activation is None:
        raise Unfusable(f"its activation is {str(fields['hidden_act'])[:100]}")
    window = _read_window(fields)
    score_scale = _read_score_scale(fields, head_dim)
    mixture = family.mixture
    routing = None if mixture is None else mixture.read_routing(fields)
    state_type = None if family.state is None else family.state.layer_type
    state = None if family.state is None else family.state.read_shape(fields)
    factors: dict[str, Any] = {} if family.layer_factors is None else family.layer_factors(fields)
    score_scale *= factors.pop("score_scale", 1.0)
    slopes = () if family.slopes is None else family.slopes(fields)
    count = len(layer_types)
    has_mixture = [mixture is not None and mixture.has_mixture(fields, i) for i in range(count)]
    indexed = [False] * count if family.indexer is None else family.indexer.read_layers(fields, count)
    layers = tuple(
        LayerShape(
            score_scale=score_scale,
            window=window if layer_type == SLIDING else None,
            chunk=read_size(fields, "attention_chunk_size") if layer_type == CHUNKED else None,
            slopes=slopes,
            rope=None if layer_type == state_type else rope,
            softcap=_read_optional(fields, "attn_logit_softcapping"),
            has_whole_qk_norm=family.has_whole_qk_norm,
            is_qk_norm_late=family.is_qk_norm_late,
            has_scaled_queries=scaling is not None and not (scaling.skips_rotated and rope is not None),
            activation=activation,
            is_gated=family.is_gated,
            is_parallel=read_flag(fields, family.is_parallel),
            **({"residual_scale": _read_factor(fields, "residual_multiplier")} | factors),
            routing=routing if has_mixture[i] else None,
            has_output_gate=family.has_output_gate and layer_type != state_type,
            has_head_gates=family.has_head_gates,
            has_latent_gates=family.has_latent_gates,
            has_gated_attention_norm=family.tensors.attention_norm_gate is not None,
            has_gated_mlp_norm=family.tensors.mixture_norm_gate is not None and has_mixture[i],
            has_indexer=indexed[i],
            reads_chosen=indexed[i] or (family.indexer is not None and family.indexer.is_shared),
            state=state if family.is_hybrid or layer_type == state_type else None,
            is_hybrid=family.is_hybrid,
            has_mixer=layer_type not in (MLP, MIXTURE),
            has_mlp=layer_type in (MLP, MIXTURE) or not family.has_single_parts,
        )
        for i, (layer_type, rope) in enumerate(zip(layer_types, ropes, strict=True))
    )
    if family.layer_variations is None:
        return layers
    variations = family.layer_variations(fields, layer_types)
    return tuple(replace(layer, **members) for layer, members in zip(layers, variations, strict=True))


def _read_layer_types(family: DecoderFamily, fields: dict[str, Any], count: int) -> list[str]:
    """Return for each layer FULL, SLIDING, the type of the family's layers with a state, MLP or MIXTURE."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        layer_types = family.layer_types(fields, count)
    if family.state is not None and isinstance(layer_types, list):
        layer_types = [OLD_LAYER_TYPES.get(name, name) if isinstance(name, str) else name for name in layer_types]
    known_types = [FULL, SLIDING] if family.state is None else [FULL, SLIDING, family.state.layer_type]
    if family.has_single_parts:
        known_types += [MLP] if family.mixture is None else [MLP, MIXTURE]
    if "attention_chunk_size" in family.fields:
        known_types.append(CHUNKED)
    if len(layer_types) != count or not set(layer_types) <= set(known_types):
        raise Unfusable(f"its layer_types are not one of {' and '.join(known_types)} per layer")
    return list(layer_types)


def _read_window(fields: dict[str, Any]) -> int | None:
    """Return the window of sliding layers, in tokens; None if they see the whole context."""
    if fields.get("use_sliding_window") is False or fields.get("sliding_window") is None:
        return None
    return read_token_count(fields, "sliding_window")
