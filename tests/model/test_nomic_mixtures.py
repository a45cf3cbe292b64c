"""nomic-embed-text-v2, whose encoder has mixtures of experts: from folders and from GGUF files."""

from __future__ import annotations

import json

import pytest
import torch
from support.gguf_encoders import convert_encoder
from support.nomic_mixtures import INNER, nomic_states, write_nomic_mixture
from support.run_model import load_test_runner, serve_requests
from test_encoder import embedding_requests, make_texts, normalized
from test_gguf_encoders import CLS, assert_same_vectors, tokenizer_metadata
from test_pooling import unpack_vectors, write_pooling_config

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import read_model
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.gguf_tensors import read_gguf_entries
from parley.model.load.check import check_model
from parley.model.load.text_encoders.rotary_bert import read_rotary_config
from parley.types import ParleySettings


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def convert(path, folder):
    """Write a folder's encoder as llama.cpp's converter does it."""
    return convert_encoder(path, folder, tokenizer=tokenizer_metadata("t5"), pooling_type=CLS)


def test_vectors_are_those_of_the_definition(tmp_path):
    tensors = write_nomic_mixture(tmp_path)
    runner, info = load_test_runner(tmp_path)
    assert (info.generates, info.dimensions, info.max_model_len) == (False, 48, 128)
    vectors = unpack_vectors(serve_requests(runner, embedding_requests())[0])
    for number, text in enumerate(make_texts()):
        expected = normalized(nomic_states(tensors, text).mean(0))
        torch.testing.assert_close(torch.tensor(vectors[str(number)]), expected, atol=2e-5, rtol=0)


def test_vectors_of_a_gguf_file_are_the_folders(tmp_path):
    folder = tmp_path / "folder"
    write_nomic_mixture(folder, has_bias=False)
    write_pooling_config(folder, pooling_mode="cls")
    file = convert(tmp_path / "x.gguf", folder)
    assert read_model(file).metadata["general.architecture"] == "nomic-bert-moe"
    unpacked = unpack_gguf(file)
    assert check_model(ParleySettings(model=str(unpacked))).load_caveat == ""
    assert_same_vectors(unpacked, folder)


def test_experts_of_a_gguf_file_may_be_blocks(tmp_path):
    write_nomic_mixture(tmp_path / "folder", has_bias=False)
    file = convert_encoder(
        tmp_path / "x.gguf", tmp_path / "folder", kind="Q8_0", tokenizer=tokenizer_metadata("t5"), pooling_type=CLS
    )
    stored, original = Checkpoint(unpack_gguf(file)), Checkpoint(tmp_path / "folder")
    assert read_model(file).tensors["blk.1.ffn_down_exps.weight"].blocks.name == "Q8_0"
    name = "encoder.layers.1.mlp.experts.mlp.w2"
    expected = original.view_tensor(name, 5 * INNER, 48)
    assert 0 < (stored.view_tensor(name, 5 * INNER, 48) - expected).norm() / expected.norm() < 0.01
    assert set(read_gguf_entries(read_model(file))) == {
        tensor_name for tensor_name in original.tensor_names if not tensor_name.endswith("experts.bias")
    }


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"moe_top_k": 9}, "config.json has no valid moe_top_k for a nomic_bert model."),
        ({"moe_top_k": None}, "config.json has no valid moe_top_k for a nomic_bert model."),
        ({"num_experts": 1 << 40}, "config.json has no valid num_experts for a nomic_bert model."),
        ({"moe_every_n_layers": 0.5}, "config.json has no valid moe_every_n_layers for a nomic_bert model."),
        ({"moe_every_n_layers": 0}, "A nomic_bert model with num_experts 5 is not supported."),
        ({"model_type": "new"}, "A new model with num_experts 5 is not supported."),
        ({"moe_normalize_expert_weights": 1.0}, "with moe_normalize_expert_weights 1.0 is not supported."),
        ({"expert_choice_router": True}, "with expert_choice_router True is not supported."),
        ({"num_shared_experts": 1}, "with num_shared_experts 1 is not supported."),
    ],
)
def test_other_mixtures_are_refused(members, sentence, tmp_path):
    write_nomic_mixture(tmp_path, **members)
    with pytest.raises(LoadError, match=sentence):
        read_rotary_config(json.loads((tmp_path / "config.json").read_text()))
