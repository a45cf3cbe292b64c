"""Step 3.5 and 3.7: windows with more heads, a gate for each head, limited gates of MLPs in some layers.

Published configs list layers that predict further tokens after the others, and give each layer's base of the rotary
embedding; Transformers writes one rotary embedding for each type of layers (configuration_step3p7.py).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import NormForm
from parley.model.networks.decoder_tensors import NORMED_HEADS
from parley.model.networks.families.decoder_family import COMMON_FIELDS, FULL, SLIDING, DecoderFamily
from parley.model.networks.mixtures import DEEPSEEK_NAMES, GLM4_MIXTURE, MixtureFamily, sparse_mlp_types
from parley.model.networks.rope import RopeConfig, Unfusable, read_rope, wrong_value
from parley.native.layer_shape import GateLimits, HeadSizes

FIRST_MIXTURE = 3  # layers before it have a dense MLP, if the config does not list them
# Lists with a member for each layer, which may be followed by those of further layers
LAYER_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")


def inverse_silu(value: float) -> float:
    """Return the x above 0 with silu(x) = ``value``, which is above 0. By Newton's method: silu rises there."""
    x = value + 1
    for _ in range(50):
        sigmoid = 1 / (1 + math.exp(-x))
        x -= (x * sigmoid - value) / (sigmoid * (1 + x * (1 - sigmoid)))
    return x


def step_mixtures(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: ``mlp_layer_types``, or else ``moe_layers_enum``, says so; or all from the fourth
    on have. Raises Unfusable."""
    if fields["mlp_layer_types"] is not None:
        return sparse_mlp_types(fields, layer)
    listed = fields["moe_layers_enum"]
    if listed is None:
        return layer >= FIRST_MIXTURE
    numbers = listed.split(",") if isinstance(listed, str) else listed
    try:
        return layer in {int(number) for number in numbers if str(number).strip()}
    except (TypeError, ValueError):
        raise wrong_value("moe_layers_enum", listed) from None


def step_ropes(fields: dict[str, Any]) -> dict[str, RopeConfig]:
    """Return the rotary embeddings by the type of layers; only that of FULL ones may be scaled. Raises Unfusable."""
    layer_types = fields["layer_types"] or [FULL]
    parameters = fields["rope_parameters"]
    if not isinstance(parameters, dict) or not any(isinstance(value, dict) for value in parameters.values()):
        scaling = fields["rope_scaling"] or {}
        parameters = {
            name: (scaling if name == FULL else {}) | _read_layer_rope(fields, layer_types.index(name))
            for name in dict.fromkeys(layer_types)
        }
    used = dict.fromkeys((FULL, *layer_types)) if FULL in layer_types else dict.fromkeys(layer_types)
    if not all(isinstance(parameters.get(name), dict) for name in used):
        raise Unfusable("its config does not give a rotary embedding for each type of its layers")
    whole = {**fields, "partial_rotary_factor": 1.0, "rope_theta": 10000.0}
    return {name: read_rope(whole, parameters[name], read_size(fields, "head_dim")) for name in used}


def _read_layer_rope(fields: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the parameters of a layer's rotary embedding from the lists of a published config. Raises Unfusable."""
    found: dict[str, Any] = {}
    for name, field in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
        value = fields[field]
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
            if value is None:
                raise wrong_value(field, fields[field])
        if value is not None:
            found[name] = value
    return found


def step_variations(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the heads and limits of each layer. Raises Unfusable."""
    dim, kv_heads = read_size(fields, "head_dim"), fields["num_key_value_heads"]
    other = fields["attention_other_setting"] or {}
    if not isinstance(other, dict) or other.get("head_dim", dim) != dim:
        raise wrong_value("attention_other_setting", other)
    heads = fields["num_sliding_attention_heads"] or other.get("num_attention_heads", fields["num_attention_heads"])
    windowed_kv_heads = other.get("num_attention_groups", kv_heads)
    for count, groups in ((fields["num_attention_heads"], kv_heads), (heads, windowed_kv_heads)):
        if type(count) is not int or type(groups) is not int or groups < 1 or count < 1 or count % groups:
            raise Unfusable(f"{reprlib.repr(count)} heads over {reprlib.repr(groups)} key/value heads do not divide")
    windowed: dict[str, Any] = {"heads": heads, "head_sizes": HeadSizes(windowed_kv_heads, dim)}
    limits = [_read_limits(fields, name, len(layer_types)) for name in ("swiglu_limits_shared", "swiglu_limits")]
    return [
        {"mlp_limits": shared, "expert_limits": chosen} | (windowed if name == SLIDING else {})
        for name, shared, chosen in zip(layer_types, *limits, strict=True)
    ]


def _read_limits(fields: dict[str, Any], name: str, count: int) -> list[GateLimits | None]:
    """Return the limits of each layer's MLPs. The config limits activated gates and ups; 0: it does not."""
    values = fields[name] or [None] * count
    if not isinstance(values, list) or len(values) != count:
        raise wrong_value(name, values)
    numbers = [0.0 if value is None else read_number({name: value}, name) for value in values]
    if math.inf in numbers:
        raise wrong_value(name, values)
    return [GateLimits(inverse_silu(number), number) if number else None for number in numbers]


def step_factors(fields: dict[str, Any]) -> dict[str, float]:
    """Return the factor of scores, if it is not that of the size of heads. Raises Unfusable."""
    scalar = fields["score_scalar"]
    if scalar is None:
        return {}
    number = read_number({"query_pre_attn_scalar": scalar}, "query_pre_attn_scalar")
    if number == 0:
        raise wrong_value("query_pre_attn_scalar", scalar)
    return {"score_scale": (read_size(fields, "head_dim") / number) ** 0.5}


def step_variant(config: Mapping[str, Any]) -> DecoderFamily:
    """Return the row for a config, without what it says of layers after the last."""
    count = config.get("num_hidden_layers", STEP.fields["num_hidden_layers"])
    longer = {
        name: config[name][:count]
        for name in LAYER_LISTS
        if isinstance(config.get(name), list) and type(count) is int and len(config[name]) > count
    }
    return replace(STEP, fields={**STEP.fields, **longer}, renamed={**STEP.renamed, **dict.fromkeys(longer, "")})


STEP_NAMES = replace(
    DEEPSEEK_NAMES,
    router="moe.gate",
    choice_bias="moe.router_bias",
    gate_up=("moe.gate_proj.weight", "moe.up_proj.weight"),
    down="moe.down_proj.weight",
    shared_gate_up=("share_expert.gate_proj", "share_expert.up_proj"),
    shared_down="share_expert.down_proj",
)
STEP_MIXTURE = MixtureFamily(
    (STEP_NAMES, *GLM4_MIXTURE.layouts), has_mixture=step_mixtures, normalized=True, is_sigmoid=True, shared=1
)
STEP = DecoderFamily(
    COMMON_FIELDS
    | {
        "vocab_size": 128815,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "score_scalar": None,
        "sliding_window": None,
        "layer_types": None,
        "num_sliding_attention_heads": None,
        "attention_other_setting": None,
        "partial_rotary_factors": None,
        "use_rope_layers": None,
        "num_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 1280,
        "routed_scaling_factor": 1.0,
        "mlp_layer_types": None,
        "moe_layers_enum": None,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
        "sink": False,
        "num_nextn_predict_layers": 0,
    },
    renamed={
        "num_attention_groups": "num_key_value_heads",
        **dict.fromkeys(("n_routed_experts", "moe_num_experts", "num_local_experts"), "num_experts"),
        "moe_top_k": "num_experts_per_tok",
        **dict.fromkeys(("share_expert_dim", "share_expert_dims"), "shared_expert_intermediate_size"),
        "moe_router_scaling_factor": "routed_scaling_factor",
        "query_pre_attn_scalar": "score_scalar",  # None stands for the size of heads
    },
    required={
        "attention_bias": False,
        "mlp_bias": False,
        "use_rope_layers": [],
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
        "sink": False,
    },
    tensors=replace(NORMED_HEADS, qkv=("self_attn.q_proj", "self_attn.g_proj", "self_attn.k_proj", "self_attn.v_proj")),
    norms=NormForm(offset=1.0),
    ropes=step_ropes,
    has_output_gate=True,
    has_head_gates=True,
    layer_factors=step_factors,
    layer_variations=step_variations,
    mixture=STEP_MIXTURE,
    extra_layers="num_nextn_predict_layers",
    variant=step_variant,
)
