"""Falcon-H1, Nemotron-H and Llama 4 as GGUF files, laid out as llama.cpp does it, against their folders."""

from __future__ import annotations

import pytest
from support import tiny_models
from support.gguf_hybrids import convert_hybrid
from test_gguf_architectures import answers, write_family

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config

LLAMA_4 = {"attention_chunk_size": 8192, "floor_scale": 8192}  # of all models; files do not say it


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["falcon_h1", "falcon_h1 with norms"])
def test_answers_of_falcon_h1_are_the_folders(name, tmp_path):
    """Factors of the config are in the file's weights, so sums are rounded differently."""
    fields = {"mamba_norm_before_gate": False, "mlp_bias": False}
    folder = tiny_models.write_model(tmp_path / "folder", name, dtype="float32", **fields)
    actual, expected = answers(unpack_gguf(convert_hybrid(tmp_path / "x.gguf", folder))), answers(folder)
    assert actual.token_ids == expected.token_ids
    scores = [[score.logprob for score in answer.scores] for answer in (actual, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("types", [None, ["linear_attention", "mlp", "full_attention", "mlp"]])
def test_answers_of_nemotron_hybrids_are_the_folders(types, tmp_path):
    fields = {"layers_block_type": types} if types else {}
    folder = tiny_models.write_model(tmp_path / "folder", "nemotron_h", dtype="float32", **fields)
    assert answers(unpack_gguf(convert_hybrid(tmp_path / "x.gguf", folder))) == answers(folder)


def test_answers_of_llama_4_are_the_folders(tmp_path):
    folder = write_family(tmp_path / "folder", "llama4", LLAMA_4)
    assert answers(unpack_gguf(convert_hybrid(tmp_path / "x.gguf", folder))) == answers(folder)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.head_count_kv", 2, r"^x\.gguf does not say of each layer what it is, so the model's shape is"),
        ("feed_forward_length", [0, 4], r"^x\.gguf does not say of each layer what it is, so the model's shape is"),
        ("ssm.time_step_rank", 7, r"^x\.gguf gives 96 numbers to 7 heads, which do not divide them$"),
        ("ssm.inner_size", 0, r"^x\.gguf gives ssm\.inner_size as 0, so the model's shape is unknown$"),
    ],
)
def test_nemotron_hybrids_of_impossible_sizes_are_refused(key, value, reason, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", "nemotron_h", dtype="float32")
    model = read_model(convert_hybrid(tmp_path / "x.gguf", folder))
    model.metadata[f"nemotron_h_moe.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)
