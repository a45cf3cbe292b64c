"""Mamba 1 and 2, Falcon Mamba and Jamba as GGUF files, laid out as llama.cpp does it, against their folders."""

from __future__ import annotations

import pytest
from support import tiny_models
from support.gguf_mamba import convert_mamba
from test_gguf_architectures import answers

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [("mamba", {}), ("falcon_mamba", {}), ("mamba2", {}), ("jamba", {})],
)
def test_answers_are_nearly_the_folders(name, fields, tmp_path):
    """The rates of decay are stored in place of their logarithms, so they may be rounded differently."""
    folder = tiny_models.write_model(tmp_path / "folder", name, dtype="float32", **fields)
    actual, expected = answers(unpack_gguf(convert_mamba(tmp_path / "x.gguf", folder))), answers(folder)
    assert actual.token_ids == expected.token_ids
    scores = [[score.logprob for score in answer.scores] for answer in (actual, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        (
            "mamba2",
            "ssm.inner_size",
            96,
            r"^x\.gguf gives 96 numbers to its heads, which are no multiple of the width$",
        ),
        ("mamba2", "ssm.inner_size", 126, r"^x\.gguf gives 126 numbers to 4 heads, which do not divide them$"),
        ("jamba", "ssm.inner_size", 96, r"^x\.gguf gives ssm\.inner_size as 96, which is no multiple of 64$"),
        ("jamba", "attention.head_count_kv", [2, 2, 0], r"^x\.gguf has attention in layers that its architecture does"),
        ("jamba", "attention.head_count_kv", 2, r"^x\.gguf does not say of each layer whether it has attention"),
    ],
)
def test_impossible_sizes_are_refused(name, key, value, reason, tmp_path):
    folder = tiny_models.write_model(tmp_path / "folder", name, dtype="float32")
    model = read_model(convert_mamba(tmp_path / "x.gguf", folder))
    model.metadata[f"{name}.{key}"] = value
    with pytest.raises(GgufError, match=reason):
        model_config(model)
