"""Gemma 4 as files have it beside what Transformers writes: other names of experts, tensors that nothing reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoder_families import FAMILIES
from support.model_zoo.zoo_folder import write_plain
from support.run_model import load_test_runner
from support.tiny_models import BASE_CONFIG, write_random_model, write_tokenizer
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.rope import Unfusable

Tensors = dict[str, torch.Tensor]
TOKENS = list(range(3, 33))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Mapping[str, Path]:
    """The folders of the families of Gemma 4, as Transformers writes them."""
    home = tmp_path_factory.mktemp("gemma4")
    names = ("gemma4 of experts", "gemma4 with inputs of layers")
    return {name: write_plain(home / name, *FAMILIES[name], dtype="float32") for name in names}


def change_tensors(folder: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a folder with other tensors."""
    shutil.copytree(folder, target)
    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


@torch.inference_mode()
def compute_logits(folder: Path) -> torch.Tensor:
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused
    pages = PagedKV(runner.network.kv_layers, 2, torch.float32)
    pages.clear_pages([0, 1])
    batch = PackedBatch.pack_parts([(TOKENS, 0, [0, 1])], torch.device("cpu"))
    return runner.network.compute_logits(runner.network.compute_hidden(batch, pages))


def divide_experts(tensors: Tensors) -> Tensors:
    divided: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        for expert, weight in enumerate(tensor) if prefix.endswith(".experts") else ():
            parts, names = (weight,), ("down_proj",)
            if last == "gate_up_proj":
                parts, names = weight.chunk(2), ("gate_proj", "up_proj")
            for part, part_weight in zip(names, parts, strict=True):
                divided[f"{prefix}.{expert}.{part}.weight"] = part_weight.contiguous()
        if not prefix.endswith(".experts"):
            divided[name] = tensor
    return divided


@pytest.mark.parametrize("block", ["experts", "moe.experts"])
def test_experts_with_tensors_of_their_own_have_the_logits_of_those_in_one(folders, tmp_path, block):
    folder = folders["gemma4 of experts"]

    def rename(tensors: Tensors) -> Tensors:
        return {name.replace(".experts.", f".{block}."): tensor for name, tensor in divide_experts(tensors).items()}

    divided = change_tensors(folder, tmp_path / "divided", rename)
    assert torch.equal(compute_logits(divided), compute_logits(folder))


def test_unused_keys_of_layers_with_shared_keys_are_ignored(folders, tmp_path):
    folder = folders["gemma4 with inputs of layers"]

    def add_keys(tensors: Tensors) -> Tensors:
        names = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
        added = {f"model.layers.5.{name}": torch.full_like(tensors[f"model.layers.2.{name}"], 7.0) for name in names}
        assert not added.keys() & tensors.keys()
        return tensors | added

    assert torch.equal(compute_logits(change_tensors(folder, tmp_path / "more", add_keys)), compute_logits(folder))


def test_the_language_model_of_a_multimodal_model_has_the_logits_of_transformers(tmp_path):
    config = CONFIG_MAPPING["gemma4"](
        text_config={**BASE_CONFIG, **FAMILIES["gemma4 with inputs of layers"][1], "model_type": "gemma4_text"},
        vision_config={"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
                       "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        audio_config=None,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    write_random_model(tmp_path, model, seed=0, dtype="float32")
    write_tokenizer(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (compute_logits(tmp_path) - expected).norm() / expected.norm() < 1e-5


def config_of(folder: Path, **members: Any) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()) | members


ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "per_layer_config": None}, "has a window"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "heads of different sizes"),
        ({"per_layer_config": {"2": {"head_dim": 64}}}, "heads of different sizes"),
        ({"per_layer_config": {"2": {"sliding_window": 64}, "5": {"sliding_window": 64}}}, "gives sliding_window"),
        ({"per_layer_config": {"2": {"head_dim": 45}, "5": {"head_dim": 45}}}, "do not divide"),
        ({"num_kv_shared_layers": 5}, "only its first 1 layers"),
        ({"rope_parameters": ROPES | {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}, "yarn"),
        ({"vocab_size_per_layer_input": 600}, "only 600 of its 640 tokens"),
    ],
)
def test_configs_with_other_layers_are_left_to_transformers(folders, members, reason):
    config = config_of(folders["gemma4 with inputs of layers"])
    read_decoder_config(config)
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config(config | members)


def test_members_of_published_configs_mean_those_that_transformers_writes(folders):
    written = config_of(folders["gemma4 with inputs of layers"])
    published = {key: value for key, value in written.items() if key != "per_layer_config"} | {"global_head_dim": 48}
    assert read_decoder_config(published) == read_decoder_config(written)
    eq = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    sizes = read_decoder_config(published | eq).layers[5].head_sizes
    assert sizes is not None and (sizes.kv_heads, sizes.dim) == (1, 48)
