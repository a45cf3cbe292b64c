"""The check of a model without reading its weights: what it accepts loads, and it refuses in the engine's words."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.decoder_families import LATER_FAMILIES
from support.lora_adapters import write_adapter
from support.model_zoo.zoo_folder import write_plain

from parley.model.load import meta_values
from parley.model.load.check import LAYERS_UNKNOWN, LOGITS_UNKNOWN, STEP_UNKNOWN, check_model, unchecked_clause
from parley.model.load.loader import LoadError, load_runner
from parley.types import ParleySettings


@pytest.fixture
def folder_copy(tmp_path):
    """A model that can be changed."""
    return shutil.copytree(tiny_models.model_folder("llama"), tmp_path / "copy")


def truncate_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])


def check_agrees_with_engine(settings):
    """Expect the engine to refuse a model, and the check to do so in the same words."""
    with pytest.raises(LoadError) as refused:
        load_runner(settings, lambda stage, fraction: None)
    with pytest.raises(LoadError, match=f"^{re.escape(str(refused.value))}$"):
        check_model(settings)


def change_config(**fields):
    def change(folder):
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    return change


def change_tensors(change):
    def save_changed(folder):
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        change(tensors)
        save_file(tensors, weights, {"format": "pt"})

    return save_changed


def drop_tensor(name):
    return change_tensors(lambda tensors: tensors.pop(name))


def shorten_tensor(name):
    return change_tensors(lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


@pytest.mark.parametrize(
    ("damage", "settings"),
    [
        (truncate_weights, {}),
        (drop_tensor("model.layers.1.mlp.up_proj.weight"), {}),
        (shorten_tensor("model.layers.0.self_attn.k_proj.weight"), {}),
        (shorten_tensor("model.layers.1.input_layernorm.weight"), {}),
        (shorten_tensor("model.embed_tokens.weight"), {}),
        (change_config(num_hidden_layers=9), {}),
        (change_config(num_hidden_layers=1 << 30), {}),
        (change_config(vocab_size=641), {}),
        (change_config(model_type="t5"), {}),
        (change_config(model_type="doge"), {}),
        (change_config(model_type="moshi"), {}),
        (change_config(quantization_config={"quant_method": "gptq", "bits": 3}), {}),
        (change_config(hidden_act="xielu"), {"quantization": "int8"}),
        (change_config(), {"max_model_len": 9999999}),
        (change_config(max_position_embeddings=1 << 40), {"max_model_len": 1 << 25}),
    ],
    ids=["truncated", "tensor", "shape", "norm", "embedding", "layers", "a billion layers", "vocabulary",
         "architecture", "doge", "moshi", "bits", "quantization", "context", "length"],
)  # fmt: skip
def test_check_refuses_what_the_engine_refuses(folder_copy, damage, settings):
    damage(folder_copy)
    check_agrees_with_engine(ParleySettings(model=str(folder_copy), **settings))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "mistral", "deepseek_v3"])
def test_check_accepts_a_model_that_the_engine_loads(architecture):
    assert check_model(ParleySettings(model=str(tiny_models.model_folder(architecture)))).load_caveat == ""


def test_check_refuses_less_memory_than_a_page(folder_copy):
    check_agrees_with_engine(ParleySettings(model=str(folder_copy), kv_memory=1000))


def test_check_refuses_computed_positions_that_do_not_fit_into_memory(tmp_path):
    """Their number is that of the config; no tensor in the file shows that it is wrong."""
    folder = write_plain(tmp_path / "xglm", *LATER_FAMILIES["xglm"])
    change_config(max_position_embeddings=10**18)(folder)
    with pytest.raises(LoadError, match=r"The embeddings of 10{18} positions \(max_position_embeddings\) take \d+ MiB"):
        check_model(ParleySettings(model=str(folder)))


def test_check_refuses_an_adapter_that_is_missing(folder_copy, tmp_path):
    with pytest.raises(LoadError, match=r"adapter one \(.*/missing\) cannot be loaded: There is no adapter folder"):
        check_model(ParleySettings(model=str(folder_copy), adapters={"one": str(tmp_path / "missing")}))
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"one\.gguf is in GGUF; adapters are read as PEFT folders"):
        check_model(ParleySettings(model=str(folder_copy), adapters={"one": str(tmp_path / "one.gguf")}))


@pytest.mark.parametrize("architecture", ["beam", "aria_text"])
def test_check_leaves_only_the_logits_of_transformers_models_unchecked(architecture):
    assert check_model(ParleySettings(model=str(tiny_models.model_folder(architecture)))).load_caveat == LOGITS_UNKNOWN


def test_check_says_that_the_largest_step_of_a_gpu_is_not_counted():
    model = ParleySettings(model="m")
    clauses = [unchecked_clause(torch.device(kind), model, is_fused=True) for kind in ("cpu", "cuda")]
    assert clauses == ["", STEP_UNKNOWN]
    assert unchecked_clause(torch.device("cuda"), ParleySettings(model="m", kv_memory=1 << 30), is_fused=True) == ""
    both = unchecked_clause(torch.device("cuda"), model, is_fused=False)
    assert LOGITS_UNKNOWN in both and STEP_UNKNOWN in both


def test_check_leaves_layers_unchecked_whose_code_depends_on_values(tmp_path, monkeypatch):
    fields = {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(tiny_models.ARCHITECTURES, "jetmoe", ("jetmoe", tiny_models.BASE_CONFIG | fields))
    folder = tiny_models.write_model(tmp_path / "jetmoe", "jetmoe")
    monkeypatch.setattr(meta_values, "SCALAR_OPERATORS", set())
    assert check_model(ParleySettings(model=str(folder))).load_caveat == LAYERS_UNKNOWN


@pytest.mark.parametrize(
    ("damage", "settings"),
    [
        (drop_tensor("model.layers.1.self_attn.k_proj.weight"), {}),
        (shorten_tensor("model.norm.weight"), {}),
        (change_config(num_hidden_layers=3), {}),
        (change_config(num_attention_heads=8), {}),
        (change_config(), {"kv_memory": 1000}),
        (change_config(), {"quantization": "int8"}),
    ],
    ids=["tensor", "norm", "layers", "heads", "memory", "quantization"],
)
def test_check_refuses_what_the_engine_refuses_through_transformers(tmp_path, damage, settings):
    folder = shutil.copytree(tiny_models.model_folder("aria_text"), tmp_path / "copy")
    damage(folder)
    check_agrees_with_engine(ParleySettings(model=str(folder), **settings))


@pytest.mark.parametrize(
    ("kind", "fields"), [("diffllama", {}), ("rwkv", {}), ("roberta", {"is_decoder": True, "pad_token_id": 1})]
)
def test_check_refuses_layers_that_cannot_use_kv_pages(kind, fields, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny_models.ARCHITECTURES, kind, (kind, tiny_models.BASE_CONFIG | fields))
    check_agrees_with_engine(ParleySettings(model=str(tiny_models.write_model(tmp_path / kind, kind))))


def test_check_refuses_an_adapter_that_does_not_fit_a_model_of_transformers(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", tiny_models.model_folder("llama"), 1)
    model = str(tiny_models.model_folder("aria_text"))
    with pytest.raises(LoadError, match="which is not a linear layer that adapters may change here"):
        check_model(ParleySettings(model=model, adapters={"one": str(adapter)}))


def test_check_refuses_a_damaged_draft_model(folder_copy):
    model = str(tiny_models.model_folder("llama"))
    settings = ParleySettings(model=model, speculate=f"draft={folder_copy}")
    assert check_model(settings).load_caveat == ""
    shorten_tensor("model.norm.weight")(folder_copy)
    check_agrees_with_engine(settings)
