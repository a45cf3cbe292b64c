"""Writes model folders as GGUF files with the names and layouts of llama.cpp's converter (its folder conversion/).

The names are those of the gguf package, so they do not come from the code that reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import gguf_files
from support.gguf_axes import AXES_ARCHITECTURES, PARTED_TYPES, part_pairs
from support.gguf_latents import (
    INDEXER_COUNTS,
    LATENT_ARCHITECTURES,
    LATENT_SIGMOID,
    LATENT_TYPES,
    add_kimi,
    add_latents,
    convert_kimi,
    split_latent_up,
)
from support.gguf_recent import STAND_INS, add_recent, join_experts, recent_name, split_gates
from support.gguf_step import add_step
from support.gguf_windows import add_ling, add_mimo

ARCHITECTURES = {
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "cohere2_moe": "cohere2moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "minimax_m3_vl_text": "minimax-m3",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "ministral3": "mistral3",
    **LATENT_TYPES,
    "ernie4_5_moe": "ernie4_5-moe",
    **AXES_ARCHITECTURES,
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "exaone_moe": "exaone-moe",
    "mimo_v2_flash": "mimo2",
    "step3p5": "step35",
    "flex_olmo": "flex-olmo",
    "granitemoe_swa": "granite_swa",
}
DELTA_COUNTS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
# Llama's code reorders their queries and keys
PERMUTED = (
    "granite",
    "granitemoe",
    "granitemoeshared",
    "smollm3",
    "ministral3",
    "mistral",
    "arcee",
    "olmo",
    "granitemoehybrid",
    "granite_swa",
    "granitemoe_swa",
)
MAMBA_COUNTS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}
# Fields of config.json that the converter adds, and their names in the file
NUMBERS = {
    "clip_qkv": "attention.clamp_kqv",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
}
COUNTS = {
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_topk": "expert_used_count",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
    **INDEXER_COUNTS,
}
YARN_NUMBERS = {
    "factor": "factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
SIGMOID = ("glm4_moe", "glm4v_moe_text", "minimax_m2", *LATENT_SIGMOID, "mimo_v2_flash", "dots1", "lfm2_moe")
BARE_NAMES = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")  # of Gemma 4
BARE_EXPERTS = dict.fromkeys(("mistral4", "granitemoe_swa"), ("experts.gate_up_proj", "experts.down_proj"))
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# Names of Transformers that the package does not know, and others of the same tensors
OTHER_NAMES = {
    "e_score_correction_bias": "e_score_correction.bias",
    "mlp.gate_up_proj": "mlp.up_proj",
    "attn_sub_norm": "inner_attn_ln",
    "ffn_sub_norm": "ffn_layernorm",
}


def convert_folder(
    path: Path,
    folder: Path,
    *,
    extra_layers: int = 0,
    experts: str = "F32",
    latents: str = "F32",
    outputs: str = "F32",
    splits_latents: bool = True,
    arch: str | None = None,
    turns_heads: bool = False,
    packs_heads: bool = False,
    joins_experts: bool = False,
) -> Path:
    """Write a folder's model as one file of float32. ``extra_layers``: that predict further tokens, made up.
    ``experts``, ``latents`` and ``outputs`` of gated delta nets: the types of their weights. ``splits_latents``: keys
    and values of latents are made apart; old files have one layer for both. ``arch``: the architecture, if it is not
    that of the folder's type. ``turns_heads``: Llama's code reorders queries and keys, as of the types in PERMUTED.
    ``packs_heads``: queries, keys and values are one tensor. ``joins_experts``: gates and ups of experts are one."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    arch = arch or ARCHITECTURES.get(kind, kind)
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(path, arch)
    shape = config | {"num_hidden_layers": layers + extra_layers}
    if "n_routed_experts" in config:  # the same number, which the writer takes once
        shape["num_experts"] = None
    if arch == "minicpm3":
        shape |= {"head_dim": None}
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    if arch in LATENT_ARCHITECTURES:
        shape |= {"head_dim": None, "num_key_value_heads": 1 if splits_latents else config["num_attention_heads"]}
        add_latents(writer, config, splits_latents)
    if kind == "kimi_linear":
        shape |= add_kimi(writer, config)
    if arch == "qwen":  # of gates and ups together
        shape["intermediate_size"] = 2 * config["intermediate_size"]
    if arch == "bailingmoe":
        shape |= add_ling(writer, config)
    if kind == "mimo_v2_flash":
        shape |= add_mimo(writer, config)
    shape |= add_recent(writer, config)
    if kind == "step3p5":
        shape |= add_step(writer, config)
    if arch == "gemma3n":
        shape |= add_gemma_3n(writer, config)
    if arch == "gemma4":
        shape |= add_gemma_4(writer, config)
    if "conv_L_cache" in config:
        heads = config["num_key_value_heads"]
        shape["num_key_value_heads"] = [
            heads * (layer_type == "full_attention") for layer_type in config["layer_types"]
        ]
    if kind == "granitemoehybrid":
        heads = config["num_key_value_heads"]
        shape["num_key_value_heads"] = [
            heads * (layer_type == "full_attention") for layer_type in config["layer_types"]
        ]
        add_mamba(writer, config)
    if kind == "hunyuan_v1_dense" and config["rope_parameters"]["rope_type"] == "dynamic":
        shape["rope_parameters"] = {"rope_theta": stretched_base(config)}
    if kind == "starcoder2":  # whose windows the converter leaves out
        shape["sliding_window"] = None
    gguf_files.add_shape(writer, shape)
    gguf_files.add_tokenizer(writer, folder)
    if kind in ("mimo_v2_flash", "mellum", "laguna"):
        config |= {"rope_parameters": shape["rope_parameters"]}
    add_numbers(writer, config | {"num_nextn_predict_layers": extra_layers})
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[STAND_INS.get(arch, arch)], layers)
    stored = load_file(folder / "model.safetensors")
    if kind == "qwen3_vl_moe_text":
        stored = {
            name.replace("_exps.weight", "_proj.weight"): part
            for name, part in gguf_files.split_experts(stored).items()
        }
    if "linear_num_value_heads" in config:
        add_delta_nets(writer, config)
        stored = convert_delta_nets(config, stored, is_tiled=arch != "qwen3next")
    if kind == "granitemoehybrid":
        stored = dict(convert_mamba(config, stored))
    if kind == "kimi_linear":
        stored = convert_kimi(stored)
    if splits_latents:
        stored = split_latent_up(config, stored)
    if kind == "minimax_m3_vl_text":
        stored = split_gates(stored)
    if kind == "apertus":
        stored = add_activations(writer, layers, stored)
    if turns_heads or kind in PERMUTED:
        stored = turn_heads(config, stored)
    if kind in PARTED_TYPES:
        stored = part_pairs(config, stored)
    if packs_heads:
        stored = pack_heads(stored)
    if arch == "gemma3n":
        stored = {name + ".weight" * name.endswith("_scale"): tensor for name, tensor in stored.items()}
        for stack in ("model.altup_projections", "model.altup_unembed_projections"):
            parts = [stored.pop(f"{stack}.{i}.weight") for i in range(config["altup_num_inputs"] - 1)]
            stored[f"{stack}.weight"] = torch.stack(parts)
    if arch == "gemma4":
        stored = {name + ".weight" * name.endswith(BARE_NAMES): tensor for name, tensor in stored.items()}
        for scale, written in (("router.scale", "ffn_gate_inp"), ("router.per_expert_scale", "ffn_down_exps")):
            for layer in range(layers):
                if (tensor := stored.pop(f"model.layers.{layer}.{scale}", None)) is not None:
                    writer.add_tensor(f"blk.{layer}.{written}.scale", tensor.float().numpy())
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in convert_tensors(kind, config, stored):
        for known, other in OTHER_NAMES.items():
            name = name.replace(known, other)
        written = names.get_name(name, (".weight", ".bias")) or recent_name(name)
        assert written is not None, name
        converted[written] = tensor
    for written, tensor in (join_experts(converted) if joins_experts else converted).items():
        kind_here = experts if written.endswith("_exps.weight") else "F32"
        kind_here = outputs if written.endswith("ssm_out.weight") else kind_here
        kind_here = latents if written.endswith(("k_b.weight", "v_b.weight")) else kind_here
        gguf_files.add_tensor(writer, written, tensor.float().contiguous().numpy(), kind_here)
    for layer in range(layers, layers + extra_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", torch.ones(4).numpy())
        writer.add_tensor(f"blk.{layer}.nextn.eh_proj.weight", torch.ones(4, 8).numpy())
    gguf_files.close_writer(writer)
    return path


def add_activations(writer: gguf.GGUFWriter, layers: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the numbers of Apertus' activation to the metadata. Return the other tensors."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [float(tensors[f"model.layers.{layer}.mlp.act_fn.{name}"]) for layer in range(layers)]
        getattr(writer, f"add_xielu_{name}")(values)
    return {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}


def turn_heads(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the rows of queries and keys in llama.cpp's order."""
    turned = dict(tensors)
    for name, tensor in tensors.items():
        if re.search(r"\.([qk]_proj|(query|key)_layernorm)\.", name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            heads = 1 if "layernorm" in name else heads
            turned[name] = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return turned


def pack_heads(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with queries, keys and values as one."""
    packed = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            packed[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return packed


def add_gemma_3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add what layers of Gemma 3n have of their own. Return fields of the config as the file has them."""
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0.0, 1.0).icdf(shares).tolist())
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
    return {"rope_parameters": {"rope_theta": config["rope_parameters"]["full_attention"]["rope_theta"]}}


def add_gemma_4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """Add what layers of Gemma 4 have of their own. Return fields of the config as the file has them."""
    full = next(iter(config["per_layer_config"].values()))
    windows = [layer_type == "sliding_attention" for layer_type in config["layer_types"]]
    shared, ropes = config["num_kv_shared_layers"], config["rope_parameters"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    turning = int(full["head_dim"] * ropes["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (full["head_dim"] // 2 - turning)
    writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
    heads = config["num_key_value_heads"]
    fields = {"head_dim": full["head_dim"], "rope_parameters": {"rope_theta": ropes["full_attention"]["rope_theta"]}}
    if own := full.get("num_key_value_heads"):
        fields["num_key_value_heads"] = [heads if window else own for window in windows]
    if config["use_double_wide_mlp"]:
        width, first = config["intermediate_size"], len(windows) - shared
        fields["intermediate_size"] = [width if layer < first else 2 * width for layer in range(len(windows))]
    if config.get("top_k_experts"):
        fields["num_experts_per_tok"] = config["top_k_experts"]
    return fields


def stretched_base(config: dict[str, Any]) -> float:
    """Return the base of Hunyuan's rotary embedding, which alpha changes."""
    rope, size = config["rope_parameters"], config["head_dim"]
    return rope["rope_theta"] * rope["alpha"] ** (size / (size - 2))


def add_delta_nets(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of gated delta nets, and the types of layers."""
    for field, key in DELTA_COUNTS.items():
        if config.get(field) is not None:
            writer.add_uint32(f"{writer.arch}.{key}", config[field])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [layer_type == "linear_attention" for layer_type in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    if writer.arch != "qwen3next" and "mrope_section" not in (config.get("rope_parameters") or {}):
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of Mamba 2 layers. Granite's rotate nothing, and Bamba's do."""
    for field, key in MAMBA_COUNTS.items():
        writer.add_uint32(f"{writer.arch}.{key}", config[field])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    if not config["num_local_experts"]:
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def convert_mamba(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with Mamba 2 layers as in files: rates of decay for their logarithms, and shapes with heads."""
    for name, tensor in tensors.items():
        if name.endswith("mamba.A_log"):
            yield name, -tensor.float().exp()[:, None]
        elif name.endswith("mamba.D"):
            yield name, tensor[:, None]
        elif name.endswith("mamba.dt_bias"):
            yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
        elif name.endswith("mamba.norm.weight"):
            yield name, tensor.view(config["mamba_n_groups"], -1)
        elif name.endswith("mamba.conv1d.weight"):
            yield name, tensor.squeeze(1)
        elif not config["num_local_experts"] and name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{part}_proj"), half
        elif not config["num_local_experts"] and name.endswith("shared_mlp.output_linear.weight"):
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        else:
            yield name, tensor


def convert_delta_nets(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], is_tiled: bool
) -> dict[str, torch.Tensor]:
    """Return tensors with gated delta nets as in files: norms with 1 added, rates of decay for their logarithms,
    queries, keys, values and gates of all heads after one another. ``is_tiled``: the first value heads of all key heads
    come first, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    skipped, share = 2 * keys * key_dim, values // keys

    def tile(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if not is_tiled:
            return tensor
        heads = tensor.unflatten(dim, (keys, share, -1)).transpose(dim, dim + 1)
        return heads.reshape(tensor.shape)

    converted: dict[str, torch.Tensor] = {}
    for name, tensor in gguf_files.split_experts(tensors).items():
        name = name.replace("_exps.weight", "_proj.weight")
        if name.endswith("in_proj_qkvz.weight"):
            sizes = [key_dim, key_dim, share * value_dim, share * value_dim]
            parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (keys, -1)).split(sizes, 1)]
            converted[name.replace("qkvz", "qkv")] = torch.cat(parts[:3])
            converted[name.replace("qkvz", "z")] = parts[3]
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            rows = tensor.squeeze(1) if "conv1d" in name else tensor
            converted[name] = torch.cat((rows[:skipped], tile(rows[skipped:])))
        elif name.endswith("out_proj.weight"):
            converted[name] = tile(tensor, 1)
        elif name.endswith((".in_proj_z.weight", ".in_proj_a.weight", ".in_proj_b.weight")):
            converted[name] = tile(tensor)
        elif name.endswith(".A_log"):
            converted[name] = -tile(tensor).float().exp()
        elif name.endswith(".dt_bias"):
            converted[name.replace(".dt_bias", ".dt_proj.bias")] = tile(tensor)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            converted[name] = tensor.float() + 1
        else:
            converted[name] = tensor
    return converted


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of a config.json that Llama's has not."""
    for field, key in NUMBERS.items():
        if config.get(field) is not None:
            writer.add_float32(f"{writer.arch}.{key}", config[field])
    for field, key in COUNTS.items():
        if config.get(field) is not None:
            writer.add_uint32(f"{writer.arch}.{key}", config[field])
    if config.get("norm_topk_prob") is not None:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] in SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "nemotron":
        writer.add_layer_norm_eps(config["norm_eps"])
    elif "norm_eps" in config and "rms_norm_eps" not in config:
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    if config["model_type"] == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if writer.arch in ("olmo2", "exaone4", "exaone-moe") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([layer_type == "sliding_attention" for layer_type in config["layer_types"]])
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary = config.get("qk_rope_head_dim") or config.get("rotary_dim") or int(head_dim * share)
    writer.add_rope_dimension_count(rotary)
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for field, key in YARN_NUMBERS.items():
            if rope.get(field) is not None:
                writer.add_float32(f"{writer.arch}.rope.scaling.{key}", rope[field])
        if writer.arch in LATENT_ARCHITECTURES:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def convert_tensors(
    kind: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the layouts of files, by names that the gguf package knows."""
    for name, tensor in stack_experts(tensors).items():
        if name.endswith(("self_attn.sinks", "attention_sink_bias", *BARE_EXPERTS.get(kind, ()))):
            yield name + ".weight", tensor
        elif ".experts." in name and kind == "gpt_oss":
            yield from split_gpt_oss(name, tensor)
        elif name.endswith("input_linear.weight"):  # Granite's mixtures and shared experts
            stem = "shared_mlp" if "shared" in name else "experts"
            prefix = f"{name.split('.block')[0].split('.shared')[0]}.mlp.{stem.replace('mlp', 'expert')}"
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                yield f"{prefix}.{part}_proj.weight", half
        elif kind in ("nemotron", "step3p5", "minimax_m3_vl_text") and name.endswith("norm.weight"):
            yield name, tensor.float() + 1
        elif ".feed_forward.experts." in name:
            yield name.removeprefix("model."), tensor
        elif name.endswith("conv.conv.weight"):
            yield name, tensor.squeeze(1)
        else:
            yield re.sub(r"(expert_bias|router_bias)$", r"\1.bias", name), tensor


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the weights of all experts of a layer as one."""
    stacked, parts = {}, {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            parts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
        else:
            stacked[name] = tensor
    return stacked | {name: torch.stack([experts[i] for i in range(len(experts))]) for name, experts in parts.items()}


def split_gpt_oss(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield GPT-OSS' experts: weights [experts, out, in], the outputs of gate and up apart."""
    stem, suffix = (name.removesuffix("_bias"), ".bias") if name.endswith("_bias") else (name, ".weight")
    rows = tensor if suffix == ".bias" else tensor.mT
    if stem.endswith("down_proj"):
        yield stem + suffix, rows
        return
    for part, first in (("gate_proj", 0), ("up_proj", 1)):
        yield stem.replace("gate_up_proj", part) + suffix, rows[:, first::2]
