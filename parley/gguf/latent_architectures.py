"""DeepSeek V2 to V3.2, Mistral 4, similar models and MiniCPM3 in GGUF files, with multi-head latent attention (MLA)."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from parley.gguf.architecture import (
    DEEPSEEK_MIXTURE_NAMES,
    SIGMOID,
    SOFTMAX,
    Architecture,
    fields_of,
    read_size,
    shortest_number,
)
from parley.gguf.header import GgufError, GgufModel

LATENT_LAYER_NAMES = DEEPSEEK_MIXTURE_NAMES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
INDEXER_LAYER_NAMES = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
INDEXER_KEYS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
INDEXER_TYPES = "attention.indexer.types"
GLM_5_2_CONTEXT = (
    1 << 20
)  # from GLM-5.2 on, models have this context length, and only every fourth layer has an indexer
# DeepSeek-V3 and R1 have this number of experts; their first files do not say that they are in groups
DEEPSEEK_3_EXPERTS, DEEPSEEK_3_GROUPS = 256, {"n_group": 8, "topk_group": 4}
LING_3_BOUND = -5.0  # of the logarithms of decays, in the published models
YARN_LOG_UNIT = 10  # the converter divides mscale_all_dim of this architecture by it


def check_rotary(model: GgufModel, rotary: int, keys: int) -> None:
    """Raise GgufError unless keys have dimensions that do not rotate."""
    if keys <= rotary:
        raise GgufError(f"{model.paths[0].name} rotates {rotary} of {keys} dimensions")


def complete_latents(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of latents, and options of routers that files leave out if they have no effect.

    Raises GgufError if the sizes are impossible.
    """
    fields = fields_of(model)
    suffix = "_mla" if "attention.key_length_mla" in fields else ""
    rotary, rank, keys, values = (
        read_size(model, key)
        for key in (
            "rope.dimension_count",
            "attention.kv_lora_rank",
            "attention.key_length" + suffix,
            "attention.value_length" + suffix,
        )
    )
    check_rotary(model, rotary, keys)
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


def complete_minicpm_3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the sizes of latents. Raises GgufError if they are impossible."""
    fields, file, heads = fields_of(model), model.paths[0].name, config["num_attention_heads"]
    rotary, rank, keys = (
        read_size(model, key) for key in ("rope.dimension_count", "attention.kv_lora_rank", "attention.key_length")
    )
    check_rotary(model, rotary, keys)
    unpacked = model.tensors.get("blk.0.attn_kv_b.weight")
    if unpacked is None:
        raise GgufError(f"{file} has no tensor blk.0.attn_kv_b.weight")
    values, remainder = divmod(unpacked.shape[0], heads)
    if remainder or values <= keys - rotary:
        raise GgufError(
            f"{file} has {unpacked.shape[0]} rows in blk.0.attn_kv_b.weight, which {heads} heads with keys of {keys} "
            "cannot share"
        )
    config |= {
        "kv_lora_rank": rank,
        "q_lora_rank": fields.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys - rotary,
        "v_head_dim": values - (keys - rotary),
        "head_dim": rotary,
        "num_key_value_heads": heads,
    }
    config.pop("partial_rotary_factor", None)


def complete_deepseek_2(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of DeepSeek-V2. Raises GgufError."""
    complete_latents(model, config)
    if config["norm_topk_prob"]:
        raise GgufError(f"{model.paths[0].name} gives expert_weights_norm, but its architecture has it not")
    config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"


def complete_deepseek_3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of DeepSeek-V3. Raises GgufError."""
    complete_latents(model, config)
    are_grouped = read_size(model, "expert_count") == DEEPSEEK_3_EXPERTS and "n_group" not in config
    config |= DEEPSEEK_3_GROUPS if are_grouped else {"n_group": 1, "topk_group": 1} | config


def check_indexers(model: GgufModel, config: dict[str, Any]) -> None:
    """Raise GgufError if the file does not say how many tokens indexers choose, and how."""
    for key in INDEXER_KEYS:
        read_size(model, key)
    if config["q_lora_rank"] is None:
        raise GgufError(f"{model.paths[0].name} has indexers, but no latents of queries, which they read")


def complete_deepseek_32(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of DeepSeek-V3.2. Raises GgufError."""
    complete_deepseek_3(model, config)
    check_indexers(model, config)


def _own_indexers(model: GgufModel, count: int) -> list[bool]:
    """Return whether each of ``count`` layers of a GLM-5 model has an indexer of its own. Raises GgufError.

    The metadata says it, or else the tensors of the layers. Some files of GLM-5.2 and 5.3 have the tensors in all
    layers and no metadata; they get the published pattern, as in llama.cpp.
    """
    listed = fields_of(model).get(INDEXER_TYPES)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < count or any(kind not in (0, 1) for kind in listed):
            raise GgufError(
                f"{model.paths[0].name} gives {INDEXER_TYPES} as {reprlib.repr(listed)}; each of {count} layers has 1, "
                "or 0 if it uses the tokens of an earlier layer"
            )
        return [bool(kind) for kind in listed[:count]]
    has_indexer = [f"blk.{layer}.indexer.attn_k.weight" in model.tensors for layer in range(count)]
    if all(has_indexer) and read_size(model, "context_length") >= GLM_5_2_CONTEXT:
        return [max(layer - 2, 0) % 4 == 0 for layer in range(count)]
    return has_indexer


def complete_glm_dsa(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of GLM-5, some of whose layers use the tokens that an earlier layer chose. Raises GgufError."""
    complete_latents(model, config)
    check_indexers(model, config)
    config["indexer_types"] = [
        "full" if has_own else "shared" for has_own in _own_indexers(model, config["num_hidden_layers"])
    ]
    config |= {"n_group": 1, "topk_group": 1} | config


def complete_kimi_linear(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of Kimi Linear. Its files do not say that the weights of experts are normalized. Raises
    GgufError."""
    file = model.paths[0].name
    gates = [tensor for name, tensor in model.tensors.items() if name.endswith(".ssm_beta.weight")]
    if not gates or "layer_types" not in config:
        raise GgufError(f"{file} does not say which layers keep a state, so the model's shape is unknown")
    complete_latents(model, config)
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    config["linear_attn_config"] = {
        "num_heads": gates[0].shape[0],
        "head_dim": read_size(model, "kda.head_dim"),
        "short_conv_kernel_size": read_size(model, "ssm.conv_kernel"),
    }
    config["norm_topk_prob"] = True
    config |= {"n_group": 1, "topk_group": 1} | config


def complete_ling_3(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of Ling 3. Raises GgufError for other layers than those of the published models."""
    fields, file, count = fields_of(model), model.paths[0].name, config["num_hidden_layers"]
    if "layer_types" not in config:
        raise GgufError(f"{file} does not say which layers keep a state, so the model's shape is unknown")
    complete_latents(model, config)
    clamps = [fields.get(f"swiglu_clamp_{part}") for part in ("exp", "shexp")]
    if config["q_lora_rank"] is not None or fields.get("kda.safe_gate") is False:
        raise GgufError(f"{file} has latents of queries or decays without a bound, which its architecture has not")
    if any(isinstance(clamp, list) and any(clamp[:count]) for clamp in clamps):
        raise GgufError(f"{file} limits the gates of experts (swiglu_clamp), which its architecture does not do here")
    width = config.pop("shared_expert_intermediate_size", None)
    experts_width = read_size(model, "expert_feed_forward_length")
    if width not in (None, config.get("n_shared_experts", 1) * experts_width):
        raise GgufError(f"{file} gives expert_shared_feed_forward_length as {width}, but an expert has {experts_width}")
    config["layer_types"] = config["layer_types"][:count]
    config |= {
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": read_size(model, "kda.head_dim"),
        "linear_conv_kernel_dim": read_size(model, "ssm.conv_kernel"),
        "kda_lower_bound": shortest_number(fields.get("kda.gate_lower_bound", LING_3_BOUND)),
    }
    config |= {"n_group": 1, "topk_group": 1} | config


def complete_mistral_4(model: GgufModel, config: dict[str, Any]) -> None:
    """Add the fields of Mistral 4. Raises GgufError."""
    complete_latents(model, config)
    config |= {"n_group": 1, "topk_group": 1} | config


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
MISTRAL_4 = replace(
    DEEPSEEK_3,
    model_type="mistral4",
    class_name="Mistral4ForCausalLM",
    gating=SOFTMAX,
    rope_keys=DEEPSEEK_3.rope_keys | {"llama_4_scaling_beta": "attention.temperature_scale"},
    complete=complete_mistral_4,
    refused=(),
)
DEEPSEEK_32 = replace(
    DEEPSEEK_3,
    model_type="deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    layer_names=LATENT_LAYER_NAMES | INDEXER_LAYER_NAMES,
    keys=INDEXER_KEYS,
    complete=complete_deepseek_32,
)
GLM_DSA = replace(DEEPSEEK_32, model_type="glm_moe_dsa", class_name="GlmMoeDsaForCausalLM", complete=complete_glm_dsa)
KIMI_DELTA_NAMES = (
    LATENT_LAYER_NAMES
    | {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"}
    | {
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
    }
)
LING_3 = replace(
    DEEPSEEK_3,
    model_type="bailing_hybrid",
    class_name="BailingHybridForCausalLM",
    layer_names=KIMI_DELTA_NAMES
    | {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"},
    complete=complete_ling_3,
    state_type="linear_attention",
    has_positive_rates=True,
)
KIMI_LINEAR = replace(
    DEEPSEEK_3,
    model_type="kimi_linear",
    class_name="KimiLinearForCausalLM",
    layer_names=KIMI_DELTA_NAMES | {f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    complete=complete_kimi_linear,
    state_type="linear_attention",
)
YOUTU = replace(
    DEEPSEEK_3,
    model_type="youtu",
    class_name="YoutuForCausalLM",
    gating=SOFTMAX,
    mixture=DEEPSEEK_2,
    complete=complete_latents,
)
MINICPM_3 = Architecture("minicpm3", "MiniCPM3ForCausalLM", LATENT_LAYER_NAMES, complete=complete_minicpm_3)
LATENT_ARCHITECTURES = {
    "plm": Architecture("plm", "PLMForCausalLM", LATENT_LAYER_NAMES, complete=complete_latents),
    "deepseek2": YOUTU,
    "deepseek32": replace(DEEPSEEK_32, mixture=DEEPSEEK_32),
    "glm-dsa": replace(GLM_DSA, mixture=GLM_DSA),
    "kimi-linear": replace(KIMI_LINEAR, mixture=KIMI_LINEAR),
    "bailingmoe3": replace(LING_3, mixture=LING_3),
    "minicpm3": MINICPM_3,
    "mistral4": replace(MISTRAL_4, mixture=MISTRAL_4),
}
