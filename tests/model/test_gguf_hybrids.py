"""Falcon-H1, Nemotron-H and Llama 4 as GGUF files, laid out as llama.cpp does it, against their folders."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support import tiny_models
from support.gguf_hybrids import convert_hybrid
from test_gguf_architectures import answers, write_family

from parley.gguf.architecture import shortest_number
from parley.gguf.architectures import complete_llama_4
from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, GgufModel, read_model
from parley.gguf.latent_architectures import complete_deepseek_3
from parley.gguf.model_config import model_config
from parley.gguf.state_architectures import complete_axes

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


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("nemotron_h", None),
        ("nemotron_h", ["linear_attention", "mlp", "full_attention", "mlp"]),
        ("nemotron_h with latents of experts", None),
    ],
)
def test_answers_of_nemotron_hybrids_are_the_folders(name, types, tmp_path):
    fields = {"layers_block_type": types} if types else {}
    folder = tiny_models.write_model(tmp_path / "folder", name, dtype="float32", **fields)
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


LATENTS = {
    "rope.dimension_count": 8, "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("complete", "fields", "reason"),
    [
        (complete_llama_4, {}, r"^x\.gguf gives expert_count as None, so the model's shape is unknown$"),
        (complete_deepseek_3, LATENTS, r"^x\.gguf gives expert_count as None, so the model's shape is unknown$"),
        (complete_axes, {"rope.dimension_sections": 8}, r"^x\.gguf gives rope\.dimension_sections as 8; it is a list$"),
    ],
)
def test_a_file_without_the_numbers_of_its_architecture_is_refused(complete, fields, reason):
    metadata = {"general.architecture": "a", **{f"a.{key}": value for key, value in fields.items()}}
    with pytest.raises(GgufError, match=reason):
        complete(GgufModel([Path("x.gguf")], metadata, {}), {"rope_scaling": {}, "num_attention_heads": 4})


@pytest.mark.parametrize("number", [1e308, -1e308, 2.0**128, math.inf])
def test_a_number_beyond_float32_stays_as_it_is(number):
    assert shortest_number(number) == number
