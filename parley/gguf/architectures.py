"""Translates a GGUF file's architecture to Hugging Face format: its config.json and the names of tensors.

A row of ``ARCHITECTURES`` makes an architecture readable. llama.cpp rotates neighbouring dimensions of the heads of
some architectures, so its converter reorders the rows of their queries and keys; ``interleaved`` says so.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

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
REQUIRED_FIELDS = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
    "ffn_down_exps": "mlp.experts.down_exps",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_0-9]+)\.(weight|bias)")
LAYER_NUMBER = re.compile(r"blk\.(\d+)\.")
# The names of numbers of YaRN in files, after ``rope.scaling.``, and in config.json
YARN_FIELDS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
# How scores of experts are made of logits, by the numbers in files
SOFTMAX, SIGMOID = 1, 2
# Tensors of factors of the rotary embedding; the config has them instead
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The numbers of Llama 3.1 to 3.3, whose files have only the factors that follow from them
LLAMA_3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTOR_TOLERANCE = 1e-5  # relative; factors are stored as float32

# What files hold that are no models, by their ``general.type`` or architecture
FOREIGN_KINDS = {
    "an encoder of pictures or sound, which is not read; name the language model beside it": ("mmproj", "clip"),
    "a LoRA adapter, which is not read from GGUF; name its model, and the adapter as safetensors": ("adapter",),
    "the statistics of a quantizer and no model": ("imatrix",),
    "a vocabulary without weights": ("vocab",),
}

ReadFactors = Callable[[str], tuple[float, ...] | None]


@dataclass(frozen=True)
class Architecture:
    """``model_type`` and ``class_name``: as in config.json. ``layer_names``: tensors that differ from the usual; a name
    with a suffix stands for that tensor alone.

    ``interleaved``: the rows of queries and keys are in llama.cpp's order. ``norm_offset``: the number that its
    converter adds to the weights of norms. ``fields``: constant members of the config. ``mixture``: the row for files
    with experts, if they are read. ``keys``: further metadata fields, and their names in the config.
    ``bias_layer``: the layer whose bias says that attention has biases. ``rope``: constant members of a scaled rotary
    embedding. ``rope_keys``: its members that are in the metadata, and their names there. ``gating``: how scores of
    experts are made. ``variant``: a metadata field, and the row for files that have it.
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
    variant: tuple[str, Architecture] | None = None


# The norm before the MLP is called by its place after attention
NORM_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", interleaved=True, fields={"sliding_window": None})
QWEN2_MOE = Architecture("qwen2_moe", "Qwen2MoeForCausalLM", fields={"norm_topk_prob": False})
QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", fields={"norm_topk_prob": True})
GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    NORM_AFTER_ATTENTION
    | {
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_gate_exps.bias": "mlp.experts.gate_exps.weight_bias",
        "ffn_up_exps.bias": "mlp.experts.up_exps.weight_bias",
        "ffn_down_exps.bias": "mlp.experts.down_exps.weight_bias",
    },
    rope={"truncate": False},
)
GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    NORM_AFTER_ATTENTION
    | {
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    bias_layer="attn_q",
    gating=SIGMOID,
)
MINIMAX_M2 = Architecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    gating=SIGMOID,
)
GRANITE_KEYS = {"logit_scale": "logits_scaling"}
GRANITE_MOE = Architecture("granitemoeshared", "GraniteMoeSharedForCausalLM", interleaved=True, keys=GRANITE_KEYS)
OLMO_LAYER_NAMES = NORM_AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}
OLMO_3 = Architecture("olmo3", "Olmo3ForCausalLM", OLMO_LAYER_NAMES)
MINISTRAL_3 = Architecture(
    "ministral3",
    "Ministral3ForCausalLM",
    interleaved=True,
    fields={"sliding_window": None},
    rope_keys={
        "mscale": "rope.scaling.yarn_log_multiplier",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "llama_4_scaling_beta": "attention.temperature_scale",
    },
)
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", interleaved=True, fields={"sliding_window": None}, mixture=MIXTRAL
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": replace(QWEN2_MOE, mixture=QWEN2_MOE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": replace(QWEN3_MOE, mixture=QWEN3_MOE),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gpt-oss": replace(GPT_OSS, mixture=GPT_OSS),
    "mistral3": Architecture(
        "mistral",
        "MistralForCausalLM",
        interleaved=True,
        fields={"sliding_window": None},
        variant=("attention.temperature_scale", MINISTRAL_3),
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        bias_layer="attn_q",
    ),
    "glm4moe": replace(GLM4_MOE, mixture=GLM4_MOE),
    "minimax-m2": replace(MINIMAX_M2, mixture=MINIMAX_M2),
    "granite": Architecture("granite", "GraniteForCausalLM", interleaved=True, keys=GRANITE_KEYS),
    "granitemoe": replace(GRANITE_MOE, mixture=GRANITE_MOE),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", OLMO_LAYER_NAMES, variant=("attention.sliding_window", OLMO_3)),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", NORM_AFTER_ATTENTION, bias_layer="attn_q"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "command-r": Architecture("cohere", "CohereForCausalLM"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM"),
}


def find_architecture(model: GgufModel) -> Architecture:
    """Return the file's architecture. Raises GgufError if it is none that is read."""
    name, file = model.metadata.get("general.architecture"), model.paths[0].name
    for holds, kinds in FOREIGN_KINDS.items():
        if name in kinds or model.metadata.get("general.type") in kinds:
            raise GgufError(f"{file} holds {holds}")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(f"{file} has the architecture {str(name)[:100]}, which is not read from GGUF; {known} are")
    architecture = ARCHITECTURES[name]
    if architecture.variant is not None and architecture.variant[0] in _fields_of(model):
        architecture = architecture.variant[1]
    _check_computation(model, architecture)
    if not model.metadata.get(name + ".expert_count"):
        return architecture
    if architecture.mixture is None:
        raise GgufError(f"{file} is a mixture of experts of the architecture {name}, which is not read from GGUF")
    return architecture.mixture


def _fields_of(model: GgufModel) -> dict[str, Any]:
    """Return the metadata of the file's architecture, by their names after its own."""
    prefix = f"{model.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}


def _check_computation(model: GgufModel, architecture: Architecture) -> None:
    """Raise GgufError if a file asks for a computation that its architecture does not have here."""
    fields, file = _fields_of(model), model.paths[0].name
    sections = fields.get("rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        raise GgufError(f"{file} has positions with several axes, for pictures, which are not read from GGUF")
    gating = fields.get("expert_gating_func") or architecture.gating
    if gating != architecture.gating:
        raise GgufError(f"{file} gives expert_gating_func as {gating!r}, but its architecture has another")


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


def tensor_name(architecture: Architecture, name: str) -> str:
    """Return the name in Hugging Face format; an unknown one stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in TENSOR_NAMES:
        return f"{TENSOR_NAMES[stem]}.{kind}"
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name
    layer, names = f"model.layers.{int(match[1])}.", LAYER_TENSOR_NAMES | architecture.layer_names
    if (whole := f"{match[2]}.{match[3]}") in names:
        return layer + names[whole]
    return f"{layer}{names[match[2]]}.{match[3]}" if match[2] in names else name


def tensor_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape of a tensor in Hugging Face format: that of a router with one output has two dimensions."""
    is_router = tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1
    return (1, *tensor.shape) if is_router else tensor.shape


def interleaved_rows(model: GgufModel) -> dict[str, int]:
    """Return the tensors whose rows are in llama.cpp's order, and the number of heads of each."""
    if not find_architecture(model).interleaved:
        return {}
    config = model_config(model)
    heads = config["num_attention_heads"]
    counts = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    matches = ((name, LAYER_TENSOR.fullmatch(name)) for name in model.tensors)
    return {name: counts[match[2]] for name, match in matches if match and match[2] in counts}


def model_config(model: GgufModel, read_factors: ReadFactors = lambda name: None) -> dict[str, Any]:
    """Return the config.json of a model. ``read_factors`` returns the numbers of a float32 tensor, None if absent.

    Raises GgufError if a number is missing or has an impossible value.
    """
    architecture, name = find_architecture(model), model.metadata["general.architecture"]
    config: dict[str, Any] = {"architectures": [architecture.class_name], "model_type": architecture.model_type}
    for key, config_field in (CONFIG_FIELDS | architecture.keys).items():
        value = model.metadata.get(f"{name}.{key}")
        value = _common_value(value) if isinstance(value, list) else value
        if value == 0 and key in COUNT_FIELDS and type(value) is int:
            config[config_field] = value
            continue
        if (value is None and key in REQUIRED_FIELDS) or (value is not None and not _is_positive(value)):
            raise GgufError(f"{model.paths[0].name} gives {name}.{key} as {value!r}, so the model's shape is unknown")
        if value is not None:
            config[config_field] = _shortest_number(value)
    if "token_embd.weight" not in model.tensors:
        raise GgufError(f"{model.paths[0].name} has no tensor token_embd.weight")
    config["vocab_size"] = model.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in model.tensors
    config["num_hidden_layers"] = _layer_count(model, config["num_hidden_layers"])
    config["attention_bias"] = f"blk.0.{architecture.bias_layer}.bias" in model.tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in model.tensors
    if (is_normalized := model.metadata.get(f"{name}.expert_weights_norm")) is not None:
        config["norm_topk_prob"] = bool(is_normalized)
    windows = model.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(windows, list):
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windows]
    config["mlp_bias"] = "blk.0.ffn_down.bias" in model.tensors
    if architecture.layer_names is GEMMA_LAYER_NAMES:
        config["query_pre_attn_scalar"] = _query_scalar(config)
    plain = {tensor.blocks.name for tensor in model.tensors.values()} == {"F32"}
    config["dtype"] = "float32" if plain else "bfloat16"
    config["quantization_config"] = {"quant_method": "gguf"}
    return config | _rope_fields(model, config, read_factors, architecture) | architecture.fields


def _layer_count(model: GgufModel, count: int) -> int:
    """Return the number of layers without those that predict further tokens. ``count``: of all. Raises GgufError."""
    extra = _fields_of(model).get("nextn_predict_layers", 0)
    if type(extra) is not int or not 0 <= extra < count:
        raise GgufError(f"{model.paths[0].name} gives nextn_predict_layers as {extra!r}, of {count} layers")
    return count - extra


def _query_scalar(config: dict[str, Any]) -> float:
    """Return the number whose inverse root scales the queries of Gemma 2 and 3, as llama.cpp knows it.

    It is the size of a head, except in the models of 27 billion parameters, which their numbers of layers identify.
    """
    share: float = config["hidden_size"] / config["num_attention_heads"]
    return share if config["num_hidden_layers"] in (46, 62) else config.get("head_dim", share)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shortest_number(value: Any) -> Any:
    """Return the shortest decimal number that is the same as float32, as configs have it; other values as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _common_value(values: list[Any]) -> Any:
    """Return the value that all layers have; the list if they differ, which no config accepts."""
    return values[0] if values and all(value == values[0] for value in values) else values


def _rope_fields(
    model: GgufModel, config: dict[str, Any], read_factors: ReadFactors, architecture: Architecture
) -> dict[str, Any]:
    """Return the fields of the rotary embedding."""
    name = model.metadata["general.architecture"]

    def scaling(key: str) -> Any:
        return model.metadata.get(f"{name}.rope.scaling.{key}")

    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = model.metadata.get(f"{name}.rope.dimension_count", head_dim)
    if not _is_positive(rotary):
        raise GgufError(f"{model.paths[0].name} gives {name}.rope.dimension_count as {rotary!r}")
    fields: dict[str, Any] = {} if rotary == head_dim else {"partial_rotary_factor": rotary / head_dim}
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
    given = _fields_of(model)
    rope |= {
        target: _shortest_number(given[key]) for target, key in (keys | architecture.rope_keys).items() if key in given
    }
    return fields | {"rope_scaling": rope}


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
    if all(math.isclose(*each, rel_tol=FACTOR_TOLERANCE) for each in zip(factors, expected, strict=True)):
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
