"""The description of an architecture of GGUF files as data, and the tensor names that most architectures share.

llama.cpp rotates neighbouring dimensions of the heads of some architectures, so its converter reorders the rows of
their queries and keys; ``interleaved`` says so.
"""

from __future__ import annotations

import math
import re
import reprlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parley.gguf.header import GgufError, GgufModel, GgufTensor

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_exps",
    "ffn_up_exps": "mlp.experts.up_exps",
    "ffn_gate_up_exps": "mlp.experts.gate_up_exps",
    "ffn_down_exps": "mlp.experts.down_exps",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_0-9]+(?:\.[a-z_0-9]+)*?)(?:\.(weight|bias|scale))?")
LAYER_NUMBER = re.compile(r"blk\.(\d+)\.")
DELTA_CONVOLUTION = re.compile(r"blk\.\d+\.ssm_conv1d_[qkv]\.weight")  # of Kimi Delta Attention
# How scores of experts are made of logits, by the numbers in files
SOFTMAX, SIGMOID = 1, 2
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class Architecture:
    """How one architecture's files differ from the usual ones.

    * ``model_type``, ``class_name``: as in config.json.
    * ``layer_names``: names of tensors in layers that differ from the usual ones; a name with a suffix stands for that
      tensor alone. ``model_names``: the same for tensors outside of layers. ``layer_prefix``: begins the names of
      layers.
    * ``interleaved``: the rows of queries and keys are in llama.cpp's order, as are the weights of their norms.
    * ``norm_offset``: the number that llama.cpp's converter adds to the weights of norms; ``has_plain_last_norm``: not
      to those of the last norm.
    * ``fields``: constant members of the config. ``keys``: further metadata fields, and their names in the config.
    * ``mixture``: the row for files with experts, if they are supported. ``gating``: how scores of experts are
      computed.
    * ``bias_layer``: the layer whose bias shows that attention has biases.
    * ``rope``: constant members of a scaled rotary embedding. ``rope_keys``: members of it that are in the metadata,
      and their names there.
    * ``variant(model)``: returns another row for a file, or None.
    * ``complete(model, config)``: adds members to the config that follow from other metadata.
    * ``has_axes``: positions may have several axes, which are equal for text.
    * ``has_tiled_values``: in layers of gated delta nets, the first value head of each key head comes first, then the
      second of each, and so on.
    * ``refused``: metadata fields of computations that are not supported.
    * ``lists``: metadata fields with a number for each layer, which ``complete`` reads.
    * ``has_proportional_rope``: in layers without a window, only the first pairs of dimensions are rotated; the factors
      of the others are huge.
    * ``state_type``: the type of layers without heads of keys and values.
    * ``is_encoder``: the model reads whole texts, in float32.
    * ``has_attention``: False: all layers are Mamba, whose files give 0 heads and an MLP of width 0.
    * ``has_positive_rates``: rates of decay are stored without their sign.
    * ``layer_numbers``: metadata fields with a number for each layer that is a tensor in Hugging Face format, and the
      tensor's name in the layer.
    * ``has_packed_heads``: one tensor may have queries, then keys, then values; Hugging Face format has three tensors.
    * ``has_parted_pairs``: of the rotated numbers of a head, the first ones of all pairs come first, then the second
      ones; Hugging Face format has pairs.
    """

    model_type: str
    class_name: str
    layer_names: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)
    mixture: Architecture | None = None
    keys: dict[str, str] = field(default_factory=dict)
    bias_layer: str = "attn_output"
    rope: dict[str, Any] = field(default_factory=dict)
    rope_keys: dict[str, str] = field(default_factory=dict)
    gating: int = SOFTMAX
    variant: Callable[[GgufModel], Architecture | None] = lambda model: None
    complete: Callable[[GgufModel, dict[str, Any]], None] = lambda model, config: None
    refused: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    has_proportional_rope: bool = False
    has_axes: bool = False
    has_tiled_values: bool = False
    model_names: dict[str, str] = field(default_factory=dict)
    layer_prefix: str = "model.layers."
    state_type: str | None = None
    is_encoder: bool = False
    has_attention: bool = True
    has_packed_heads: bool = False
    has_parted_pairs: bool = False
    has_positive_rates: bool = False
    has_plain_last_norm: bool = False
    layer_numbers: dict[str, str] = field(default_factory=dict)


# The norm before the MLP is named after its position, after attention
NORM_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
# The norms of queries and keys come after the rotary embedding
NORM_AFTER_ROPE = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
# The tensors of DeepSeek's mixtures, which other architectures have as well
DEEPSEEK_MIXTURE_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GRANITE_KEYS = {"logit_scale": "logits_scaling"}


def read_size(model: GgufModel, key: str) -> int:
    """Return a size in the metadata of the file's architecture. Raises GgufError."""
    value = fields_of(model).get(key)
    if type(value) is not int or value < 1:
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
    return value


def fields_of(model: GgufModel) -> dict[str, Any]:
    """Return the metadata of the file's architecture, by their names after its own."""
    prefix = f"{model.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}


def complete_biases(model: GgufModel, config: dict[str, Any]) -> None:
    """Set whether linear layers have biases, under StarCoder2's name for it (``use_bias``)."""
    config["use_bias"] = config["attention_bias"]


def complete_windows(model: GgufModel, config: dict[str, Any]) -> None:
    """Set that no layer has a window, if the file names none."""
    if "sliding_window" not in config:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def read_layer_numbers(model: GgufModel, key: str, count: int) -> list[float]:
    """Return a number for each of ``count`` layers, which all files call by the same key. Raises GgufError."""
    values = model.metadata.get(key)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(value, float) and math.isfinite(value) for value in values)
    ):
        file = model.paths[0].name
        raise GgufError(f"{file} gives {key} as {reprlib.repr(values)}; it is a number for each of {count} layers")
    return values


def shortest_number(value: Any) -> Any:
    """Return the shortest decimal number that is the same as float32, as configs have it; other values as they are."""
    if not isinstance(value, float) or not abs(value) <= MAX_FLOAT32:
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((number for number in candidates if struct.pack("<f", number) == struct.pack("<f", value)), value)


def tensor_name(architecture: Architecture, name: str) -> str:
    """Return the name in Hugging Face format; an unknown one stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in (outer := TENSOR_NAMES | architecture.model_names):
        return f"{outer[stem]}.{kind}"
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name
    layer, names = f"{architecture.layer_prefix}{int(match[1])}.", LAYER_TENSOR_NAMES | architecture.layer_names
    if (suffix := match[0].removeprefix(f"blk.{match[1]}.")) in names:
        return layer + names[suffix]
    return f"{layer}{names[match[2]]}.{match[3]}" if match[3] and match[2] in names else name


def tensor_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape of a tensor in Hugging Face format. A router with one output has two dimensions, a depthwise
    convolution has three, and the tensors of Mamba 2's heads and norms have one."""
    if DELTA_CONVOLUTION.fullmatch(tensor.name):
        return math.prod(tensor.shape[:-1]), 1, tensor.shape[-1]
    is_column = tensor.shape[-1] == 1 and tensor.name.endswith((".ssm_a", ".ssm_d"))
    if is_column or tensor.name.endswith(".ssm_norm.weight"):
        return (math.prod(tensor.shape),)
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        return (1, *tensor.shape)
    if tensor.name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")) and len(tensor.shape) == 2:
        return tensor.shape[0], 1, tensor.shape[1]
    return tensor.shape
