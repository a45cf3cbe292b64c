"""Makes the config.json of a GGUF file's model from its metadata."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Callable
from typing import Any

from parley.gguf.architecture import LAYER_NUMBER, Architecture, fields_of, shortest_number
from parley.gguf.architectures import find_architecture
from parley.gguf.gemma_architectures import GEMMA_LAYER_NAMES
from parley.gguf.header import GgufError, GgufModel, GgufTensor

# The names of fields in every file, and their names in config.json
CONFIG_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# These may be 0
COUNT_FIELDS = ("expert_shared_count", "leading_dense_block_count")
# The experts of Granite's models without them, and the window of Phi-4
ABSENT_AT_ZERO = ("expert_count", "expert_used_count", "attention.sliding_window")
REQUIRED_FIELDS = ("embedding_length", "block_count", "attention.head_count", "context_length")
INNER_FIELDS = ("feed_forward_length", "expert_feed_forward_length")  # one of them is required
# The names of numbers of YaRN in files, after ``rope.scaling.``, and in config.json
YARN_FIELDS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
# Tensors of factors of the rotary embedding; the config has them instead
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The numbers of Llama 3.1 to 3.3, whose files have only the factors that follow from them
LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
STILL = 1e29  # dimensions whose frequency is divided by such a number do not turn
FACTOR_TOLERANCE = 1e-5  # relative; factors are stored as float32

ReadFactors = Callable[[str], tuple[float, ...] | None]


def used_tensors(model: GgufModel) -> list[GgufTensor]:
    """Return the tensors of the model itself: not the factors of its rotary embedding, which the config has, nor those
    of the layers after the last that predict further tokens. Raises GgufError."""
    count = model_config(model)["num_hidden_layers"]
    matches = ((tensor, LAYER_NUMBER.match(tensor.name)) for tensor in model.tensors.values())
    return [
        tensor
        for tensor, match in matches
        if tensor.name not in ROPE_TENSORS and (match is None or int(match[1]) < count)
    ]


def model_config(model: GgufModel, read_factors: ReadFactors = lambda name: None) -> dict[str, Any]:
    """Return the config.json of a model. ``read_factors`` returns the numbers of a float32 tensor, None if absent.

    Raises GgufError if a number is missing or has an impossible value.
    """
    architecture = find_architecture(model)
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    config |= _metadata_fields(model, architecture)
    config |= _tensor_fields(model, architecture)
    config["num_hidden_layers"] = _layer_count(model, config["num_hidden_layers"])
    fields = fields_of(model)
    if (is_normalized := fields.get("expert_weights_norm")) is not None:
        config["norm_topk_prob"] = bool(is_normalized)
    windows = fields.get("attention.sliding_window_pattern")
    if isinstance(windows, list):
        config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in windows]
    if architecture.layer_names is GEMMA_LAYER_NAMES:
        config["query_pre_attn_scalar"] = _query_scalar(config)
    config["quantization_config"] = {"quant_method": "gguf"}
    if fields.get("attention.causal") is False and not architecture.is_encoder:
        config["is_causal"] = False
    if architecture.has_attention:
        config |= _rope_fields(model, config, read_factors, architecture)
    config |= architecture.fields
    architecture.complete(model, config)
    return config


def _metadata_fields(model: GgufModel, architecture: Architecture) -> dict[str, Any]:
    """Return the members of config.json that the numbers of the metadata give. Raises GgufError."""
    config: dict[str, Any] = {}
    name = model.metadata["general.architecture"]
    for key, config_field in (CONFIG_FIELDS | architecture.keys).items():
        value = model.metadata.get(f"{name}.{key}")
        if not architecture.has_attention and key in ("attention.head_count", INNER_FIELDS[0]):
            continue
        if key == "attention.head_count_kv" and architecture.state_type is not None and isinstance(value, list):
            config["layer_types"] = ["full_attention" if kv_heads else architecture.state_type for kv_heads in value]
            value = [kv_heads for kv_heads in value if kv_heads]
        if isinstance(value, list):
            value = next(filter(None, value), None) if key in architecture.lists else _common_value(value)
        if value == 0 and key in COUNT_FIELDS and type(value) is int:
            config[config_field] = value
            continue
        if value == 0 and key in ABSENT_AT_ZERO and type(value) is int:
            continue
        if (value is None and key in REQUIRED_FIELDS) or (value is not None and not _is_positive(value)):
            raise GgufError(
                f"{model.paths[0].name} gives {name}.{key} as {reprlib.repr(value)}, so the model's shape is unknown"
            )
        if value is not None:
            config[config_field] = shortest_number(value)
    if not any(f"{name}.{key}" in model.metadata for key in INNER_FIELDS):
        raise GgufError(f"{model.paths[0].name} has no {name}.{INNER_FIELDS[0]}, so the model's shape is unknown")
    return config


def _tensor_fields(model: GgufModel, architecture: Architecture) -> dict[str, Any]:
    """Return the members of config.json that only the presence and the shapes of tensors tell. Raises GgufError."""
    tensors = model.tensors
    if "token_embd.weight" not in tensors:
        raise GgufError(f"{model.paths[0].name} has no tensor token_embd.weight")
    is_float32 = {tensor.blocks.name for tensor in tensors.values()} == {"F32"}
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": f"blk.0.{architecture.bias_layer}.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "dtype": "float32" if is_float32 else "bfloat16",
    }


def _layer_count(model: GgufModel, count: int) -> int:
    """Return the number of layers without those that predict further tokens. ``count``: of all. Raises GgufError."""
    if type(count) is not int:
        raise GgufError(f"{model.paths[0].name} gives block_count as {reprlib.repr(count)}; it is a whole number")
    extra = fields_of(model).get("nextn_predict_layers", 0)
    if type(extra) is not int or not 0 <= extra < count:
        raise GgufError(f"{model.paths[0].name} gives nextn_predict_layers as {reprlib.repr(extra)}, of {count} layers")
    return count - extra


def _query_scalar(config: dict[str, Any]) -> float:
    """Return the number whose inverse root scales the queries of Gemma 2 and 3, as llama.cpp knows it.

    It is the size of a head, except in the models of 27 billion parameters, which their numbers of layers identify.
    """
    share: float = config["hidden_size"] / config["num_attention_heads"]
    return share if config["num_hidden_layers"] in (46, 62) else config.get("head_dim", share)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _common_value(values: list[Any]) -> Any:
    """Return the value that all layers have; the list if they differ, which no config accepts."""
    return values[0] if values and all(value == values[0] for value in values) else values


def _rope_fields(
    model: GgufModel, config: dict[str, Any], read_factors: ReadFactors, architecture: Architecture
) -> dict[str, Any]:
    """Return the fields of the rotary embedding. Raises GgufError."""
    name = model.metadata["general.architecture"]

    def scaling(key: str) -> Any:
        return model.metadata.get(f"{name}.rope.scaling.{key}")

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = model.metadata.get(f"{name}.rope.dimension_count", head_dim)
    if not head_dim:
        heads = reprlib.repr(config["num_attention_heads"])
        raise GgufError(f"{model.paths[0].name} gives {name}.attention.head_count as {heads}, more than its width")
    if not _is_positive(rotary):
        raise GgufError(f"{model.paths[0].name} gives {name}.rope.dimension_count as {reprlib.repr(rotary)}")
    fields: dict[str, Any] = {} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim}
    if architecture.has_proportional_rope:
        return {"rope_parameters": _proportional_ropes(model, config, read_factors("rope_freqs.weight") or (1.0,))}
    if (factors := read_factors("rope_freqs.weight")) is not None:
        if not all(map(_is_positive, factors)):
            raise GgufError(f"{model.paths[0].name} divides frequencies by numbers that are not positive")
        return fields | {"rope_scaling": _factors_rope(factors, config)}
    long, short = read_factors("rope_factors_long.weight"), read_factors("rope_factors_short.weight")
    if long is not None and short is not None:
        original = scaling("original_context_length") or config["max_position_embeddings"]
        rope = {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short)}
        if (attention_factor := scaling("attn_factor")) is not None:
            rope["attention_factor"] = attention_factor
        return fields | {"rope_scaling": rope, "original_max_position_embeddings": original}
    kind = scaling("type")
    if kind in (None, "none"):
        return fields | {"rope_scaling": {"rope_type": "default"}}  # some types have a scaled one by default
    rope = {"rope_type": kind, "factor": scaling("factor"), **architecture.rope}
    if (original := scaling("original_context_length")) is not None:
        rope["original_max_position_embeddings"] = original
    keys = {target: f"rope.scaling.{key}" for key, target in YARN_FIELDS.items()} if kind == "yarn" else {}
    file_fields = fields_of(model)
    rope |= {
        target: shortest_number(file_fields[key])
        for target, key in (keys | architecture.rope_keys).items()
        if key in file_fields
    }
    return fields | {"rope_scaling": rope}


def _proportional_ropes(model: GgufModel, config: dict[str, Any], factors: tuple[float, ...]) -> dict[str, Any]:
    """Return the rotary embeddings of layers with and without a window. ``factors``: the divisors of
    the latter's frequencies, 1 for the first pairs of dimensions and STILL for others. Raises GgufError."""
    if "rope_freqs.weight" not in model.tensors:
        raise GgufError(f"{model.paths[0].name} has no rope_freqs.weight, which says how many dimensions turn")
    rotated_count = factors.count(1.0)
    if any(factor != 1 for factor in factors[:rotated_count]) or any(
        factor < STILL for factor in factors[rotated_count:]
    ):
        raise GgufError(f"{model.paths[0].name} divides frequencies by other numbers than its architecture")
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated_count / len(factors)}
    return {
        "full_attention": full | {"rope_theta": config.get("rope_theta", 1e6)},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 1e4)},
    }


def _factors_rope(factors: tuple[float, ...], config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary scaling that divides each frequency by a factor: Llama 3's if these are its factors."""
    largest = max(factors)
    theta, original = config.get("rope_theta", 10000.0), LLAMA_3_ROPE["original_max_position_embeddings"]
    low, high = LLAMA_3_ROPE["low_freq_factor"], LLAMA_3_ROPE["high_freq_factor"]
    expected = []
    for pair in range(len(factors)):
        wavelength = 2 * math.pi * theta ** (pair / len(factors))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected.append(1 / ((1 - smooth) / largest + smooth))
    if all(math.isclose(*pair, rel_tol=FACTOR_TOLERANCE) for pair in zip(factors, expected, strict=True)):
        return {"rope_type": "llama3", "factor": largest, **LLAMA_3_ROPE}
    same = list(factors)
    return {"rope_type": "longrope", "long_factor": same, "short_factor": same, "attention_factor": 1.0}


def read_factors_from(model: GgufModel) -> ReadFactors:
    """Return a function that reads small float32 tensors from the model's files. It raises GgufError."""

    def read_factors(name: str) -> tuple[float, ...] | None:
        tensor = model.tensors.get(name)
        if tensor is None:
            return None
        path = model.paths[tensor.file]
        if tensor.blocks.name != "F32" or len(tensor.shape) != 1:
            raise GgufError(f"{path.name} is damaged: {name} is not a list of float32")
        try:
            with path.open("rb") as file:
                file.seek(tensor.start)
                return struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.end - tensor.start))
        except (OSError, struct.error):
            raise GgufError(f"{path.name} cannot be read") from None

    return read_factors
