"""DeepSeekMoE (the type ``deepseek``), as a folder and as a GGUF file.

Transformers does not have its code. The type computes what Qwen2-MoE computes if the gate of the shared expert is
always 1/2, its weights are twice as large and attention has no biases.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.gguf_conversion import convert_folder
from support.run_model import long_logprobs
from support.same_model import check_reference_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from parley.gguf.folder import unpack_gguf
from parley.model.checkpoint.files import read_config
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable

WIDTH, EXPERTS, SHARED = 32, 8, 2
QWEN = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": SHARED * WIDTH,
    "norm_topk_prob": False,
    "mlp_only_layers": [0],
    "qkv_bias": False,
    "num_hidden_layers": 3,
}
DEEPSEEK = {
    "architectures": ["DeepseekForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "model_type": "deepseek",
    "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": WIDTH,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "rope_scaling": None,
}
KEPT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "dtype",
    "bos_token_id", "eos_token_id")  # fmt: skip


def rename_tensors(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a Qwen2-MoE under DeepSeek's names, each expert by itself."""
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("shared_expert_gate.weight"):
            continue
        if name.endswith("experts.gate_up_proj"):
            for number, weights in enumerate(tensor):
                for part, half in zip(("gate", "up"), weights.chunk(2), strict=True):
                    tensors[name.replace("gate_up_proj", f"{number}.{part}_proj.weight")] = half.clone()
        elif name.endswith("experts.down_proj"):
            for number, weights in enumerate(tensor):
                tensors[name.replace("down_proj", f"{number}.down_proj.weight")] = weights.clone()
        else:
            factor = 0.5 if name.endswith("shared_expert.down_proj.weight") else 1.0
            tensors[name.replace("shared_expert.", "shared_experts.")] = factor * tensor
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the model that Transformers computes, and the folder and the file of the same model as DeepSeek's."""
    home = tmp_path_factory.mktemp("deepseek")
    config = AutoConfig.for_model("qwen2_moe", **(tiny_models.BASE_CONFIG | QWEN))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_models.write_random_model(home / "qwen", model, seed=0, dtype="float32")
    path = home / "qwen" / "model.safetensors"
    stored = load_file(path)
    assert any(name.endswith(".experts.0.gate_proj.weight") or ".experts.gate_up_proj" in name for name in stored)
    for name in stored:
        if name.endswith("shared_expert_gate.weight"):
            stored[name] = torch.zeros_like(stored[name])
    save_file(stored, path, {"format": "pt"})
    folder = home / "deepseek"
    folder.mkdir()
    qwen = json.loads((home / "qwen" / "config.json").read_text())
    rope = {"rope_theta": qwen["rope_parameters"]["rope_theta"]}
    fields = {name: qwen[name] for name in KEPT if name in qwen} | rope | DEEPSEEK
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(rename_tensors(stored), folder / "model.safetensors", {"format": "pt"})
    tiny_models.write_tokenizer(folder)
    tiny_models.write_tokenizer(home / "qwen")
    return home / "qwen", folder, convert_folder(home / "x.gguf", folder, turns_heads=True)


def test_log_probabilities_are_those_of_the_same_model_in_transformers(folders):
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32, attn_implementation="eager")
    check_reference_logprobs(folders[1], model)


def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unpacked = unpack_gguf(folders[2])
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folders[1]))
    assert torch.equal(long_logprobs(unpacked, "float32"), long_logprobs(folders[1], "float32"))


@pytest.mark.parametrize(
    ("name", "value"), [("scoring_func", "sigmoid"), ("moe_layer_freq", 2), ("n_routed_experts", None)]
)
def test_other_layers_are_refused(name, value):
    fields = tiny_models.BASE_CONFIG | DEEPSEEK | {name: value}
    with pytest.raises(Unfusable, match=name if value is not None else "num_experts"):
        read_decoder_config(fields)


def test_the_language_model_of_deepseek_ocr_is_read_from_gguf(folders, tmp_path, monkeypatch):
    """Its queries and keys are in the order of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unpacked = unpack_gguf(convert_folder(tmp_path / "x.gguf", folders[1], arch="deepseek2-ocr"))
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folders[1]))
    assert torch.equal(long_logprobs(unpacked, "float32"), long_logprobs(folders[1], "float32"))
