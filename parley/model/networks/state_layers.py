"""The layers with a state of the model types on the fused decoder: names of tensors, and how their sizes are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parley.model.networks.rope import Unfusable
from parley.native.state_shape import GatedDeltaShape, ShortConvolutionShape, StateShape


@dataclass(frozen=True)
class StateNames:
    """The names of the tensors of a layer with a state; those that are None or empty do not exist.

    ``input`` lists the linear layers to be merged that read the layer's input, ``gates`` those of the numbers per head.
    ``decay`` holds the logarithm of the rate at which a state decays.
    """

    input: tuple[str, ...]
    output: str
    convolution: str
    gates: tuple[str, ...] = ()
    norm: str | None = None
    decay: str | None = None
    step_bias: str | None = None


@dataclass(frozen=True)
class StateFamily:
    """How the layers with a state of one model type are read. ``layer_type``: their name in layer_types of the config.

    ``has_bias``: the field that says whether their linear layers and their convolution have biases; None: they have
    none. ``read_shape`` reads their sizes from a config's fields, and raises Unfusable.
    """

    layer_type: str
    names: StateNames
    read_shape: Callable[[Mapping[str, Any]], StateShape]
    has_bias: str | None = None


def read_gated_delta(fields: Mapping[str, Any]) -> GatedDeltaShape:
    """Return the sizes of a gated delta net. Raises Unfusable."""
    key_heads, value_heads, key_dim, value_dim, kernel = (
        _read_size(fields, f"linear_{name}")
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    if value_heads % key_heads:
        raise Unfusable(f"{value_heads} value heads over {key_heads} key heads do not divide")
    if fields["hidden_act"] not in ("silu", "swish"):
        raise Unfusable(f"its convolutions have the activation {fields['hidden_act']}")
    return GatedDeltaShape(key_heads, value_heads, key_dim, value_dim, kernel)


def read_short_convolution(fields: Mapping[str, Any]) -> ShortConvolutionShape:
    """Return the sizes of a short convolution. Raises Unfusable."""
    return ShortConvolutionShape(_read_size(fields, "hidden_size"), _read_size(fields, "conv_L_cache"))


def _read_size(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise Unfusable(f"its config gives {name} as {value!r}")
    return value


QWEN3_NEXT_STATES = StateFamily(
    "linear_attention",
    StateNames(
        input=("linear_attn.in_proj_qkvz",),
        gates=("linear_attn.in_proj_ba",),
        output="linear_attn.out_proj",
        convolution="linear_attn.conv1d",
        norm="linear_attn.norm",
        decay="linear_attn.A_log",
        step_bias="linear_attn.dt_bias",
    ),
    read_gated_delta,
)
QWEN3_5_STATES = StateFamily(
    "linear_attention",
    StateNames(
        input=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        output="linear_attn.out_proj",
        convolution="linear_attn.conv1d",
        norm="linear_attn.norm",
        decay="linear_attn.A_log",
        step_bias="linear_attn.dt_bias",
    ),
    read_gated_delta,
)
LFM2_STATES = StateFamily(
    "conv",
    StateNames(input=("conv.in_proj",), output="conv.out_proj", convolution="conv.conv"),
    read_short_convolution,
    has_bias="conv_bias",
)
