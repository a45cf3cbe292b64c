"""Muse Glimmer as a GGUF file, laid out as llama.cpp's converter does it (conversion/muse_glimmer.py)."""

from __future__ import annotations

import json
import re

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support import gguf_files
from support.gguf_conversion import turn_heads
from support.gguf_files import GEMMA_NAMES, NAMES
from support.model_zoo.plain_folders import FAMILIES
from support.model_zoo.zoo_folder import write_plain
from test_gguf_architectures import answers

from parley.gguf.folder import unpack_gguf

LAYER_NAMES = NAMES | GEMMA_NAMES | {"self_attn.gate_proj": "attn_gate"}


def convert_muse(path, folder):
    """Write a folder's language model as one file of float32."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    writer = gguf.GGUFWriter(path, "muse-glimmer")
    gguf_files.add_shape(writer, config)  # with final_logit_softcapping
    gguf_files.add_tokenizer(writer, folder)
    writer.add_logit_scale(config["output_multiplier"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    for name, tensor in turn_heads(config, load_file(folder / "model.safetensors")).items():
        if "vision" in name:
            continue
        name = name.replace("model.language_model.", "model.")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        written = f"blk.{match[1]}.{LAYER_NAMES[match[2]]}" if match else NAMES[name.removesuffix(".weight")]
        tensor = tensor.float() + name.endswith("layernorm.weight")
        writer.add_tensor(written + ".weight", tensor.contiguous().numpy())
    for layer in range(config["num_hidden_layers"]):
        ones = torch.ones(config["head_dim"])
        writer.add_tensor(f"blk.{layer}.attn_q_norm.weight", (ones * config["qk_scale_factor"]).numpy())
        writer.add_tensor(f"blk.{layer}.attn_k_norm.weight", ones.numpy())
    gguf_files.close_writer(writer)
    return path


def test_answers_of_muse_glimmer_are_the_folders(tmp_path, monkeypatch):
    """Weights of norms and factors of scores are rounded elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_plain(tmp_path / "folder", *FAMILIES["muse_glimmer"], dtype="float32")
    actual, expected = (
        answers(model_folder) for model_folder in (unpack_gguf(convert_muse(tmp_path / "x.gguf", folder)), folder)
    )
    assert actual.token_ids == expected.token_ids
    scores = [[score.logprob for score in answer.scores] for answer in (actual, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
