"""Translates a GGUF file's architecture to Hugging Face format: the type of its model and the names of tensors.

A row of ``ARCHITECTURES`` makes an architecture readable; ``model_config.py`` makes the config.json. llama.cpp rotates
neighbouring dimensions of the heads of some architectures, so its converter reorders the rows of their queries and
keys; ``interleaved`` says so.
"""

from __future__ import annotations

import math
import re
import reprlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import NormalDist
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
    "ffn_down_exps": "mlp.experts.down_exps",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_0-9]+(?:\.[a-z_0-9]+)*?)(?:\.(weight|bias|scale))?")
LAYER_NUMBER = re.compile(r"blk\.(\d+)\.")
# How scores of experts are made of logits, by the numbers in files
SOFTMAX, SIGMOID = 1, 2
# What files hold that are no models, by their ``general.type`` or architecture
FOREIGN_KINDS = {
    "an encoder of pictures or sound and no language model; name that, and this one as its mmproj": ("mmproj", "clip"),
    "a LoRA adapter, which is not read from GGUF; name its model, and the adapter as safetensors": ("adapter",),
    "the statistics of a quantizer and no model": ("imatrix",),
    "a vocabulary without weights": ("vocab",),
}


@dataclass(frozen=True)
class Architecture:
    """``model_type`` and ``class_name``: as in config.json. ``layer_names``: tensors that differ from the usual; a name
    with a suffix stands for that tensor alone.

    ``interleaved``: the rows of queries and keys are in llama.cpp's order. ``norm_offset``: the number that its
    converter adds to the weights of norms. ``fields``: constant members of the config. ``mixture``: the row for files
    with experts, if they are read. ``keys``: further metadata fields, and their names in the config.
    ``bias_layer``: the layer whose bias says that attention has biases. ``rope``: constant members of a scaled rotary
    embedding. ``rope_keys``: its members that are in the metadata, and their names there. ``gating``: how scores of
    experts are made. ``variant``: returns the row for a file, if it is another one. ``complete``: changes the config by
    what else the metadata says of it. ``has_axes``: positions may have several axes, which are alike for texts.
    ``has_tiled_values``: layers of gated delta nets list the first value head of each key head, then the second, and so
    on. ``refused``: metadata fields that say how something is computed that is not here. ``lists``: metadata fields
    with a number for each layer, which ``complete`` reads. ``has_proportional_rope``: in layers without a window, only
    the first pairs of dimensions turn; the factors of the others are huge. ``model_names``: as
    ``layer_names``, of tensors outside of layers. ``state_type``: the type of layers without heads of keys and values.
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
    state_type: str | None = None


# The norm before the MLP is called by its place after attention
NORM_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
GEMMA_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_INPUT_NAMES = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA_3N_LAYER_NAMES = (
    GEMMA_LAYER_NAMES
    | LAYER_INPUT_NAMES
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
)
# Tensors that hold several linear layers, and the list of these in Hugging Face format
STACKED_NAMES = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
GEMMA_4_LAYER_NAMES = (
    GEMMA_LAYER_NAMES
    | LAYER_INPUT_NAMES
    | {
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_exps": "experts.gate_exps",
        "ffn_up_exps": "experts.up_exps",
        "ffn_gate_up_exps": "experts.gate_up_exps",
        "ffn_down_exps": "experts.down_exps",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
    }
)
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
# DeepSeek's mixtures, which others have as well
DEEPSEEK_MIXTURE_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    NORM_AFTER_ATTENTION | DEEPSEEK_MIXTURE_NAMES,
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
ERNIE_MOE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    keys={
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
)
LATENT_LAYER_NAMES = DEEPSEEK_MIXTURE_NAMES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
# DeepSeek-V3 and R1 have this number of experts; their first files do not say that they are in groups
DEEPSEEK_3_EXPERTS, DEEPSEEK_3_GROUPS = 256, {"n_group": 8, "topk_group": 4}
YARN_LOG_UNIT = 10  # the converter divides mscale_all_dim of this architecture by it


def _read_size(model: GgufModel, key: str) -> int:
    """Return a size in the metadata of the file's architecture. Raises GgufError."""
    value = fields_of(model).get(key)
    if type(value) is not int or value < 1:
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
    return value


def complete_latents(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of latents, and the numbers of routers that files leave out where they change nothing.

    Raises GgufError if the sizes are impossible.
    """
    fields = fields_of(model)
    suffix = "_mla" if "attention.key_length_mla" in fields else ""
    rotary, rank, keys, values = (
        _read_size(model, key)
        for key in (
            "rope.dimension_count",
            "attention.kv_lora_rank",
            "attention.key_length" + suffix,
            "attention.value_length" + suffix,
        )
    )
    if keys <= rotary:
        raise GgufError(f"{model.paths[0].name} rotates {rotary} of {keys} dimensions")
    config |= {
        "kv_lora_rank": rank,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": values,
        "head_dim": rotary,
        "num_key_value_heads": config["num_attention_heads"],
        "first_k_dense_replace": config.get("first_k_dense_replace", 0),
        "routed_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "norm_topk_prob": config.get("norm_topk_prob", False),
    }
    config.pop("partial_rotary_factor", None)
    for name in ("mscale", "mscale_all_dim"):
        if name in config["rope_scaling"]:
            config["rope_scaling"][name] = shortest_number(config["rope_scaling"][name] * YARN_LOG_UNIT)


def complete_gemma_4(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the heads of layers with and without a window, and what the last layers read of others. Raises GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is None or len(types) != count or "full_attention" not in types:
        raise GgufError(f"{file} does not say of each layer whether it has a window, so the model's shape is unknown")
    full, shared = types.index("full_attention"), fields.get("attention.shared_kv_layers", 0)
    if type(shared) is not int or not 0 <= shared < count:
        raise GgufError(f"{file} gives attention.shared_kv_layers as {reprlib.repr(shared)}, of {count} layers")

    def each_layer(key: str) -> list[int]:
        given = fields.get(key)
        values: list[Any] = given if isinstance(given, list) else [given] * count
        if len(values) != count or not all(type(value) is int and value > 0 for value in values):
            raise GgufError(f"{file} gives {key} as {reprlib.repr(given)}, so the model's shape is unknown")
        return values

    heads, widths = each_layer("attention.head_count_kv"), each_layer("feed_forward_length")
    window = types.index("sliding_attention") if "sliding_attention" in types else full
    by_type = {"sliding_attention": heads[window], "full_attention": heads[full]}
    is_double = shared > 0 and widths[-1] == 2 * widths[0]
    if heads != [by_type[each] for each in types] or widths != [
        widths[0] * (1 + (is_double and layer >= count - shared)) for layer in range(count)
    ]:
        raise GgufError(f"{file} has layers of other sizes than its architecture")
    table = model.tensors.get("per_layer_token_embd.weight")
    config |= {
        "head_dim": _read_size(model, "attention.key_length_swa"),
        "global_head_dim": _read_size(model, "attention.key_length"),
        "num_key_value_heads": heads[window],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in model.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": is_double,
        "enable_moe_block": "num_experts" in config,
        "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
    }
    if not config["attention_k_eq_v"] and heads[window] != heads[full]:
        raise GgufError(f"{file} has layers of other sizes than its architecture")


def complete_gemma_3n(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the residual streams, sparse gates and inputs of layers, and what the last layers read of others. Raises
    GgufError."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    if len(config.get("layer_types", [])) != count:
        raise GgufError(f"{file} does not say of each layer whether it has a window, so the model's shape is unknown")
    scales, widths = fields.get("activation_sparsity_scale"), fields["feed_forward_length"]
    if not isinstance(scales, list) or len(scales) != count or any(type(scale) is not float for scale in scales):
        raise GgufError(f"{file} gives activation_sparsity_scale as {reprlib.repr(scales)}, of {count} layers")
    tables = {name: model.tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight")}
    for name, tensor in tables.items():
        if tensor is None:
            raise GgufError(f"{file} has no tensor {name}")
    laurel_rank, inputs_vocab = (tensor.shape[0] for tensor in tables.values() if tensor is not None)
    config |= {
        "intermediate_size": widths,
        # The share of a normal distribution below so many deviations, of which files have the float32
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "num_kv_shared_layers": _read_count(model, "attention.shared_kv_layers"),
        "altup_num_inputs": _read_size(model, "altup.num_inputs"),
        "altup_active_idx": _read_count(model, "altup.active_idx"),
        "hidden_size_per_layer_input": _read_size(model, "embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": inputs_vocab,
        "laurel_rank": laurel_rank,
    }


def _read_count(model: GgufModel, key: str) -> int:
    """Return an integer of at least 0. Raises GgufError."""
    value = fields_of(model).get(key)
    if type(value) is not int or value < 0:
        raise GgufError(f"{model.paths[0].name} gives {key} as {reprlib.repr(value)}, so the model's shape is unknown")
    return value


def complete_granite_hybrid(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba 2 layers, and what the layers have.

    Raises GgufError if they are impossible, and for Bamba, which has the same architecture.
    """
    if fields_of(model).get("rope.scaling.finetuned"):
        raise GgufError(f"{model.paths[0].name} rotates queries and keys, which its architecture does not do here")
    inner, heads = _read_size(model, "ssm.inner_size"), _read_size(model, "ssm.time_step_rank")
    config["mamba_d_head"], rest = divmod(inner, heads)
    config["mamba_expand"], other_rest = divmod(inner, config["hidden_size"])
    if rest or other_rest:
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to {heads} heads, which do not divide them")
    config |= {
        "position_embedding_type": "nope",
        "num_local_experts": config.pop("num_experts", 0),
        "shared_intermediate_size": config.pop("shared_expert_intermediate_size", config["intermediate_size"]),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in model.tensors),
    }


GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_dt.bias": "mamba.dt_bias",
        "ssm_a": "mamba.A",
        "ssm_d": "mamba.D",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    interleaved=True,
    keys=GRANITE_KEYS
    | {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    },
    complete=complete_granite_hybrid,
    state_type="linear_attention",
)
GEMMA_3N = Architecture(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    GEMMA_3N_LAYER_NAMES,
    complete=complete_gemma_3n,
    lists=("feed_forward_length",),
    model_names=STACKED_NAMES,
)
GEMMA_4 = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    GEMMA_4_LAYER_NAMES,
    complete=complete_gemma_4,
    lists=("attention.head_count_kv", "feed_forward_length"),
    refused=("rope.scaling.factor",),
    has_proportional_rope=True,
)


def complete_deepseek_2(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of DeepSeek-V2. Raises GgufError."""
    complete_latents(model, config)
    if config["norm_topk_prob"]:
        raise GgufError(f"{model.paths[0].name} gives expert_weights_norm, but its architecture has it not")
    config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"


def complete_deepseek_3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of DeepSeek-V3. Raises GgufError."""
    complete_latents(model, config)
    are_grouped = config["num_experts"] == DEEPSEEK_3_EXPERTS and "n_group" not in config
    config |= DEEPSEEK_3_GROUPS if are_grouped else {"n_group": 1, "topk_group": 1} | config


def deepseek_variant(model: GgufModel) -> Architecture | None:
    """Return the row of DeepSeek-V3 for files whose scores of experts are sigmoids.

    The first files of GLM-4.7-Flash do not say so, but have the biases that only such routers have.
    """
    gating = fields_of(model).get("expert_gating_func")
    has_biases = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    return DEEPSEEK_3 if gating == SIGMOID or (not gating and has_biases) else None


DEEPSEEK_3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    LATENT_LAYER_NAMES,
    rope_keys=dict.fromkeys(("mscale", "mscale_all_dim"), "rope.scaling.yarn_log_multiplier"),
    gating=SIGMOID,
    complete=complete_deepseek_3,
    refused=("attention.temperature_scale",),
)
DEEPSEEK_2 = replace(
    DEEPSEEK_3,
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    gating=SOFTMAX,
    variant=deepseek_variant,
    complete=complete_deepseek_2,
)
YOUTU = replace(
    DEEPSEEK_3,
    model_type="youtu",
    class_name="YoutuForCausalLM",
    gating=SOFTMAX,
    mixture=DEEPSEEK_2,
    complete=complete_latents,
)
DELTA_LAYER_NAMES = NORM_AFTER_ATTENTION | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}


def complete_axes(model: GgufModel, config: dict[str, Any]) -> None:
    """Add how many pairs of dimensions each axis of positions turns."""
    if sections := fields_of(model).get("rope.dimension_sections"):
        config["rope_scaling"]["mrope_section"] = sections[:3]


def complete_delta_nets(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the size of values, the types of layers, and the axes of positions. Raises GgufError."""
    inner, heads = _read_size(model, "ssm.inner_size"), _read_size(model, "ssm.time_step_rank")
    config["linear_value_head_dim"], rest = divmod(inner, heads)
    if rest or heads % _read_size(model, "ssm.group_count"):
        raise GgufError(f"{model.paths[0].name} gives {inner} numbers to {heads} heads, which do not divide them")
    fields = fields_of(model)
    if isinstance(recurrent := fields.get("attention.recurrent_layers"), list):
        types = ["linear_attention" if each else "full_attention" for each in recurrent]
        config["layer_types"] = types[: config["num_hidden_layers"]]
    complete_axes(model, config)


QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    DELTA_LAYER_NAMES,
    norm_offset=1.0,
    keys=DELTA_KEYS,
    complete=complete_delta_nets,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    has_axes=True,
    has_tiled_values=True,
)
QWEN3_5_MOE = replace(QWEN3_5, model_type="qwen3_5_moe_text", class_name="Qwen3_5MoeForCausalLM")
QWEN2_VL = Architecture("qwen2_vl_text", "Qwen2VLForConditionalGeneration", complete=complete_axes, has_axes=True)
QWEN3_VL = replace(QWEN2_VL, model_type="qwen3_vl_text", class_name="Qwen3VLForConditionalGeneration")
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe_text",
    class_name="Qwen3VLMoeForConditionalGeneration",
    fields={"norm_topk_prob": True},
)
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


def mistral_3_variant(model: GgufModel) -> Architecture | None:
    """Return the row of Ministral 3 for files whose queries grow with their positions."""
    return MINISTRAL_3 if "attention.temperature_scale" in fields_of(model) else None


def olmo_variant(model: GgufModel) -> Architecture | None:
    """Return the row of OLMo 3 for files with windows."""
    return OLMO_3 if "attention.sliding_window" in fields_of(model) else None


def complete_exaone(model: GgufModel, config: dict[str, Any]) -> None:
    """Say that there are no windows, if the file has none."""
    if "sliding_window" not in config:
        config |= {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def complete_stablelm(model: GgufModel, config: dict[str, Any]) -> None:
    """Add what the tensors say of the layers, by the names of this type."""
    config["use_qkv_bias"] = config["attention_bias"]
    config["qk_layernorm"] = config["use_qk_norm"]
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in model.tensors


def complete_starcoder(model: GgufModel, config: dict[str, Any]) -> None:
    """Say by the name of this type whether linear layers have biases."""
    config["use_bias"] = config["attention_bias"]


DOTS_1 = Architecture(
    "dots1",
    "Dots1ForCausalLM",
    DEEPSEEK_MIXTURE_NAMES,
    fields={"sliding_window": None},
    bias_layer="attn_q",
    gating=SIGMOID,
)
OLMOE = Architecture("olmoe", "OlmoeForCausalLM", fields={"norm_topk_prob": False}, refused=("attention.clamp_kqv",))
NORM_AFTER_ROPE = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
HUNYUAN_MOE = Architecture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    NORM_AFTER_ROPE
    | {
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    },
)
LFM2 = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    fields={"block_auto_adjust_ff_dim": False},
    keys={"shortconv.l_cache": "conv_L_cache"},
    model_names={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    state_type="conv",
)
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    fields={"norm_topk_prob": True},
    gating=SIGMOID,
)
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", interleaved=True, fields={"sliding_window": None}, mixture=MIXTRAL
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": replace(QWEN2_MOE, mixture=QWEN2_MOE),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": replace(QWEN3_MOE, mixture=QWEN3_MOE),
    "qwen2vl": QWEN2_VL,
    "qwen3vl": QWEN3_VL,
    "qwen3vlmoe": replace(QWEN3_VL_MOE, mixture=QWEN3_VL_MOE),
    "qwen3next": replace(QWEN3_NEXT, mixture=QWEN3_NEXT),
    "qwen35": QWEN3_5,
    "qwen35moe": replace(QWEN3_5_MOE, mixture=QWEN3_5_MOE),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA_LAYER_NAMES, norm_offset=1.0),
    "gemma3n": GEMMA_3N,
    "gemma4": replace(GEMMA_4, mixture=GEMMA_4),
    "gpt-oss": replace(GPT_OSS, mixture=GPT_OSS),
    "mistral3": Architecture(
        "mistral",
        "MistralForCausalLM",
        interleaved=True,
        fields={"sliding_window": None},
        variant=mistral_3_variant,
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
    "deepseek2": YOUTU,
    "minimax-m2": replace(MINIMAX_M2, mixture=MINIMAX_M2),
    "granite": Architecture("granite", "GraniteForCausalLM", interleaved=True, keys=GRANITE_KEYS),
    "granitemoe": replace(GRANITE_MOE, mixture=GRANITE_MOE),
    "granitehybrid": replace(GRANITE_HYBRID, mixture=GRANITE_HYBRID),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", OLMO_LAYER_NAMES, variant=olmo_variant),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", NORM_AFTER_ATTENTION, bias_layer="attn_q"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": replace(ERNIE_MOE, mixture=ERNIE_MOE),
    "command-r": Architecture("cohere", "CohereForCausalLM"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM"),
    "arcee": Architecture("arcee", "ArceeForCausalLM", interleaved=True),
    "dots1": replace(DOTS_1, mixture=DOTS_1),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", OLMO_LAYER_NAMES, complete=complete_exaone),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", NORM_AFTER_ROPE),
    "hunyuan-moe": replace(HUNYUAN_MOE, mixture=HUNYUAN_MOE),
    "lfm2": LFM2,
    "lfm2moe": replace(LFM2_MOE, mixture=LFM2_MOE),
    "nemotron": Architecture(
        "nemotron", "NemotronForCausalLM", norm_offset=1.0, keys={"attention.layer_norm_epsilon": "norm_eps"}
    ),
    "olmo": Architecture("olmo", "OlmoForCausalLM", interleaved=True, refused=("attention.clamp_kqv",)),
    "olmoe": replace(OLMOE, mixture=OLMOE),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", bias_layer="attn_q", complete=complete_stablelm),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields={"sliding_window": 4096},  # of all published models; their files do not say it
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        complete=complete_starcoder,
    ),
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
    if model.metadata.get(name + ".expert_count"):
        if architecture.mixture is None:
            raise GgufError(f"{file} is a mixture of experts of the architecture {name}, which is not read from GGUF")
        architecture = architecture.mixture
    architecture = architecture.variant(model) or architecture
    _check_computation(model, architecture)
    return architecture


def fields_of(model: GgufModel) -> dict[str, Any]:
    """Return the metadata of the file's architecture, by their names after its own."""
    prefix = f"{model.metadata['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)}


def shortest_number(value: Any) -> Any:
    """Return the shortest decimal number that is the same as float32, as configs have it; other values as they are."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    candidates = (float(f"{value:.{digits}g}") for digits in (7, 8))
    return next((each for each in candidates if struct.pack("<f", each) == struct.pack("<f", value)), value)


def _check_computation(model: GgufModel, architecture: Architecture) -> None:
    """Raise GgufError if a file asks for a computation that its architecture does not have here."""
    fields, file = fields_of(model), model.paths[0].name
    sections = fields.get("rope.dimension_sections")
    if isinstance(sections, list) and any(sections) and not architecture.has_axes:
        raise GgufError(f"{file} has positions with several axes, for pictures, which are not read from GGUF")
    for key in architecture.refused:
        if key in fields:
            raise GgufError(
                f"{file} gives {key} as {reprlib.repr(fields[key])}, which its architecture does not have here"
            )
    gating = fields.get("expert_gating_func") or architecture.gating
    if gating != architecture.gating:
        raise GgufError(f"{file} gives expert_gating_func as {reprlib.repr(gating)}, but its architecture has another")


def tensor_name(architecture: Architecture, name: str) -> str:
    """Return the name in Hugging Face format; an unknown one stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in (outer := TENSOR_NAMES | architecture.model_names):
        return f"{outer[stem]}.{kind}"
    match = LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name
    layer, names = f"model.layers.{int(match[1])}.", LAYER_TENSOR_NAMES | architecture.layer_names
    if (whole := match[0].removeprefix(f"blk.{match[1]}.")) in names:
        return layer + names[whole]
    return f"{layer}{names[match[2]]}.{match[3]}" if match[3] and match[2] in names else name


def tensor_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape of a tensor in Hugging Face format: that of a router with one output has two dimensions, that
    of a convolution of each channel by itself three, and those of Mamba 2's heads and norms one."""
    if tensor.name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        return (math.prod(tensor.shape),)
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        return (1, *tensor.shape)
    if tensor.name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")) and len(tensor.shape) == 2:
        return tensor.shape[0], 1, tensor.shape[1]
    return tensor.shape
