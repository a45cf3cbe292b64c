"""The layers with a state of the model types on the fused decoder: names of tensors, and how their sizes are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parley.model.networks.config_fields import read_size
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.state_shape import (
    MAX_KEY_DIM,
    GatedDeltaShape,
    KimiDeltaShape,
    Mamba1Shape,
    Mamba2Shape,
    ShortConvolutionShape,
    StateShape,
)


@dataclass(frozen=True)
class StateNames:
    """The names of the tensors of a layer with a state; those that are None or empty do not exist.

    ``input`` lists the linear layers to be merged that read the layer's input, ``gates`` those of the numbers per head.
    ``decay`` holds the logarithm of a state's rate of decay, or the rate with the other sign if it ``is_rate``.
    ``convolution`` lists the convolutions to be merged: one, or those of queries, keys and values.
    ``skip`` is that of ``StateWeights``. ``parameters`` and ``step`` are Mamba 1's linear layers between the
    convolution and the scan, ``parameter_norms`` the norms of the outputs of ``parameters``, if they have weights.
    Kimi Delta Attention with a ``rank`` makes decays by ``step``, and gates of outputs by ``gates``.
    ``norms``: the names of the layer's norms by field of ``TensorNames`` where they are not those of other layers.
    """

    input: tuple[str, ...]
    output: str
    convolution: tuple[str, ...]
    gates: tuple[str, ...] = ()
    norm: str | None = None
    decay: str | None = None
    step_bias: str | None = None
    skip: str | None = None
    parameters: str = ""
    step: str = ""
    parameter_norms: tuple[str, ...] = ()
    is_rate: bool = False
    norms: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class StateFamily:
    """How the layers with a state of one model type are read. ``layer_type``: their name in layer_types of the config.

    ``has_bias``: the field that says whether their linear layers have biases, and ``has_convolution_bias`` whether
    their convolutions have; None: they have none. ``read_shape`` reads their sizes from a config's fields, and raises
    Unfusable. ``others``: the names of tensors in other published forms; those of GGUF files are made by
    ``gguf/state_architectures.py``.
    """

    layer_type: str
    names: StateNames
    read_shape: Callable[[Mapping[str, Any]], StateShape]
    has_bias: str | None = None
    has_convolution_bias: str | None = None
    others: tuple[StateNames, ...] = ()


def read_gated_delta(fields: Mapping[str, Any]) -> GatedDeltaShape:
    """Return the sizes of a gated delta net. Raises Unfusable."""
    key_heads, value_heads, key_dim, value_dim, kernel = (
        read_size(fields, f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    if value_heads % key_heads:
        raise Unfusable(f"{value_heads} value heads over {key_heads} key heads do not divide")
    if key_dim > MAX_KEY_DIM:
        raise Unfusable(f"its keys have {key_dim} numbers, of at most {MAX_KEY_DIM}")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise Unfusable(f"its convolutions have the activation {str(fields['hidden_act'])[:100]}")
    return GatedDeltaShape(key_heads, value_heads, key_dim, value_dim, kernel)


def read_olmo_delta(fields: Mapping[str, Any]) -> GatedDeltaShape:
    """Return the sizes of a gated delta net of OLMo Hybrid. Raises Unfusable."""
    heads = fields["num_attention_heads"]
    sizes = {
        name: heads if fields[name] is None else fields[name]
        for name in ("linear_num_key_heads", "linear_num_value_heads")
    }
    sizes["linear_key_head_dim"] = fields["linear_key_head_dim"]
    if sizes["linear_key_head_dim"] is None:
        sizes["linear_key_head_dim"] = int(0.75 * fields["hidden_size"] / read_size(sizes, "linear_num_key_heads"))
    sizes["linear_value_head_dim"] = fields["linear_value_head_dim"]
    if sizes["linear_value_head_dim"] is None:
        sizes["linear_value_head_dim"] = 2 * read_size(sizes, "linear_key_head_dim")
    strength = 2.0 if fields["linear_allow_neg_eigval"] else 1.0
    return replace(read_gated_delta({**fields, **sizes}), max_strength=strength, norm_eps=1e-5)


def read_kimi_delta(fields: Mapping[str, Any]) -> KimiDeltaShape:
    """Return the sizes of Kimi Delta Attention: ``linear_attn_config`` has them in published configs. Raises
    Unfusable."""
    published = fields["linear_attn_config"] or {}
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    sizes = {name: published.get(name, fields[own]) for name, own in names.items()}
    dim = read_size(sizes, "head_dim")
    return _check_kimi_delta(
        fields,
        KimiDeltaShape(read_size(sizes, "num_heads"), dim, read_size(sizes, "short_conv_kernel_size"), rank=dim),
    )


def read_bailing_delta(fields: Mapping[str, Any]) -> KimiDeltaShape:
    """Return the sizes of Kimi Delta Attention of Ling, whose decays are bounded. Raises Unfusable.

    Configs that Transformers has written have the size of a head as ``linear_head_dim``, and another ``head_dim``.
    """
    names = {"linear_num_heads": "num_attention_heads", "linear_head_dim": "head_dim"}
    names["linear_conv_kernel_dim"] = "short_conv_kernel_size"
    heads, dim, kernel = (
        read_size(fields, published if fields[name] is None else name) for name, published in names.items()
    )
    bound = None
    if fields["kda_safe_gate"]:
        bound = fields["kda_lower_bound"]
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not -math.inf < bound < 0:
            raise wrong_value("kda_lower_bound", bound)
    return _check_kimi_delta(fields, KimiDeltaShape(heads, dim, kernel, lower_bound=bound))


def _check_kimi_delta(fields: Mapping[str, Any], shape: KimiDeltaShape) -> KimiDeltaShape:
    if shape.dim > MAX_KEY_DIM:
        raise Unfusable(f"its keys have {shape.dim} numbers, of at most {MAX_KEY_DIM}")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise Unfusable(f"its convolutions have the activation {str(fields['hidden_act'])[:100]}")
    return shape


def read_short_convolution(fields: Mapping[str, Any]) -> ShortConvolutionShape:
    """Return the sizes of a short convolution. Raises Unfusable."""
    return ShortConvolutionShape(read_size(fields, "hidden_size"), read_size(fields, "conv_L_cache"))


def read_mamba2(fields: Mapping[str, Any]) -> Mamba2Shape:
    """Return the sizes of a Mamba 2 layer. Raises Unfusable."""
    heads, state_dim, groups, kernel = (
        read_size(fields, f"mamba_{name}") for name in ("n_heads", "d_state", "n_groups", "d_conv")
    )
    inner = _read_inner(fields)
    head_dim = inner // heads if fields["mamba_d_head"] == "auto" else read_size(fields, "mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise Unfusable(f"{heads} heads of {head_dim} in {groups} groups do not divide {inner} numbers")
    activation = fields.get("mamba_hidden_act", fields["hidden_act"])
    if activation not in ("silu", "swish"):
        raise Unfusable(f"its convolutions have the activation {str(activation)[:100]}")
    return Mamba2Shape(heads, head_dim, state_dim, groups, kernel, groups, step_limits=_read_step_limits(fields))


def read_mamba1(fields: Mapping[str, Any]) -> Mamba1Shape:
    """Return the sizes of a Mamba 1 layer. Raises Unfusable."""
    state_dim, kernel, hidden = (read_size(fields, name) for name in ("mamba_d_state", "mamba_d_conv", "hidden_size"))
    is_auto = fields["mamba_dt_rank"] == "auto"
    rank = -(-hidden // 16) if is_auto else read_size(fields, "mamba_dt_rank")
    if fields.get("mamba_d_inner") is not None:
        inner = read_size(fields, "mamba_d_inner")
    else:
        inner = _expand_hidden(fields, hidden)
    if fields["hidden_act"] not in ("silu", "swish"):
        raise Unfusable(f"its convolutions have the activation {str(fields['hidden_act'])[:100]}")
    return Mamba1Shape(inner, state_dim, rank, kernel)


def _expand_hidden(fields: Mapping[str, Any], hidden: int) -> int:
    expand = fields["mamba_expand"]
    if isinstance(expand, bool) or not isinstance(expand, int | float) or not 1 <= expand * hidden < 1 << 31:
        raise wrong_value("mamba_expand", expand)
    return int(expand * hidden)


def read_normed_mamba1(fields: Mapping[str, Any]) -> Mamba1Shape:
    """Return the same of a layer with norms of steps, B and C. Raises Unfusable."""
    eps = fields.get("mixer_rms_eps", fields["rms_norm_eps"])
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise wrong_value("mixer_rms_eps", eps)
    return replace(read_mamba1(fields), norm_eps=float(eps))


def read_lightning(fields: Mapping[str, Any]) -> Mamba2Shape:
    """Return the sizes of lightning attention. Raises Unfusable."""
    heads = read_size(fields, "num_attention_heads")
    dim = fields["hidden_size"] // heads if fields["head_dim"] is None else read_size(fields, "head_dim")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise Unfusable(f"its queries, keys and values have the activation {str(fields['hidden_act'])[:100]}")
    return Mamba2Shape(heads, dim, dim, heads, kernel=1, is_gate_first=False, has_steps=False, has_sigmoid_gates=True)


def _read_inner(fields: Mapping[str, Any]) -> int:
    """Return the numbers of all heads: ``mamba_d_ssm``, or ``mamba_expand`` times the hidden size, or with neither the
    product of the heads and their size. Raises Unfusable."""
    if fields.get("mamba_d_ssm") is not None:
        return read_size(fields, "mamba_d_ssm")
    if fields["mamba_expand"] is None:
        return read_size(fields, "mamba_n_heads") * read_size(fields, "mamba_d_head")
    return read_size(fields, "mamba_expand") * read_size(fields, "hidden_size")


def _read_step_limits(fields: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest step. Transformers writes infinity as {"__float__": "Infinity"}."""
    limits = fields["time_step_limit"]
    if limits is None:
        return 0.0, math.inf
    try:
        lowest, highest = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (KeyError, TypeError, ValueError):
        lowest, highest = math.nan, math.nan
    if not 0 <= lowest <= highest:
        raise wrong_value("time_step_limit", limits)
    return lowest, highest


QWEN3_NEXT_NAMES = StateNames(
    input=("linear_attn.in_proj_qkvz",),
    gates=("linear_attn.in_proj_ba",),
    output="linear_attn.out_proj",
    convolution=("linear_attn.conv1d",),
    norm="linear_attn.norm",
    decay="linear_attn.A_log",
    step_bias="linear_attn.dt_bias",
)
QWEN3_5_NAMES = replace(
    QWEN3_NEXT_NAMES,
    input=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
GGUF_RATE: dict[str, Any] = {"decay": "linear_attn.A", "is_rate": True}
QWEN3_NEXT_STATES = StateFamily(
    "linear_attention",
    QWEN3_NEXT_NAMES,
    read_gated_delta,
    others=(
        replace(QWEN3_NEXT_NAMES, **GGUF_RATE, input=QWEN3_5_NAMES.input),
        replace(QWEN3_NEXT_NAMES, **GGUF_RATE),
    ),
)
QWEN3_5_STATES = StateFamily(
    "linear_attention", QWEN3_5_NAMES, read_gated_delta, others=(replace(QWEN3_5_NAMES, **GGUF_RATE),)
)
OLMO_NAMES = StateNames(
    input=tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
    gates=("linear_attn.b_proj", "linear_attn.a_proj"),
    output="linear_attn.o_proj",
    convolution=tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
    norm="linear_attn.o_norm",
    decay="linear_attn.A_log",
    step_bias="linear_attn.dt_bias",
    norms={
        "attention_norm": "input_layernorm",
        "attention_after_norm": None,
        "mlp_norm": "post_attention_layernorm",
        "mlp_after_norm": None,
    },
)
OLMO_STATES = StateFamily(
    "linear_attention",
    OLMO_NAMES,
    read_olmo_delta,
    others=(replace(OLMO_NAMES, convolution=("linear_attn.conv1d",)),),
)
KIMI_NAMES = StateNames(
    input=tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "b", "f_a", "g_a")),
    output="self_attn.o_proj",
    convolution=tuple(f"self_attn.{part}_conv1d" for part in "qkv"),
    gates=("self_attn.g_b_proj",),
    norm="self_attn.o_norm",
    decay="self_attn.A_log",
    step_bias="self_attn.dt_bias",
    step="self_attn.f_b_proj",
)
BAILING_NAMES = replace(
    KIMI_NAMES,
    input=tuple(f"self_attn.{part}_proj" for part in "qkvbfg"),
    gates=(),
    step="",
)


def _newer_kimi_names(names: StateNames) -> StateNames:
    """Return the names that Transformers gives to the tensors of Kimi Delta Attention."""

    def rename(name: str) -> str:
        return name.replace("self_attn.", "self_attn.forget_gate.")

    return replace(
        names,
        input=tuple(rename(name) if ".f_" in name else name for name in names.input),
        convolution=("self_attn.conv1d",),
        decay=rename(str(names.decay)),
        step_bias=rename(str(names.step_bias)),
        step=rename(names.step),
    )


KIMI_GGUF_NAMES = replace(KIMI_NAMES, decay="self_attn.A", is_rate=True)
KIMI_STATES = StateFamily(
    "linear_attention", KIMI_NAMES, read_kimi_delta, others=(_newer_kimi_names(KIMI_NAMES), KIMI_GGUF_NAMES)
)
BAILING_STATES = StateFamily(
    "linear_attention",
    BAILING_NAMES,
    read_bailing_delta,
    others=(_newer_kimi_names(BAILING_NAMES), replace(BAILING_NAMES, decay="self_attn.A", is_rate=True)),
)
LFM2_STATES = StateFamily(
    "conv",
    StateNames(input=("conv.in_proj",), output="conv.out_proj", convolution=("conv.conv",)),
    read_short_convolution,
    has_bias="conv_bias",
    has_convolution_bias="conv_bias",
)


def _mamba2_names(module: str) -> StateNames:
    """Return the names of Mamba 2's tensors below a layer's ``module``."""
    return StateNames(
        input=(f"{module}.in_proj",),
        output=f"{module}.out_proj",
        convolution=(f"{module}.conv1d",),
        norm=f"{module}.norm",
        decay=f"{module}.A_log",
        step_bias=f"{module}.dt_bias",
        skip=f"{module}.D",
    )


def _mamba1_names(module: str) -> StateNames:
    """Return the names of Mamba 1's tensors below a layer's ``module``."""
    return StateNames(
        input=(f"{module}.in_proj",),
        output=f"{module}.out_proj",
        convolution=(f"{module}.conv1d",),
        decay=f"{module}.A_log",
        step_bias=f"{module}.dt_proj.bias",
        skip=f"{module}.D",
        parameters=f"{module}.x_proj",
        step=f"{module}.dt_proj",
    )


LIGHTNING_STATES = StateFamily(
    "linear_attention",
    StateNames(
        input=("self_attn.output_gate", "self_attn.qkv_proj"),
        output="self_attn.out_proj",
        convolution=(),
        norm="self_attn.norm",
    ),
    read_lightning,
)
MAMBA2_NAMES = _mamba2_names("mamba")
MAMBA2_STATES = StateFamily(
    "linear_attention",
    MAMBA2_NAMES,
    read_mamba2,
    has_bias="mamba_proj_bias",
    has_convolution_bias="mamba_conv_bias",
    others=(replace(MAMBA2_NAMES, decay="mamba.A", is_rate=True),),
)
MIXER_NAMES = _mamba2_names("mixer")
MIXER_STATES = replace(MAMBA2_STATES, names=MIXER_NAMES, others=(replace(MIXER_NAMES, decay="mixer.A", is_rate=True),))
MAMBA1_NAMES = _mamba1_names("mixer")
MAMBA1_STATES = replace(
    MAMBA2_STATES,
    names=MAMBA1_NAMES,
    read_shape=read_mamba1,
    others=(replace(MAMBA1_NAMES, decay="mixer.A", is_rate=True),),
)
FALCON_MAMBA_STATES = replace(MAMBA1_STATES, read_shape=read_normed_mamba1)
JAMBA_NAMES = replace(
    _mamba1_names("mamba"), parameter_norms=("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")
)
JAMBA_STATES = replace(
    FALCON_MAMBA_STATES, names=JAMBA_NAMES, others=(replace(JAMBA_NAMES, decay="mamba.A", is_rate=True),)
)
