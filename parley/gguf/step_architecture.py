"""Step 3.5 and 3.7 in GGUF files."""

from __future__ import annotations

import math
import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    SIGMOID,
    Architecture,
    fields_of,
    read_size,
    shortest_number,
)
from parley.gguf.header import GgufError, GgufModel

FULL, SLIDING = "full_attention", "sliding_attention"
FULL_SHARE = 0.5  # of a head, which layers without a window rotate; llama.cpp has it as a constant
STEP_HIGH, STEP_LENGTH = 32.0, 131072
# The scaled rotary embedding of the published models, whose files have only the factors that follow from it
STEP_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": STEP_HIGH,
    "original_max_position_embeddings": STEP_LENGTH,
}
FACTOR_TOLERANCE = 1e-5  # relative; factors are stored as float32


def complete_step(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the heads, limits and rotary embeddings of the layers, and which of them have a mixture. Raises GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    if config.get("norm_topk_prob", True) is not True:
        raise GgufError(f"{file} gives expert_weights_norm as False; only True is read here")
    types = config["layer_types"] = config.get("layer_types", [])[:count]
    if len(types) != count:
        raise GgufError(f"{file} does not say which of {count} layers have a window")
    heads, kv_heads = (_heads_by_type(model, f"attention.head_count{end}", types) for end in ("", "_kv"))
    config |= {
        "num_attention_heads": heads.get(FULL, heads.get(SLIDING)),
        "num_key_value_heads": kv_heads.get(FULL, kv_heads.get(SLIDING)),
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in model.tensors else "dense" for layer in range(count)
        ],
        "swiglu_limits": _layer_limits(model, "swiglu_clamp_exp", count),
        "swiglu_limits_shared": _layer_limits(model, "swiglu_clamp_shexp", count),
    }
    if SLIDING in types:
        config["attention_other_setting"] = {
            "num_attention_heads": heads[SLIDING],
            "num_attention_groups": kv_heads[SLIDING],
        }
    head_dim, theta = read_size(model, "attention.key_length"), config.pop("rope_theta", 1e4)
    share = config.pop("partial_rotary_factor", 1.0)
    windowed_share = share
    if "rope.dimension_count_swa" in fields:
        windowed_share = read_size(model, "rope.dimension_count_swa") / head_dim
    scaling = _read_scaling(file, config.pop("rope_scaling"), theta, int(head_dim * share * FULL_SHARE) // 2)
    config["rope_parameters"] = {
        FULL: scaling | {"rope_theta": theta, "partial_rotary_factor": share * FULL_SHARE},
        SLIDING: {
            "rope_type": "default",
            "rope_theta": config.pop("rope_local_base_freq", theta),
            "partial_rotary_factor": windowed_share,
        },
    }


def _heads_by_type(model: GgufModel, key: str, types: list[str]) -> dict[str, int]:
    """Return the number of heads of each type of layers. Raises GgufError if it differs between those of one type."""
    values = fields_of(model).get(key)
    listed = values[: len(types)] if isinstance(values, list) else [values] * len(types)
    are_sizes = all(type(value) is int and value > 0 for value in listed) and len(listed) == len(types)
    pairs = set(zip(types, listed, strict=True)) if are_sizes else set()
    if not are_sizes or len(pairs) != len(set(types)):
        raise GgufError(
            f"{model.paths[0].name} gives {key} as {reprlib.repr(values)}; layers with a window have one number, and "
            "those without one another"
        )
    return dict(pairs)


def _layer_limits(model: GgufModel, key: str, count: int) -> list[float] | None:
    """Return the limits of the layers' MLPs, None without any. Raises GgufError."""
    values = fields_of(model).get(key)
    if values is None:
        return None
    listed = values[:count] if isinstance(values, list) else [values] * count
    if len(listed) != count or not all(isinstance(value, float) and 0 <= value < math.inf for value in listed):
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(values)}; each layer has a number")
    return [shortest_number(value) for value in listed]


def _read_scaling(file: str, rope: dict[str, Any], theta: float, pairs: int) -> dict[str, Any]:
    """Return the scaled rotary embedding of layers without a window, of ``pairs`` frequencies. Raises GgufError."""
    if rope["rope_type"] != "longrope":
        return rope
    factors = rope["long_factor"][:pairs]
    low, high, original = 1.0, STEP_HIGH, STEP_LENGTH
    largest, expected = max(factors), []
    for pair in range(pairs):
        wavelength = 2 * math.pi * theta ** (pair / pairs)
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / largest + smooth))
    is_known = len(factors) == pairs and all(
        math.isclose(*pair, rel_tol=FACTOR_TOLERANCE) for pair in zip(factors, expected, strict=True)
    )
    if not is_known:
        raise GgufError(f"{file} divides frequencies by other numbers than its architecture")
    return STEP_ROPE | {"factor": largest}


STEP = Architecture(
    "step3p5",
    "Step3p5ForCausalLM",
    DEEPSEEK_MIXTURE_NAMES | {"attn_gate": "self_attn.g_proj"},
    norm_offset=1.0,
    lists=("attention.head_count", "attention.head_count_kv"),
    gating=SIGMOID,
    complete=complete_step,
)
STEP_ARCHITECTURES = {"step35": replace(STEP, mixture=STEP)}
