"""Mamba 1 and 2, Falcon Mamba and Jamba in GGUF files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parley.gguf.architecture import Architecture, fields_of, read_size
from parley.gguf.header import GgufError, GgufModel
from parley.gguf.state_architectures import MAMBA_NAMES, read_mamba_heads

# Mamba 1 makes steps, B and C of a layer's input, and has a matrix of rates
MAMBA_1_NAMES = {name: target for name, target in MAMBA_NAMES.items() if name not in ("ssm_dt.bias", "ssm_norm")} | {
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
}
JAMBA_NORMS = {"ssm_dt_norm": "dt_layernorm", "ssm_b_norm": "b_layernorm", "ssm_c_norm": "c_layernorm"}


def _has_tensor(model: GgufModel, ending: str) -> bool:
    return any(name.endswith(ending) for name in model.tensors)


def complete_mamba(model: GgufModel, config: dict[str, Any]) -> None:
    """Set which linear layers have biases."""
    config["use_conv_bias"] = _has_tensor(model, ".ssm_conv1d.bias")
    config["use_bias"] = _has_tensor(model, ".ssm_in.bias")


def complete_mamba_2(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of heads. Raises GgufError if they are impossible."""
    complete_mamba(model, config)
    inner, config["num_heads"], config["head_dim"] = read_mamba_heads(model)
    config["expand"], remainder = divmod(inner, config["hidden_size"])
    if remainder:
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to its heads, which are no multiple of the width")


def mamba_variant(model: GgufModel) -> Architecture | None:
    """Return the row of Falcon Mamba for files that normalize steps, B and C."""
    return FALCON_MAMBA if fields_of(model).get("ssm.dt_b_c_rms") else None


def _read_period(file: str, layers: list[int], count: int, part: str) -> tuple[int, int]:
    """Return the distance between the numbers of ``layers``, of ``count`` layers, and the first number.

    ``part``: what these layers have, for the message. Raises GgufError if the distances differ.
    """
    offset = layers[0] if layers else count
    period = layers[1] - offset if len(layers) > 1 else count + 1
    if layers != list(range(offset, count, period)):
        raise GgufError(f"{file} has {part} in layers that its architecture does not have them in")
    return period, offset


def complete_jamba(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba layers, and which layers have attention and experts. Raises GgufError."""
    file, count = model.paths[0].name, config["num_hidden_layers"]
    heads = fields_of(model).get("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != count:
        raise GgufError(f"{file} does not say of each layer whether it has attention, so the model's shape is unknown")
    inner = read_size(model, "ssm.inner_size")
    config["mamba_expand"], remainder = divmod(inner, config["hidden_size"])
    if remainder:
        raise GgufError(f"{file} gives ssm.inner_size as {inner}, which is no multiple of {config['hidden_size']}")
    full = [layer for layer in range(count) if heads[layer]]
    mixed = [layer for layer in range(count) if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors]
    config["attn_layer_period"], config["attn_layer_offset"] = _read_period(file, full, count, "attention")
    config["expert_layer_period"], config["expert_layer_offset"] = _read_period(file, mixed, count, "experts")
    config["mamba_conv_bias"] = _has_tensor(model, ".ssm_conv1d.bias")
    config["mamba_proj_bias"] = _has_tensor(model, ".ssm_in.bias")


MAMBA = Architecture(
    "mamba",
    "MambaForCausalLM",
    {name: f"mixer.{target}" for name, target in MAMBA_1_NAMES.items()} | {"attn_norm": "norm"},
    layer_prefix="backbone.layers.",
    model_names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    keys={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
        "ssm.inner_size": "intermediate_size",
    },
    has_attention=False,
    complete=complete_mamba,
)
FALCON_MAMBA = replace(MAMBA, model_type="falcon_mamba", class_name="FalconMambaForCausalLM")
MAMBA_2 = replace(
    MAMBA,
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    layer_names={name: f"mixer.{target}" for name, target in MAMBA_NAMES.items()} | {"attn_norm": "norm"},
    keys={"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups"},
    complete=complete_mamba_2,
)
JAMBA = Architecture(
    "jamba",
    "JambaForCausalLM",
    {name: f"mamba.{target}" for name, target in (MAMBA_1_NAMES | JAMBA_NORMS).items()}
    | {
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    model_names={"output_norm": "model.final_layernorm"},
    keys={
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.time_step_rank": "mamba_dt_rank",
    },
    lists=("attention.head_count_kv",),
    complete=complete_jamba,
)
MAMBA_ARCHITECTURES = {
    "mamba": replace(MAMBA, variant=mamba_variant),
    "mamba2": MAMBA_2,
    "jamba": replace(JAMBA, mixture=JAMBA),
}
