"""Ling 3 as a GGUF file, laid out as llama.cpp's converter does it (conversion/bailingmoe3.py), against its folder."""

from __future__ import annotations

import json
import re

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support import gguf_files, tiny_models
from support.gguf_conversion import stack_experts
from support.gguf_latents import add_latents, split_latent_up
from test_gguf_architectures import answers

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config

NAMES = {
    "model.word_embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attention.dense.weight": "attn_output.weight",
    "attention.b_proj.weight": "ssm_beta.weight",
    "attention.f_proj.weight": "ssm_f_a.weight",
    "attention.o_norm.weight": "ssm_norm.weight",
    "attention.dt_bias": "ssm_dt.bias",
    "attention.A_log": "ssm_a",
    "attention.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "attention.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "attention.k_b_proj.weight": "attn_k_b.weight",
    "attention.v_b_proj.weight": "attn_v_b.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
    **{f"attention.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"attention.{part}_conv1d.weight": f"ssm_conv1d_{part}.weight" for part in "qkv"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}


def convert_ling(path, folder):
    """Write a folder's model as one file of float32, with a layer that predicts a further token."""
    config = json.loads((folder / "config.json").read_text())
    count, is_full = config["num_hidden_layers"], [kind == "full_attention" for kind in config["layer_types"]]
    writer = gguf.GGUFWriter(path, "bailingmoe3")
    gguf_files.add_shape(
        writer,
        config
        | {"num_hidden_layers": count + 1, "num_key_value_heads": [*map(int, is_full), 1], "head_dim": None}
        | {"max_position_embeddings": config["model_max_length"]}
        | {"num_experts_per_tok": config["num_experts_per_token"]}
        | {"shared_expert_intermediate_size": config["moe_intermediate_size"]},
    )
    gguf_files.add_tokenizer(writer, folder)
    add_latents(writer, config | {"q_lora_rank": None}, splits_latents=True)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_bool("bailingmoe3.kda.safe_gate", True)
    writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
    writer.add_array("bailingmoe3.swiglu_clamp_exp", [0.0] * count + [7.0])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["moe_renormalize"])
    writer.add_expert_group_count(config["num_expert_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_nextn_predict_layers(1)
    stored = stack_experts(split_latent_up(config, load_file(folder / "model.safetensors")))
    for name, tensor in stored.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            written = NAMES[name]
        elif match[2] == "attention.g_proj.weight":
            written = f"blk.{match[1]}.{'attn_gate' if is_full[int(match[1])] else 'ssm_g_a'}.weight"
        else:
            written = f"blk.{match[1]}.{LAYER_NAMES[match[2]]}"
        if name.endswith("_conv1d.weight"):
            tensor = tensor.reshape(1, len(tensor), 1, -1)
        elif name.endswith(".A_log"):
            tensor = tensor.exp().reshape(-1, 1)
        writer.add_tensor(written, tensor.float().contiguous().numpy())
    writer.add_tensor(f"blk.{count}.nextn.eh_proj.weight", torch.ones(4, 8).numpy())
    gguf_files.close_writer(writer)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.write_model(tmp_path_factory.mktemp("ling"), "bailing_hybrid", dtype="float32")


def test_answers_of_ling_3_are_the_folders(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert answers(unpack_gguf(convert_ling(tmp_path / "x.gguf", folder))) == answers(folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("kda.safe_gate", False, "has latents of queries or decays without a bound, which its architecture has not"),
        ("attention.q_lora_rank", 8, "has latents of queries or decays without a bound, which its architecture has"),
        ("swiglu_clamp_exp", [0.0, 7.0, 7.0], r"limits the gates of experts \(swiglu_clamp\), which its architecture"),
        ("expert_shared_feed_forward_length", 8, "gives expert_shared_feed_forward_length as 8, but an expert has 48"),
        ("attention.head_count_kv", 4, "does not say which layers keep a state, so the model's shape is unknown"),
    ],
)
def test_other_layers_are_refused(folder, key, value, reason, tmp_path):
    model = read_model(convert_ling(tmp_path / "x.gguf", folder))
    model.metadata[f"bailingmoe3.{key}"] = value
    with pytest.raises(GgufError, match=rf"^x\.gguf {reason}"):
        model_config(model)
